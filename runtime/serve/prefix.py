"""Owns the memory of how prompts began: snapshots by the token ids they stand for, under a limit.

It takes no snapshot and runs no model. One thread changes it.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from dataclasses import dataclass

from xxhash import xxh3_128, xxh3_128_digest

from ds4q.runtime.serve.job import Snapshot

Ids = array  # of type "i": 4 bytes a token, in the machine's order; never leaves the process
ID_BYTES = array("i").itemsize


@dataclass(frozen=True, slots=True)
class PrefixStats:
    """What a cache holds and has done since it was made.

    Attributes
    ----------
    bytes, entries : held now
    limit_bytes : most that it holds; 0: none are kept
    queries, hits : prompts that were looked up, and those of which some start was found
    evictions : snapshots that made room for others
    refused : snapshots that could not be taken, or are larger than all the room
    """

    bytes: int
    entries: int
    limit_bytes: int
    queries: int
    hits: int
    evictions: int
    refused: int


@dataclass(frozen=True, slots=True)
class _Entry:
    ids: bytes
    snapshot: Snapshot

    @property
    def nbytes(self) -> int:
        return len(self.ids) + self.snapshot.nbytes


class PrefixCache:
    """Snapshots by token ids; those not used for longest go first where they exceed the limit.

    A digest over the ids is the key, so that one pass over a prompt finds all its starts; the ids
    themselves are compared before a snapshot is handed out.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # least recently used first
        self._lengths: Counter[int] = Counter()
        self._bytes = 0
        self._queries = self._hits = self._evictions = self._refused = 0

    @property
    def on(self) -> bool:
        """Whether it may hold anything."""
        return self._limit_bytes > 0

    def find(self, prompt: Ids[int]) -> Snapshot | None:
        """The snapshot of the longest start of ``prompt`` that leaves a token to be computed."""
        if not self.on:
            return None
        self._queries += 1
        raw = memoryview(prompt.tobytes())
        digest, done, found = xxh3_128(), 0, []
        for length in sorted(self._lengths):
            if length >= len(prompt):
                break
            digest.update(raw[done * ID_BYTES : length * ID_BYTES])
            done = length
            if (key := digest.digest()) in self._entries:
                found.append(key)
        for key in reversed(found):
            entry = self._entries[key]
            if raw[: len(entry.ids)] == entry.ids:
                self._entries.move_to_end(key)
                self._hits += 1
                return entry.snapshot
        return None

    def touch(self, ids: Ids[int]) -> bool:
        """Whether exactly ``ids`` are held; they count as used."""
        raw = ids.tobytes()
        key = xxh3_128_digest(raw)
        entry = self._entries.get(key)
        if entry is None or entry.ids != raw:
            return False
        self._entries.move_to_end(key)
        return True

    def put(self, ids: Ids[int], snapshot: Snapshot) -> None:
        """Keep ``snapshot`` of a sequence that holds exactly ``ids``."""
        entry = _Entry(ids.tobytes(), snapshot)
        if entry.nbytes > self._limit_bytes:
            self._refused += 1
            return
        key = xxh3_128_digest(entry.ids)
        if key in self._entries:
            self._drop(key)
        self._entries[key] = entry
        self._lengths[len(ids)] += 1
        self._bytes += entry.nbytes
        while self._bytes > self._limit_bytes:
            self._drop(next(iter(self._entries)))
            self._evictions += 1

    def refuse(self) -> None:
        """Count a snapshot that could not be taken."""
        self._refused += 1

    def clear(self) -> None:
        """Let go of all snapshots."""
        self._entries.clear()
        self._lengths.clear()
        self._bytes = 0

    def stats(self) -> PrefixStats:
        """What it holds and has done."""
        return PrefixStats(
            bytes=self._bytes,
            entries=len(self._entries),
            limit_bytes=self._limit_bytes,
            queries=self._queries,
            hits=self._hits,
            evictions=self._evictions,
            refused=self._refused,
        )

    def _drop(self, key: bytes) -> None:
        entry = self._entries.pop(key)
        self._bytes -= entry.nbytes
        length = len(entry.ids) // ID_BYTES
        self._lengths[length] -= 1
        if not self._lengths[length]:
            del self._lengths[length]
