"""The file of ``--write-baseline``: what loads of one artifact took, and what the model said.

It belongs to one artifact (identity of its front, SHA-256 of its receipt), one device and one
number of threads. Times are kept as pairs of a load and its yardsticks, never as a limit.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ds4q.artifact.files import beginning, empty_or, read_small, write_whole
from ds4q.artifact.report import Check, Failure
from ds4q.runtime.errors import GateError
from ds4q.runtime.gates.quotient import Series
from ds4q.runtime.numerics import NUMERICS
from ds4q.runtime.text.chat import encode_raw
from ds4q.runtime.text.tokenizer import Tokenizer

FORMAT = "ds4q load-time baseline"
is_baseline = beginning(rb'\{\s*"format": "ds4q load-time baseline')
"""Whether a file that begins so is a baseline, of any version."""

SCHEMA_VERSION = 2  # 1 kept one ratio an arm
MAX_BYTES = 1 << 20
LEAST_PAIRS = 7
ARMS = ("off", "all", "paged")
REMEDY = "write a new one with --write-baseline FILE"

PROMPTS_VERSION = 1  # of the texts and of NEW_TOKENS
NEW_TOKENS = 32
PROMPTS = {
    "benchmark": "Count from 1 to 200, one number after the other: 1, 2, 3, 4, 5, 6, 7,",
    "free": "An old ferryman on the Elbe writes to his sister about the first morning without fog:",
}
SEED = 16  # of the ids that stand in for a text where the artifact has no tokenizer
SEEDED_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Kept:
    """One arm in the file: its times, and the calls and bytes of one load."""

    series: Series
    reads: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Baseline:
    """What the file says.

    Attributes
    ----------
    state : what has to be the same for a comparison: artifact, sha256, device, threads, cold
    numerics, prompts_version : under which ``ids`` were generated
    ids : token ids by name of the prompt
    """

    path: Path
    state: Mapping[str, Any]
    arms: Mapping[str, Kept]
    numerics: int
    prompts_version: int
    ids: Mapping[str, Sequence[int]]

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Baseline:
        """``GateError`` for a file that is not a baseline, or one of an older version."""
        raw = read_small(path, MAX_BYTES)
        try:
            found = json.loads(raw)
            name = found["format"]
            version = found.get("schema_version", 1)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            name = version = None
        if not isinstance(name, str) or not name.startswith(FORMAT):
            raise GateError("not a baseline of load times", path=path, remedy=REMEDY)
        if name != FORMAT or version != SCHEMA_VERSION:
            raise GateError(
                "a baseline of another version of ds4q",
                path=path,
                expected=f"schema_version {SCHEMA_VERSION}",
                found=version,
                remedy=REMEDY,
            )
        try:
            arms = {arm: _kept(found["arms"][arm]) for arm in ARMS}
            ids = {prompt: _ids(found["ids"][prompt]) for prompt in found["ids"]}
            versions = found["numerics"], found["prompts_version"]
            good = all(type(number) is int for number in versions)
            good &= len(found["arms"]) == len(ARMS)
            good &= versions[1] != PROMPTS_VERSION or set(ids) == set(PROMPTS)
            if good:
                return cls(Path(path), dict(found["state"]), arms, *versions, ids)
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError):
            pass
        raise GateError("a damaged baseline of load times", path=path, remedy=REMEDY)

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse a baseline that was measured in another state."""
        for key, value in state.items():
            known = self.state.get(key)
            if known != value and not (key == "sha256" and None in (known, value)):
                raise GateError(
                    f"the baseline was measured with another {key}",
                    path=self.path,
                    expected=value,
                    found=known,
                    remedy=REMEDY,
                )

    def check_ids(self, check: Check, ids: Mapping[str, Sequence[int]]) -> None:
        """Fail where the model continues a prompt by other ids than it did for the baseline."""
        for what, known, ours in (
            ("numerics", self.numerics, NUMERICS),
            ("prompts", self.prompts_version, PROMPTS_VERSION),
        ):
            if known != ours:
                check.notes.append(
                    f"token ids were not compared: the baseline has version {known} of {what}, "
                    f"this ds4q has {ours}"
                )
                check.figures["ids"] = "not compared"
                return
        for prompt, wanted in self.ids.items():
            found = ids.get(prompt, ())
            pairs = enumerate(zip(wanted, found, strict=False))
            first = next((at for at, (a, b) in pairs if a != b), min(len(wanted), len(found)))
            if first < max(len(wanted), len(found)):
                check.fail(
                    Failure(
                        f"prompt {prompt!r}: other token ids than in the baseline from new token "
                        f"{first} on",
                        expected=_at(wanted, first),
                        found=_at(found, first),
                    )
                )
        check.figures["ids"] = "compared"


def write(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    arms: Mapping[str, Kept],
    ids: Mapping[str, Sequence[int]],
) -> None:
    """Write a baseline for ``Baseline.read``; it replaces an older one, but no other file."""
    document = {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "state": dict(state),
        "numerics": NUMERICS,
        "prompts_version": PROMPTS_VERSION,
        "ids": {prompt: list(found) for prompt, found in ids.items()},
        "arms": {
            name: {"series": kept.series._asdict(), "reads": kept.reads, "bytes": kept.bytes}
            for name, kept in arms.items()
        },
    }
    text = json.dumps(document, indent=1) + "\n"
    write_whole(Path(path), text, mode=0o666, replace=empty_or(is_baseline))


def encoded_prompts(
    tokenizer: Tokenizer | None, vocab_size: int, positions: int
) -> dict[str, list[int]]:
    """The fixed prompts as ids, cut so that new tokens have positions left."""
    draws = np.random.default_rng(SEED)
    most = max(1, positions - NEW_TOKENS)
    return {
        name: (
            draws.integers(vocab_size, size=SEEDED_TOKENS).tolist()
            if tokenizer is None
            else encode_raw(tokenizer, text)
        )[:most]
        for name, text in PROMPTS.items()
    }


def _kept(found: Mapping[str, Any]) -> Kept:
    """``ValueError`` and the like for what is not one arm."""
    series = {name: list(map(float, found["series"][name])) for name in Series._fields}
    lengths = {len(seconds) for seconds in series.values()}
    if len(lengths) != 1 or min(lengths) < LEAST_PAIRS:
        raise ValueError("too few pairs")
    if not all(0 < value < math.inf for seconds in series.values() for value in seconds):
        raise ValueError("not seconds")
    return Kept(Series(**series), int(found["reads"]), int(found["bytes"]))


def _ids(found: Sequence[Any]) -> list[int]:
    if not isinstance(found, list) or not all(type(token) is int for token in found):
        raise ValueError("not token ids")
    return found


def _at(ids: Sequence[int], place: int) -> int | str:
    return ids[place] if place < len(ids) else "no more tokens"
