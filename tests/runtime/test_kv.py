"""Caches: growth keeps rows and copies little, sizes follow the config, rings outlast a batch."""

from __future__ import annotations

import numpy as np
import pytest

from ds4q.runtime.config import parse_config
from ds4q.runtime.kv import Entries, LayerCache, new_state, state_bytes
from ds4q.runtime.kvtype import STORED, KvType
from tests.runtime.artifacts import DATA, config_of

PLAIN = STORED["f32"]

CONFIG = parse_config(config_of(DATA / "ds4-random"))  # ratios 0, 4, 128, 4, 128, 0; window 32


def test_growth_keeps_rows_and_copies_linearly() -> None:
    entries, copied = Entries(3, None, PLAIN), 0
    for count in range(1, 5000):
        before = entries.rows
        rows = entries.reserve(count)
        if rows is not before:
            copied += len(before)
        rows[count - 1] = count
    assert np.array_equal(entries.rows[:4999, 0], np.arange(1, 5000, dtype=np.float32))
    assert copied < 2 * 5000
    assert len(entries.rows) < 2 * 5000 + 4


def test_sized_entries_never_move() -> None:
    entries = Entries(3, 10, PLAIN)
    rows = entries.rows
    assert len(rows) == 12  # whole tiles of four
    assert entries.reserve(10) is rows


def test_reserve_jumps_to_what_is_asked() -> None:
    assert len(Entries(2, 0, PLAIN).reserve(1001)) == 1004


@pytest.mark.parametrize(
    ("layer", "ratio", "compressor", "index"),
    [
        (0, 0, None, None),
        (1, 4, (8 + 7, 256), (8 + 7, 256)),
        (2, 128, (128 + 7, 128), None),
    ],
)
def test_shapes_of_a_layer(
    layer: int,
    ratio: int,
    compressor: tuple[int, int] | None,
    index: tuple[int, int] | None,
) -> None:
    cache = LayerCache(CONFIG, layer, batch=7, max_context=1000)
    assert cache.window.rows.shape == (32 - 1 + 7, 128)
    for part, shape in ((cache.compressor, compressor), (cache.index, index)):
        assert (part is None) == (shape is None)
        if part is not None and shape is not None:
            assert part.raw.rows.shape == (2, *shape)
            assert part.entries.rows.shape == (-(-(1000 // ratio) // 4) * 4, 128)


def test_state_counts_its_bytes() -> None:
    state = new_state(CONFIG, 7, 1000)
    assert state.position == 0
    assert len(state.layers) == 6
    window, wide, narrow = 38 * 128 * 4, 2 * 15 * 256 * 4, 2 * 135 * 128 * 4
    expected = 6 * window + 2 * 2 * (wide + 252 * 512) + 2 * (narrow + 8 * 512)
    assert state.nbytes == expected


@pytest.mark.parametrize("name", ["ds4-tiny", "ds4-random"])
@pytest.mark.parametrize(("batch", "context"), [(1, 1), (256, 1000), (7, 4099)])
@pytest.mark.parametrize("kv_type", ["f32", "f16", "bf16"])
def test_bytes_of_a_sequence_are_told_without_making_it(
    name: str, batch: int, context: int, kv_type: KvType
) -> None:
    config = parse_config(config_of(DATA / name))
    state = new_state(config, batch, context, kv_type)
    assert state_bytes(config, batch, context, kv_type) == state.nbytes


@pytest.mark.parametrize("kv_type", ["f16", "bf16"])
def test_rows_of_16_bits(kv_type: KvType) -> None:
    """Window and entries; raw rows and the indexer's entries stay as they are."""
    for layer in range(3):
        cache = LayerCache(CONFIG, layer, 7, 1000, kv_type)
        assert cache.window.rows.itemsize == 2
        if cache.compressor is not None:
            assert cache.compressor.entries.rows.itemsize == 2
            assert cache.compressor.entries.reserve(5000).itemsize == 2
            assert cache.compressor.raw.rows.itemsize == 4
        if cache.index is not None:
            assert cache.index.entries.rows.itemsize == 4
