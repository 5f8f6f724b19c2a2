"""The generator: five styles, lengths, digits beside look-alikes, the same for ever."""

from __future__ import annotations

import itertools
import re

import pytest

from ds4q.runtime.gates.identifiers import LONGEST, SHORTEST, STYLES, WORDS, identifiers

PATTERNS = {
    "snake_case": r"([a-z]+_)+[ol0-9]+",
    "camelCase": r"[a-z]+([A-Z][a-z]+)*[Ol0-9]+",
    "PascalCase": r"([A-Z][a-z]+)+[Ol0-9]+",
    "SCREAMING_SNAKE": r"([A-Z]+_)+[OI0-9]+",
    "dotted.path": r"[a-z]+(\.[a-z]+)*_[ol0-9]+",
}
BESIDE = re.compile(r"[Oo]0|0[Oo]|[lI]1|1[lI]")


def first(count: int, seed: int) -> list[str]:
    return list(itertools.islice(identifiers(seed), count))


@pytest.mark.parametrize("seed", [0, 1, 20260805])
def test_every_identifier_is_of_its_style(seed: int) -> None:
    drawn = first(1000, seed)
    for name, style in zip(drawn, itertools.cycle(STYLES)):
        assert re.fullmatch(PATTERNS[style], name), f"{name} is not {style}"
        assert SHORTEST <= len(name) <= LONGEST
        assert BESIDE.search(name), name
    assert len(set(drawn)) == len(drawn)
    assert {len(name) for name in drawn} == set(range(8, 33))


def test_they_are_the_same_with_every_version() -> None:
    assert first(10, 20260805) == [
        "test_count_token_o07",
        "lineTypeObject0O",
        "PoolLock1l1l5",
        "KERNEL_LOCK_LINE_SIZE_I1I19",
        "field.error_o01l",
        "active_batch_o0",
        "pathAlignTableItem1l9",
        "TokenLayer1l",
        "FILE_SIZE_TARGET_HEADER_O0",
        "active.line_l16",
    ]
    assert first(3, 1) != first(3, 2)


def test_words_are_words() -> None:
    assert list(WORDS) == sorted(set(WORDS))
    assert all(re.fullmatch("[a-z]{4,8}", word) for word in WORDS)
