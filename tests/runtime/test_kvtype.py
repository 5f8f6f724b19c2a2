"""Stored rows: every 16-bit pattern is read exactly, and what is written is the nearest."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4q.artifact.fastpath import jit
from ds4q.artifact.numeric import bf16_to_f32
from ds4q.runtime.kvtype import F32, STORED, KvType, Rows, narrow, widen, widened
from tests.checks import same_bits

NARROW: tuple[KvType, ...] = ("f16", "bf16")


def patterns(kv_type: KvType) -> Rows:
    """Everything that a row can hold."""
    return np.arange(1 << 16).astype(np.uint16).view(STORED[kv_type])


@jit
def compiled(rows: Rows, out: F32) -> None:
    for i in range(rows.shape[0]):
        out[i] = widened(rows[i])


@pytest.mark.parametrize("kv_type", NARROW)
def test_every_pattern_is_read_exactly(kv_type: KvType) -> None:
    rows, found = patterns(kv_type), np.empty(1 << 16, np.float32)
    known = widen(rows)
    wanted = bf16_to_f32(rows) if kv_type == "bf16" else rows.view(np.float16).astype(np.float32)
    np.testing.assert_array_equal(known, wanted)
    compiled(rows, found)
    numbers = ~np.isnan(known)
    same_bits(found[numbers], known[numbers])
    assert np.isnan(found[~numbers]).all()
    assert 0 < (~numbers).sum() < 2100


@pytest.mark.parametrize("kv_type", NARROW)
def test_what_was_read_is_written_back(kv_type: KvType) -> None:
    rows = patterns(kv_type)
    values = widen(rows)
    again = narrow(values, rows.dtype)
    numbers = ~np.isnan(values)
    same_bits(again[numbers], rows[numbers])
    assert np.isnan(widen(again[~numbers])).all()


@pytest.mark.parametrize("kv_type", NARROW)
@given(x=st.floats(width=32, allow_nan=False))
def test_the_nearest_is_written_and_ties_go_to_even(kv_type: KvType, x: float) -> None:
    found = narrow(np.array([x], np.float32), STORED[kv_type])
    (bits,) = found.view(np.uint16).tolist()
    largest = {"f16": 65504.0, "bf16": float(np.finfo(np.float32).max)}[kv_type]
    value = float(widen(found)[0])
    if np.isinf(value):
        assert abs(x) > {"f16": largest + 15.99, "bf16": 3.39e38}[kv_type]
        return
    assert np.signbit(value) == np.signbit(x)
    neighbours = [
        float(widen(np.array([n], np.uint16).view(STORED[kv_type]))[0])
        for n in (bits - 1, bits + 1)
        if n & 0x7FFF not in (0x7FFF, 0) and n >= 0
    ]
    for other in neighbours:
        if np.isfinite(other):
            gap, off = abs(other - x), abs(value - x)
            assert off < gap or (off == gap and bits % 2 == 0)


@pytest.mark.parametrize("kv_type", NARROW)
def test_numbers_that_are_none_stay_so(kv_type: KvType) -> None:
    odd = np.array([np.nan, -np.nan, np.inf, -np.inf, 1e39, 7e4], np.float64)
    with np.errstate(over="ignore"):
        rows = odd.astype(np.float32)
    rows.view(np.uint32)[:2] |= 0x7FFFFF  # a NaN whose rounding would carry into the sign
    found = widen(narrow(rows, STORED[kv_type]))
    assert np.isnan(found[:2]).all()
    assert found[2:5].tolist() == [np.inf, -np.inf, np.inf]
    assert np.isinf(found[5]) == (kv_type == "f16")


def test_float32_is_left_alone() -> None:
    rows = np.ones((2, 3), np.float32)
    assert narrow(rows, STORED["f32"]) is rows
    assert widen(rows) is rows
