"""Owns the loop from prompt ids to new ids and their text. Knows no prompt format and no weights.

The prompt goes through the model once, then every new token by itself, until a stop token or a
limit. Times are those of the model and the sampler, not of whoever takes the tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from ds4q.runtime.errors import ConfigError, ContextError, SamplingError, TokenError
from ds4q.runtime.text.decode import TextStream
from ds4q.runtime.text.pieces import ASSISTANT, BOS, USER
from ds4q.runtime.text.tokenizer import Tokenizer

DEFAULT_EOS = 1  # DeepSeek's, where neither config names one
FinishReason = Literal["stop", "length"]


class Engine(Protocol):
    """What generation needs of a loaded model."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""

    def new_state(self) -> Any:
        """Empty caches for one sequence."""

    def forward(
        self, state: Any, ids: Sequence[int], logits: Literal["last"] = "last"
    ) -> npt.NDArray[np.float32]:
        """Append ``ids`` to ``state`` and return the logits [1, vocab] of the last one."""


@runtime_checkable
class GreedyEngine(Protocol):
    """A model that can pick the most likely token where its logits are."""

    def next_id(self, state: Any, ids: Sequence[int]) -> int:
        """Append ``ids`` to ``state`` and return the id of the last one's largest logit.

        The lower id on ties; raises ``LogitsError`` where there is no largest.
        """


@dataclass(frozen=True, slots=True)
class Step:
    """One new token, and the text that it completes (none in mid-character, none for a stop)."""

    id: int
    text: str


@dataclass(slots=True)
class Timings:
    """Seconds. The first token comes out of the prefill; ``decode_s`` is that of all others."""

    prefill_s: float = 0.0
    first_token_s: float = 0.0
    decode_s: float = 0.0


class Generation:
    """A running generation: iterate over it for its steps; ids, text and times grow along.

    Attributes
    ----------
    ids : new token ids so far, a stop token included
    text : their text so far
    finish_reason : None until it has ended by itself
    """

    def __init__(
        self,
        engine: Engine,
        prompt_ids: Sequence[int],
        *,
        limit_tokens: int,
        sampler: Callable[[npt.NDArray[np.float32]], int],
        stop_ids: Collection[int],
        ignore_stop: bool,
        stream: TextStream | None,
    ) -> None:
        self._engine = engine
        self._prompt_ids = prompt_ids
        self._limit_tokens = limit_tokens
        self._sampler = sampler
        self._next_id = None
        if getattr(sampler, "greedy", False) and isinstance(engine, GreedyEngine):
            self._next_id = engine.next_id  # no logits have to come to the sampler
        self._stop_ids = frozenset(stop_ids)
        self._ignore_stop = ignore_stop
        self._stream = stream
        self.ids: list[int] = []
        self.text = ""
        self.finish_reason: FinishReason | None = None
        self.timings = Timings()

    def __iter__(self) -> Iterator[Step]:
        started = time.perf_counter()
        state = self._engine.new_state()
        if self._next_id is not None:
            token = self._next_id(state, self._prompt_ids)
            self.timings.prefill_s = time.perf_counter() - started
        else:
            logits = self._engine.forward(state, self._prompt_ids)
            self.timings.prefill_s = time.perf_counter() - started
            token = self._sampler(logits[0])
        self.timings.first_token_s = time.perf_counter() - started
        while True:
            yield self._take(token)
            if self.finish_reason is not None:
                return
            started = time.perf_counter()
            if self._next_id is not None:
                token = self._next_id(state, [token])
            else:
                token = self._sampler(self._engine.forward(state, [token])[0])
            self.timings.decode_s += time.perf_counter() - started

    def _take(self, token: int) -> Step:
        self.ids.append(token)
        text = ""
        if token not in self._stop_ids:
            text = self._stream.push(token) if self._stream else ""
        elif not self._ignore_stop:
            self.finish_reason = "stop"
        if self.finish_reason is None and len(self.ids) == self._limit_tokens:
            self.finish_reason = "length"
        self.text += text
        if self.finish_reason is not None:
            text += self.end()
        return Step(token, text)

    def end(self) -> str:
        """The text that ends a sequence in mid-character, for one that is abandoned."""
        rest = self._stream.finish() if self._stream else ""
        self.text += rest
        return rest

    def usage(self) -> dict[str, int]:
        """Token counts, named as in the OpenAI API."""
        prompt, completion = len(self._prompt_ids), len(self.ids)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }

    def rates(self) -> dict[str, float | None]:
        """Times with tokens per second of both phases; None where there is nothing to divide."""
        times = self.timings
        decoded = len(self.ids) - 1
        return {
            "prefill_s": times.prefill_s,
            "first_token_s": times.first_token_s,
            "decode_s": times.decode_s,
            "prefill_tokens_per_s": _rate(len(self._prompt_ids), times.prefill_s),
            "decode_tokens_per_s": _rate(decoded, times.decode_s),
        }


def generate(
    engine: Engine,
    prompt_ids: Sequence[int],
    *,
    max_tokens: int,
    context_tokens: int,
    sampler: Callable[[npt.NDArray[np.float32]], int],
    stop_ids: Collection[int] = (),
    ignore_stop: bool = False,
    tokenizer: Tokenizer | None = None,
) -> Generation:
    """Start a generation; nothing runs before its first step is asked for.

    Parameters
    ----------
    max_tokens : at most so many new tokens, and never more than the context leaves
    context_tokens : positions that prompt and new tokens may take together
    sampler : logits [vocab] -> token id
    stop_ids : tokens that end the generation and have no text
    ignore_stop : go on after stop tokens, up to the limit
    tokenizer : for the text of the steps; None leaves it empty

    Raises
    ------
    SamplingError : no token is wanted
    TokenError : no prompt, or an id outside the vocabulary
    ContextError : the prompt leaves no room for a token
    """
    if max_tokens < 1:
        raise SamplingError("max_tokens", expected="at least 1", found=max_tokens)
    room = room_after(prompt_ids, engine.vocab_size, context_tokens)
    return Generation(
        engine,
        prompt_ids,
        limit_tokens=min(max_tokens, room),
        sampler=sampler,
        stop_ids=stop_ids,
        ignore_stop=ignore_stop,
        stream=TextStream(tokenizer.token_bytes) if tokenizer else None,
    )


def room_after(prompt_ids: Sequence[int], vocab_size: int, context_tokens: int) -> int:
    """How many new tokens a context has room for after a prompt that is sound; at least one.

    Raises
    ------
    TokenError : as ``check_prompt``
    ContextError : there is room for none
    """
    check_prompt(prompt_ids, vocab_size)
    room = context_tokens - len(prompt_ids)
    if room < 1:
        raise ContextError(
            "the prompt fills the context",
            expected=f"fewer than {context_tokens} tokens",
            found=len(prompt_ids),
            remedy="shorten the prompt",
        )
    return room


def check_prompt(ids: Sequence[int], vocab_size: int) -> None:
    """Refuse a prompt of no tokens, or with one outside the vocabulary; ``TokenError``."""
    if not ids:
        raise TokenError("the prompt has no tokens")
    for place, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            raise TokenError(
                f"token {place} of the prompt is not in the vocabulary",
                expected=f"0 to {vocab_size - 1}",
                found=token,
            )


def stop_ids(
    metadata: Mapping[str, Any], tokenizer: Tokenizer | None, path: object = None
) -> frozenset[int]:
    """Tokens that end a generation: end of sequence, and what only a prompt may hold.

    ``eos_token_id`` of generation_config.json (one id or a list), else of config.json, else 1; and
    BOS, User and Assistant by their text, where there is a tokenizer that has them. ``path`` is the
    file that errors name.
    """
    found: Any = None
    for key in ("generation_config", "config"):
        found = metadata_object(metadata, key, path).get("eos_token_id")
        if found is not None:
            break
    ids = [DEFAULT_EOS] if found is None else found if isinstance(found, list) else [found]
    vocab = metadata_object(metadata, "config", path).get("vocab_size")
    below = vocab if type(vocab) is int else math.inf
    if any(type(token) is not int or not 0 <= token < below for token in ids):
        raise ConfigError(
            f"{key} key eos_token_id",
            path=path,
            expected=f"a token id below {below}, or a list of them",
            found=repr(found)[:80],
        )
    controls = tokenizer.controls if tokenizer else {}
    openers = (controls[text] for text in (BOS, USER, ASSISTANT) if text in controls)
    return frozenset([*ids, *openers])


def metadata_object(
    metadata: Mapping[str, Any], key: str, path: object = None
) -> Mapping[str, Any]:
    """A JSON object of the artifact's metadata; empty where it is absent or null."""
    value = metadata.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"metadata key {key}",
            path=path,
            expected="a JSON object",
            found=type(value).__name__,
        )
    return value


def _rate(tokens: int, seconds: float) -> float | None:
    return tokens / seconds if tokens > 0 and seconds > 0 else None
