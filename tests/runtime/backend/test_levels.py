"""Level tables: the codec's own values, one table per coding, freed with the last weight."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from ds4q.artifact.errors import CodingError
from ds4q.artifact.formats import Coding, MixRow, codec_for
from ds4q.artifact.types import (
    ROCMFP2,
    ROCMFP2_MIX,
    ROCMFP3,
    ROCMFP3_MIX,
    ROCMFP4,
    ROCMFP4_FAST,
    ROCMFP6,
    ROCMFP8,
    ROCMFPX,
    TensorType,
)
from ds4q.runtime.backend import Weight
from ds4q.runtime.backend.levels import AFFINE, ENTRIES, NEG32, decoder_of, level_table
from tests.checks import check_refused
from tests.runtime.backend import packs


@pytest.mark.parametrize("kind", packs.LOSSY, ids=packs.name)
def test_a_row_holds_what_the_codec_makes_of_each_code(kind: packs.Kind) -> None:
    """Random blocks: each weight of a half is the entry of its code in its scale byte's row."""
    table_type, coding = packs.parts(kind)
    rng = np.random.default_rng(3)
    blocks = rng.integers(0, 256, (400, table_type.block_bytes), dtype=np.uint8)
    if coding == "affine":
        blocks[:, -1] = 0  # no offset
    codes = packs.codes(table_type, blocks)
    last = blocks[:, -1]
    one_scale = table_type in (ROCMFP4_FAST, ROCMFP8)
    first = last if one_scale else blocks[:, -2]
    second = first if coding == "affine" else last
    scales = np.repeat(np.stack([first, second], axis=1), 16, axis=1)
    table = level_table(table_type, coding)
    assert table.shape == (256, ENTRIES[table_type.id])
    if table_type is ROCMFP8:
        found = codes.view(np.int8) * table[scales, 0]
    else:
        found = table[scales, codes]
    values = codec_for(table_type.id, coding).decode_units(blocks)
    np.testing.assert_array_equal(found, values)


def test_a_row_by_hand() -> None:
    """Scale byte 0x40 is 1, 0x33 is 0.34375; bit 7 chooses the second book, or mirrors."""
    mixed = level_table(ROCMFP2_MIX, packs.TWO_BIT)
    assert mixed[0x40].tolist() == [-0.875, -0.25, 0.21875, 0.90625]
    assert mixed[0xB3].tolist() == [-0.34375, -0.12890625, 0, 0.236328125]
    assert level_table(ROCMFP2, "sign")[0xC0].tolist() == [1, 0, -1, -2]
    assert level_table(ROCMFP2, "dual")[0xC0].tolist() == [0, 0, 0, 0]
    assert level_table(ROCMFP2, "affine")[0x48].tolist() == [0, 2, 4, 6]
    assert level_table(ROCMFP6, "neg32")[0x38, 31:34].tolist() == [15.5, -16, -0.5]
    assert level_table(ROCMFP6, "zero")[0x38, 31:34].tolist() == [15.5, 0, -0.5]
    assert level_table(ROCMFP8, None)[0x38].tolist() == [0.5]
    assert level_table(ROCMFP4, None)[0x40, 7] == 10


@pytest.mark.parametrize("kind", packs.LOSSY, ids=packs.name)
def test_rows_lie_within_cache_lines(kind: packs.Kind) -> None:
    table_type, coding = packs.parts(kind)
    table = level_table(table_type, coding)
    assert table.flags.c_contiguous
    assert table.ctypes.data % 64 == 0


def weight_of(kind: TensorType, coding: Coding | None) -> Weight:
    return Weight(kind.id, 1, 128, np.zeros(kind.row_bytes(128), dtype=np.uint8), coding)


def test_weights_of_one_coding_share_a_table_and_others_do_not() -> None:
    same = MixRow(1, bytes(packs.THREE_BIT.books))
    one, two = weight_of(ROCMFP3_MIX, packs.THREE_BIT), weight_of(ROCMFP3_MIX, same)
    fixed = weight_of(ROCMFP3_MIX, MixRow(0, bytes(32)))
    assert one.levels is two.levels
    assert fixed.levels is not one.levels
    assert weight_of(ROCMFP3, None).levels is not fixed.levels
    assert level_table(ROCMFP3, "of no use") is level_table(ROCMFP3, None)


def test_a_table_lives_as_long_as_a_weight_of_its_coding() -> None:
    row = packs.mix_row([0.25, 0.5, 0.75, 1], [-1, -0.75, -0.5, -0.25])
    weights = [weight_of(ROCMFP2_MIX, row) for _ in range(2)]
    levels = weights[0].levels
    assert levels is not None
    alive = weakref.ref(levels)
    at = levels.ctypes.data
    del levels, weights[0]
    gc.collect()
    assert alive() is not None
    assert weights[0].matrix[1] == at
    del weights[0]
    gc.collect()
    assert alive() is None


def test_a_missing_coding_is_refused() -> None:
    check_refused(CodingError, lambda: level_table(ROCMFP2, None), says=["variant-missing"])
    check_refused(CodingError, lambda: level_table(ROCMFP2_MIX, None), says=["mix-unregistered"])


def test_two_variants_have_a_decoder_of_their_own() -> None:
    assert [decoder_of(kind.id, None) for kind in ROCMFPX] == [kind.id for kind in ROCMFPX]
    for variant in ("dual", "s40", "sign"):
        assert decoder_of(ROCMFP2.id, variant) == ROCMFP2.id
    assert decoder_of(ROCMFP2.id, "affine") == AFFINE
    assert decoder_of(ROCMFP6.id, "neg32") == NEG32
    assert decoder_of(ROCMFP6.id, "zero") == ROCMFP6.id
