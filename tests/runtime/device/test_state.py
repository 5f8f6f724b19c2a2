"""Sequences on the device: sizes, growth, and the table that tells kernels where rows lie."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ds4q.hipkern.errors import DeviceMemoryError
from ds4q.hipkern.sim.control import Control
from ds4q.runtime import kv
from ds4q.runtime.backend.hip import HipBackend
from ds4q.runtime.config import parse_config
from ds4q.runtime.device.state import LAYER_STATE, Caches, DeviceState
from ds4q.runtime.engine import UNSIZED_CONTEXT_TOKENS
from tests.checks import check_refused
from tests.runtime.device.micro import CONFIG

MODEL = parse_config(CONFIG)


def tables(state: DeviceState) -> list[tuple[int, ...]]:
    return [row for row in LAYER_STATE.iter_unpack(state.table)]


def test_rows_are_those_of_the_cpu(sim: Control) -> None:
    batch, context = 4, 512
    with HipBackend.open() as backend:
        caches = Caches(MODEL, batch, context, sized=True)
        state = DeviceState(backend, caches)
        reference = kv.new_state(MODEL, batch, context)
        assert caches.first_bytes == state.nbytes
        for row, cache in zip(tables(state), reference.layers, strict=True):
            pointers, (window, ring, index_ring, capacity) = row[:7], row[7:]
            assert window == len(cache.window.rows)
            assert cache.compressor is not None
            assert ring == cache.compressor.raw.rows.shape[1]
            assert capacity == len(cache.compressor.entries.rows)
            assert [pointer > 0 for pointer in pointers] == [True] * 4 + [
                cache.index is not None
            ] * 3
            assert all(pointer % 16 == 0 for pointer in pointers)
            assert index_ring == (0 if cache.index is None else cache.index.raw.rows.shape[1])
        # No two rows share memory: the addresses of a layout are its parts' in order.
        live = sorted(p for row in tables(state) for p in row[:7] if p)
        assert len(set(live)) == len(live) == 11


def test_entries_move_and_rings_stay(sim: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds4q.runtime.device.state.FIRST_TOKENS", 8)
    with HipBackend.open() as backend:
        state = DeviceState(backend, Caches(MODEL, 2, 1000, sized=False))
        before = tables(state)
        assert before[0][10] == 2
        kept = np.arange(2 * MODEL.head_dim, dtype=np.float32)
        backend.stream.upload(before[0][3], kept)
        state.reserve(8)
        assert tables(state) == before
        allocations = sim.get("live_allocations")
        state.reserve(9)
        after = tables(state)
        assert sim.get("live_allocations") == allocations
        assert after[0][10] == 4
        assert after[0][:3] == before[0][:3]
        assert after[0][3] != before[0][3]
        found = np.empty_like(kept)
        backend.stream.download(found, after[0][3])
        assert np.array_equal(found, kept)
        state.reserve(999)
        assert tables(state)[0][10] == 999 // 4
        state.reserve(1000)
        assert tables(state)[0][10] == 250


def test_a_sequence_that_finds_no_memory_leaves_none(sim: Control) -> None:
    with HipBackend.open() as backend:
        caches = Caches(MODEL, 2, 1 << 20, sized=True)
        before = sim.get("live_allocations")
        free = backend.device.free_bytes()
        rings = caches.rings()[0].nbytes
        sim.set(memory_bytes=backend.device.total_bytes - free + rings + (1 << 20))
        check_refused(DeviceMemoryError, lambda: DeviceState(backend, caches), says=["bytes free"])
        assert sim.get("live_allocations") == before


def test_closing_twice_and_after_the_device_does_nothing(sim: Control) -> None:
    backend = HipBackend.open()
    caches = Caches(MODEL, 2, 64, sized=True)
    with DeviceState(backend, caches) as state:
        pass
    state.close()
    late = DeviceState(backend, caches)
    backend.close()
    late.close()
    backend.close()


def test_a_sequence_of_16_bits_takes_less(sim: Control) -> None:
    """By half of its window rows and entries; raw rows and the indexer's are what they were."""
    sizes = {}
    for kind in ("f32", "f16", "bf16"):
        caches = Caches(MODEL, 4, 512, sized=True, kv_type=kind)
        sizes[kind] = caches.first_bytes
        reference = kv.state_bytes(MODEL, 4, 512, kind)
        padding = caches.first_bytes - reference
        assert 0 <= padding < 20 * 256  # places begin at multiples of 256 bytes
    rows = MODEL.head_dim * (2 * kv.window_rows(MODEL, 4) + 512 // 4 + 512 // 128)
    assert sizes["f32"] - sizes["f16"] == pytest.approx(2 * rows, abs=10 * 256)
    assert sizes["f16"] == sizes["bf16"]


def test_a_sequence_without_a_known_length_starts_small_and_may_grow(micro_path: Path) -> None:
    grows, sized = (Caches(MODEL, 2, 1 << 20, sized=sized) for sized in (False, True))
    assert grows.first_bytes < sized.first_bytes / 50
    assert sized.expected_bytes == sized.first_bytes
    usual = Caches(MODEL, 2, UNSIZED_CONTEXT_TOKENS, sized=True)
    assert grows.expected_bytes == usual.first_bytes
    short = Caches(MODEL, 2, 64, sized=False)
    assert short.expected_bytes == short.first_bytes
