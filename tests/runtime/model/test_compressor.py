"""The compressor: entries by the formula, pieces of any length, and nothing from a tail."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4q.runtime.kv import CompressorCache
from ds4q.runtime.kvtable import Held, Table
from ds4q.runtime.kvtype import STORED
from ds4q.runtime.model import compressor, rope
from ds4q.runtime.model.norm import rms_norm_reference

F32 = np.float32
FREQUENCIES = rope.plain_frequencies(16, 1e4)
Array = npt.NDArray[np.float32]


class Case:
    """Raw rows of ``tokens`` tokens for one ratio, and a run over pieces of them."""

    def __init__(self, ratio: int, width: int, tokens: int) -> None:
        rng = np.random.default_rng(ratio)
        columns = 2 * width if ratio == 4 else width
        self.ratio, self.width, self.tokens = ratio, width, tokens
        self.values = rng.standard_normal((tokens, columns), dtype=F32)
        self.gates = rng.standard_normal((tokens, columns), dtype=F32) * 3
        self.ape = rng.standard_normal((ratio, columns), dtype=F32)
        self.norm = rng.standard_normal(width, dtype=F32)

    def run(self, cuts: list[int]) -> Array:
        longest = max(high - low for low, high in itertools.pairwise(cuts))
        cache = CompressorCache(self.ratio, self.width, longest, self.tokens, STORED["f32"])
        entries = np.full((self.tokens // self.ratio + 1, self.width), 7.0, dtype=F32)
        for low, high in itertools.pairwise(cuts):
            started, done = low // self.ratio, high // self.ratio
            cos, sin = rope.tables(FREQUENCIES, started * self.ratio, done - started, self.ratio)
            raw, positions = Table([cache.raw]), np.arange(low, high)
            rows = self.values[low:high], self.gates[low:high]
            compressor.take(*rows, self.ape, positions, np.zeros_like(positions), raw)
            numbers = np.arange(started, done)
            where = numbers, np.zeros_like(numbers), entries[started:done]
            compressor.pool(raw, self.ratio, self.norm, 1e-6, cos, sin, *where)
        return entries

    def entry(self, number: int) -> Array:
        """One entry by the formula, in float64."""
        slots = [
            (t, slice(-self.width, None))
            for t in range(number * self.ratio, (number + 1) * self.ratio)
        ]
        if self.ratio == 4 and number:
            before = range((number - 1) * self.ratio, number * self.ratio)
            slots += [(t, slice(0, self.width)) for t in before]
        a = np.array([self.values[t, part] for t, part in slots], dtype=np.float64)
        b = np.array(
            [self.gates[t, part] + self.ape[t % self.ratio, part] for t, part in slots], np.float64
        )
        weights = np.exp(b)
        mixed = (weights * a).sum(axis=0) / weights.sum(axis=0)
        normed = rms_norm_reference(mixed[None].astype(F32), self.norm, 1e-6)[0]
        cos, sin = rope.tables(FREQUENCIES, number * self.ratio, 1)
        return rope.rotate_reference(normed, cos[0], sin[0])


CASES = {ratio: Case(ratio, 24, 270) for ratio in (4, 128)}


@pytest.mark.parametrize("ratio", [4, 128])
def test_entries_by_the_formula(path: str, ratio: int) -> None:
    case = CASES[ratio]
    entries = case.run([0, case.tokens])
    for number in range(case.tokens // ratio):
        assert np.abs(entries[number] - case.entry(number)).max() < 1e-5, f"entry {number}"
    assert (entries[case.tokens // ratio :] == 7).all()  # the tail emits nothing


@pytest.mark.parametrize("ratio", [4, 128])
@settings(max_examples=20)
@given(cuts=st.sets(st.integers(1, 269), max_size=12))
def test_pieces_give_the_same_entries(ratio: int, cuts: set[int]) -> None:
    case = CASES[ratio]
    assert np.array_equal(case.run([0, *sorted(cuts), 270]), case.run([0, 270]))


@pytest.mark.parametrize("ratio", [4, 128])
def test_one_token_at_a_time(path: str, ratio: int) -> None:
    case = CASES[ratio]
    assert np.array_equal(case.run(list(range(271))), case.run([0, 270]))


def test_large_gates_do_not_overflow(path: str) -> None:
    case = Case(4, 24, 8)
    case.gates += F32(1000)
    assert np.isfinite(case.run([0, 8])).all()


@pytest.mark.parametrize("ratio", [4, 128])
def test_company_does_not_show(path: str, ratio: int) -> None:
    """Three sequences at places of their own, their tokens turn and turn about."""
    case, tokens, firsts = CASES[ratio], 2 * ratio, np.array([ratio, 0, 5 * ratio])
    ring = np.zeros((2, 3 * ratio, case.values.shape[1]), dtype=F32)

    def run(sequences: list[int]) -> list[Array]:
        raw = Table([Held(ring.copy()) for _ in sequences])
        owners = np.tile(np.arange(len(sequences)), tokens)
        at = np.repeat(np.arange(tokens), len(sequences))
        rows = (7 * np.array(sequences)[owners] + at) % case.tokens
        positions = firsts[sequences][owners] + at
        compressor.take(case.values[rows], case.gates[rows], case.ape, positions, owners, raw)
        last = (positions + 1) % ratio == 0
        numbers = positions[last] // ratio
        made = np.empty((len(numbers), case.width), dtype=F32)
        cos, sin = rope.turns(FREQUENCIES, numbers * ratio)
        where = numbers, owners[last]
        compressor.pool(raw, ratio, case.norm, 1e-6, cos, sin, *where, made)
        return [made[owners[last] == owner] for owner in range(len(sequences))]

    for number, found in enumerate(run([0, 1, 2])):
        assert len(found) == 2
        assert np.array_equal(found, run([number])[0])
