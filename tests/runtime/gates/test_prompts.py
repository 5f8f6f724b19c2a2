"""Prompts of the neutrality gate: lengths about the window, files of texts and ids."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ds4q.artifact.errors import Ds4qError
from ds4q.runtime.config import ModelConfig, parse_config
from ds4q.runtime.gates import prompts
from ds4q.runtime.text.tokenizer import Tokenizer
from tests.runtime import artifacts
from tests.runtime.gates.tiny import TINY


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return parse_config(artifacts.config_of(TINY))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = Tokenizer.from_metadata({"tokenizer": (TINY / "tokenizer.json").read_text("utf-8")})
    assert found is not None
    return found


def test_lengths_lie_about_the_window_and_leave_room(config: ModelConfig) -> None:
    assert prompts.lengths(config, 4096) == [1, 7, 63, 64, 65, 300]
    assert prompts.lengths(config, 65) == [1, 7, 63, 64]
    assert prompts.lengths(config, 2) == [1]
    assert prompts.lengths(replace(config, sliding_window=1), 4096) == [1, 2, 7, 300]


def test_built_in_prompts_are_text_after_bos_each_from_another_place(
    config: ModelConfig, tokenizer: Tokenizer
) -> None:
    found = prompts.built_in(config, tokenizer, 4096)
    assert [len(ids) for ids in found] == prompts.lengths(config, 4096)
    bos = found[0][0]
    assert all(ids[0] == bos for ids in found)
    assert len({tuple(ids[1:7]) for ids in found[1:]}) == 5
    again = prompts.built_in(config, tokenizer, 4096)
    assert again == found
    long = replace(config, sliding_window=3000)
    assert max(map(len, prompts.built_in(long, tokenizer, 4096))) == 3001


def test_without_a_tokenizer_prompts_are_seeded_ids(config: ModelConfig) -> None:
    found = prompts.built_in(config, None, 4096)
    assert [len(ids) for ids in found] == prompts.lengths(config, 4096)
    assert found == prompts.built_in(config, None, 4096)
    assert all(0 <= token < config.vocab_size for ids in found for token in ids)
    assert len(set(found[-1])) > 100


def read(path: Path, tokenizer: Tokenizer | None) -> list[list[int]]:
    return prompts.read(path, tokenizer=tokenizer, vocab_size=512, positions=20)


def test_a_file_holds_texts_and_ids(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"text": "Hi"}\n\n{"ids": [5, 0, 511], "name": "x"}\n', encoding="utf-8")
    first, second = read(path, tokenizer)
    assert first == [first[0], *tokenizer.encode("Hi")]
    assert second == [5, 0, 511]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", "no prompts"),
        ("{", "line 1: not JSON"),
        ("[1, 2]", "line 1: not a prompt"),
        ("{}", "line 1: not a prompt"),
        (json.dumps({"text": "a", "ids": [1]}), "line 1: not a prompt"),
        (json.dumps({"text": 3}), "line 1: not a prompt"),
        (json.dumps({"ids": [True]}), "line 1: not a prompt"),
        (json.dumps({"ids": "12"}), "line 1: not a prompt"),
        (json.dumps({"ids": []}), "line 1: the prompt has no tokens"),
        (json.dumps({"ids": [512]}), "line 1: token 0 of the prompt is not in the vocabulary"),
        ("[" * 99999, "line 1: not JSON"),
        (json.dumps({"ids": [1] * 20}), "line 1: a prompt that fills the context"),
        (json.dumps({"text": "a"}), "line 1: the artifact has no tokenizer"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(line: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(line + "\n", encoding="utf-8")
    with pytest.raises(Ds4qError, match=says):
        read(path, None)
