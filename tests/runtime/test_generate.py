"""The loop: what the model is fed, when it ends, what text comes of it, and what it counts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest

from ds4q.runtime.errors import (
    ConfigError,
    ContextError,
    LogitsError,
    RunError,
    SamplingError,
    TokenError,
)
from ds4q.runtime.generate import Generation, generate, metadata_object, stop_ids
from ds4q.runtime.sampling import Sampler
from ds4q.runtime.text.tokenizer import Tokenizer

TINY = Path(__file__).parents[1] / "data" / "ds4-tiny"
BOS, EOS, USER, ASSISTANT = 256, 257, 258, 259
VOCAB = 512
EMOJI = "😀".encode()


class Script:
    """An engine that answers with the given tokens and notes what it was fed."""

    def __init__(self, answers: Sequence[int | BaseException]) -> None:
        self.vocab_size = VOCAB
        self.fed: list[list[int]] = []
        self._answers = iter(answers)

    def new_state(self) -> list[int]:
        return []

    def forward(
        self, state: list[int], ids: Sequence[int], logits: Literal["last"] = "last"
    ) -> npt.NDArray[np.float32]:
        self.fed.append(list(ids))
        answer = next(self._answers)
        if isinstance(answer, BaseException):
            raise answer
        out = np.zeros((1, VOCAB), dtype=np.float32)
        out[0, answer] = 1 if answer >= 0 else np.nan
        return out


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer((TINY / "tokenizer.json").read_text(encoding="utf-8"))


def start(answers: Sequence[int | BaseException], **options: Any) -> Generation:
    return generate(
        options.pop("engine", None) or Script(answers),
        options.pop("prompt_ids", [BOS, 1, 2]),
        **{
            "max_tokens": len(answers),
            "context_tokens": 1000,
            "sampler": Sampler(temperature=0, top_p=1, seed=0),
            "stop_ids": {EOS, BOS},
            **options,
        },
    )


def test_prompt_goes_first_then_token_by_token() -> None:
    engine = Script([7, 8, 9])
    generation = start([7, 8, 9], engine=engine)
    assert engine.fed == []
    assert [step.id for step in generation] == [7, 8, 9]
    assert engine.fed == [[BOS, 1, 2], [7], [8]]
    assert generation.ids == [7, 8, 9]


class Greedy(Script):
    """Also picks the next id where its logits are."""

    def __init__(self, answers: Sequence[int | BaseException]) -> None:
        super().__init__(answers)
        self.picked = 0

    def next_id(self, state: Any, ids: Sequence[int]) -> int:
        self.picked += 1
        return int(self.forward(state, ids)[0].argmax())


def test_only_a_greedy_sampler_leaves_the_choice_to_the_engine() -> None:
    engine = Greedy([7, 8, 9])
    generation = start([7, 8, 9], engine=engine)
    assert [step.id for step in generation] == [7, 8, 9]
    assert engine.picked == 3
    assert engine.fed == [[BOS, 1, 2], [7], [8]]
    assert generation.timings.first_token_s >= generation.timings.prefill_s > 0
    for sampler in (Sampler(temperature=1, top_p=1, seed=0), lambda logits: int(logits.argmax())):
        engine = Greedy([7, 8, 9])
        assert len(list(start([7, 8, 9], engine=engine, sampler=sampler))) == 3
        assert engine.picked == 0


def test_stop_token_ends_and_has_no_text(tokenizer: Tokenizer) -> None:
    generation = start([*b"hi", EOS, 99], tokenizer=tokenizer)
    assert [(step.id, step.text) for step in generation] == [(104, "h"), (105, "i"), (EOS, "")]
    assert generation.finish_reason == "stop"
    assert generation.text == "hi"
    assert generation.ids == [*b"hi", EOS]


@pytest.mark.parametrize("first", [EOS, BOS])
def test_stop_at_once(first: int, tokenizer: Tokenizer) -> None:
    generation = start([first, 1], tokenizer=tokenizer)
    assert [step.id for step in generation] == [first]
    assert (generation.finish_reason, generation.text) == ("stop", "")


def test_limit_ends_with_length(tokenizer: Tokenizer) -> None:
    generation = start([*b"abcdef"], max_tokens=3, tokenizer=tokenizer)
    list(generation)
    assert (generation.finish_reason, generation.text) == ("length", "abc")


def test_stop_on_the_last_token_is_a_stop() -> None:
    generation = start([1, EOS], max_tokens=2)
    list(generation)
    assert generation.finish_reason == "stop"


def test_context_bounds_the_new_tokens() -> None:
    generation = start([1, 2, 3, 4], max_tokens=10**9, context_tokens=5)
    assert len(list(generation)) == 2
    assert generation.finish_reason == "length"


@pytest.mark.parametrize("context_tokens", [3, 2, 0])
def test_prompt_that_fills_the_context(context_tokens: int) -> None:
    with pytest.raises(ContextError, match=f"fewer than {context_tokens} tokens, found 3"):
        start([1], context_tokens=context_tokens)


def test_ignored_stops_go_on_without_text(tokenizer: Tokenizer) -> None:
    generation = start([97, EOS, 98, BOS], ignore_stop=True, tokenizer=tokenizer)
    list(generation)
    assert generation.ids == [97, EOS, 98, BOS]
    assert (generation.finish_reason, generation.text) == ("length", "ab")


def test_other_control_tokens_are_shown(tokenizer: Tokenizer) -> None:
    generation = start([260, 97, 261, 300], tokenizer=tokenizer)
    list(generation)
    assert generation.text == "<think>a</think>"


def test_no_tokenizer_no_text() -> None:
    generation = start([97, 98])
    assert [step.text for step in generation] == ["", ""]
    assert generation.text == ""


def test_c21_character_split_over_tokens(tokenizer: Tokenizer) -> None:
    generation = start([*EMOJI, EOS], tokenizer=tokenizer)
    assert [step.text for step in generation] == ["", "", "", "😀", ""]
    assert generation.text == "😀"


def test_c21_limit_in_mid_character(tokenizer: Tokenizer) -> None:
    generation = start([97, *EMOJI], max_tokens=3, tokenizer=tokenizer)
    assert [step.text for step in generation] == ["a", "", "�"]
    assert generation.text == "a�"


def test_c21_stop_in_mid_character(tokenizer: Tokenizer) -> None:
    generation = start([0xE4, EOS], tokenizer=tokenizer)
    assert [step.text for step in generation] == ["", "�"]
    assert generation.text == "�"


def test_c21_streamed_text_is_the_plain_text(tokenizer: Tokenizer) -> None:
    ids = [*"naïve 你好 😀".encode(), 0xFF, 0x80, 97, 0xF0, 0x9F]
    generation = start(ids, tokenizer=tokenizer)
    streamed = "".join(step.text for step in generation)
    assert streamed == generation.text == tokenizer.decode(ids)


def test_interrupt_keeps_what_there_is(tokenizer: Tokenizer) -> None:
    generation = start([97, 0xE4, KeyboardInterrupt()], tokenizer=tokenizer)
    shown: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        shown.extend(step.text for step in generation)
    assert shown == ["a", ""]
    assert generation.ids == [97, 0xE4]
    assert generation.finish_reason is None
    assert (generation.end(), generation.end()) == ("�", "")
    assert generation.text == "a�"


def test_not_finite_logits_end_in_an_error() -> None:
    generation = start([1, -1])
    with pytest.raises(LogitsError):
        list(generation)
    assert generation.ids == [1]


@pytest.mark.parametrize(
    ("prompt_ids", "message"),
    [
        ([], "no tokens"),
        ([1, VOCAB], r"token 1 of the prompt .* expected 0 to 511, found 512"),
        ([-1], "token 0 of the prompt"),
    ],
)
def test_bad_prompt(prompt_ids: list[int], message: str) -> None:
    with pytest.raises(TokenError, match=message):
        start([1], prompt_ids=prompt_ids)


@pytest.mark.parametrize("max_tokens", [0, -1])
def test_no_token_wanted(max_tokens: int) -> None:
    with pytest.raises(SamplingError, match="max_tokens"):
        start([1], max_tokens=max_tokens)


def test_usage_counts() -> None:
    generation = start([7, 8, EOS])
    list(generation)
    assert generation.usage() == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}


def test_times_are_of_the_model_and_not_of_the_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that ticks once a call: each measured stretch is as long as its calls are many."""
    ticks = iter(range(1000))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(ticks)))
    generation = start([7, 8, 9])
    for _ in generation:
        for _ in range(50):
            next(ticks)
    assert generation.rates() == {
        "prefill_s": 1.0,
        "first_token_s": 2.0,
        "decode_s": 2.0,
        "prefill_tokens_per_s": 3.0,
        "decode_tokens_per_s": 1.0,
    }


def test_rates_before_anything_ran() -> None:
    rates = start([1]).rates()
    assert rates["prefill_tokens_per_s"] is None
    assert rates["decode_tokens_per_s"] is None
    json.dumps(rates)


# ------------------------------------------------------------------ stop tokens


def test_stop_tokens_of_the_tiny_model(tokenizer: Tokenizer) -> None:
    metadata = {
        "config": json.loads((TINY / "config.json").read_text(encoding="utf-8")),
        "generation_config": json.loads(
            (TINY / "generation_config.json").read_text(encoding="utf-8")
        ),
    }
    assert stop_ids(metadata, tokenizer) == {BOS, EOS, USER, ASSISTANT}
    assert stop_ids(metadata, None) == {EOS}


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, {1}),
        ({"generation_config": None, "config": {}}, {1}),
        ({"config": {"eos_token_id": 5}}, {5}),
        ({"generation_config": {"eos_token_id": 7}, "config": {"eos_token_id": 5}}, {7}),
        ({"generation_config": {"eos_token_id": [7, 9]}}, {7, 9}),
        ({"generation_config": {"eos_token_id": None}, "config": {"eos_token_id": 5}}, {5}),
        ({"generation_config": {"eos_token_id": 0}}, {0}),
        ({"config": {"eos_token_id": [5, 6], "vocab_size": 7}}, {5, 6}),
    ],
)
def test_end_of_sequence_ids(metadata: dict[str, Any], expected: set[int]) -> None:
    assert stop_ids(metadata, None) == expected


@pytest.mark.parametrize("bad", ["1", True, 1.0, -1, ["1"], [[1]], {}])
def test_malformed_end_of_sequence(bad: Any) -> None:
    with pytest.raises(ConfigError, match="generation_config key eos_token_id"):
        stop_ids({"generation_config": {"eos_token_id": bad}}, None)


def test_metadata_that_is_no_object() -> None:
    assert metadata_object({"a": None}, "a") == {}
    with pytest.raises(RunError, match="metadata key a: expected a JSON object, found list"):
        metadata_object({"a": [1]}, "a")
