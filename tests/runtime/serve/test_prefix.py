"""The cache of prompt starts: what it finds, what it lets go, what it counts."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import pytest

from ds4q.runtime.serve import prefix
from ds4q.runtime.serve.prefix import ID_BYTES, PrefixCache


@dataclass(frozen=True)
class Snap:
    position: int
    nbytes: int = 100


def ids(*values: int) -> array[int]:
    return array("i", values)


def put(cache: PrefixCache, *values: int, nbytes: int = 100) -> Snap:
    snap = Snap(len(values), nbytes)
    cache.put(ids(*values), snap)
    return snap


def test_the_longest_start_that_leaves_a_token_is_found() -> None:
    cache = PrefixCache(10_000)
    one, three, whole = put(cache, 1), put(cache, 1, 2, 3), put(cache, 1, 2, 3, 4)
    put(cache, 1, 2, 9)
    assert cache.find(ids(1, 2, 3, 4)) is three
    assert cache.find(ids(1, 2, 3, 4, 5)) is whole
    assert cache.find(ids(1, 7, 3, 4, 5)) is one
    assert cache.find(ids(7, 1, 2, 3, 4)) is None
    assert cache.find(ids(1)) is None
    assert (cache.stats().queries, cache.stats().hits) == (5, 3)


def test_ids_are_compared_where_digests_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Blind:
        def update(self, data: object) -> None: ...

        def digest(self) -> bytes:
            return b"same"

    monkeypatch.setattr(prefix, "xxh3_128", Blind)
    monkeypatch.setattr(prefix, "xxh3_128_digest", lambda data: b"same")
    cache = PrefixCache(10_000)
    kept = put(cache, 1, 2)
    assert cache.find(ids(1, 3, 4)) is None
    assert cache.find(ids(1, 2, 4)) is kept
    assert not cache.touch(ids(1, 3))
    assert cache.touch(ids(1, 2))
    assert cache.stats().hits == 1


def test_what_was_not_used_for_longest_goes_first() -> None:
    entry = 100 + 2 * ID_BYTES
    cache = PrefixCache(3 * entry)
    for first in (1, 2, 3):
        put(cache, first, 0)
    assert cache.find(ids(1, 0, 0)) is not None  # used: 2 is the oldest now
    assert cache.touch(ids(2, 0))  # used, too: 3 is
    put(cache, 4, 0)
    assert cache.find(ids(3, 0, 0)) is None
    assert all(cache.find(ids(first, 0, 0)) for first in (1, 2, 4))
    stats = cache.stats()
    assert (stats.entries, stats.bytes, stats.evictions) == (3, 3 * entry, 1)


def test_bytes_count_the_ids_and_stay_under_the_limit() -> None:
    cache = PrefixCache(1000)
    for length in range(1, 60):
        put(cache, *range(length), nbytes=50 + length)
        assert cache.stats().bytes <= 1000
    held = [n for n in range(1, 60) if cache.touch(ids(*range(n)))]
    assert held == list(range(60 - len(held), 60))
    assert cache.stats().bytes == sum(50 + n + n * ID_BYTES for n in held)


def test_one_that_is_larger_than_all_the_room_displaces_nothing() -> None:
    cache = PrefixCache(300)
    kept = put(cache, 1)
    put(cache, 2, nbytes=297)  # with its id one byte too many
    assert cache.find(ids(1, 0)) is kept
    assert cache.find(ids(2, 0)) is None
    assert cache.stats().refused == 1
    assert cache.stats().evictions == 0


def test_the_same_ids_again_replace_what_was_there() -> None:
    cache = PrefixCache(1000)
    put(cache, 1, 2)
    second = put(cache, 1, 2, nbytes=60)
    assert cache.find(ids(1, 2, 3)) is second
    assert cache.stats().bytes == 60 + 2 * ID_BYTES
    assert cache.stats().entries == 1


def test_without_room_nothing_is_looked_up() -> None:
    cache = PrefixCache(0)
    assert not cache.on
    assert cache.find(ids(1, 2)) is None
    assert cache.stats().queries == 0


def test_cleared_it_is_empty() -> None:
    cache = PrefixCache(1000)
    put(cache, 1, 2)
    cache.clear()
    assert cache.find(ids(1, 2, 3)) is None
    assert (cache.stats().bytes, cache.stats().entries) == (0, 0)
    kept = put(cache, 1, 2)
    assert cache.find(ids(1, 2, 3)) is kept
