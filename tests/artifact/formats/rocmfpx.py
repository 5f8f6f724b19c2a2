"""Owns what the tests of the ROCmFPX types share: golden vectors, worked blocks, common checks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from ds4q.artifact.errors import PayloadSizeError, PayloadValueError
from ds4q.artifact.formats import RowCodec, codec_for
from ds4q.artifact.formats._blocks import BlockCodec
from ds4q.artifact.numeric import E2M1
from tests.checks import Array, check_golden, check_refused, same_bits

GOLDEN = Path(__file__).parents[2] / "data" / "golden"
VECTORS = dict(np.load(GOLDEN / "rocmfpx.npz", allow_pickle=False))
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)

_SMALL = np.array([0.11, -0.05, 0.02, 0.30, -0.28, 0, 0.07, -0.13])
_LARGE = np.array([0.9, -0.4, 0.1, 1.7, -1.6, 0.05, 0.6, -0.8])
WORKED = np.concatenate([_SMALL, _SMALL, _LARGE, _LARGE]).astype(np.float32)  # a block


def codec_of(type_id: int, coding: Any = None) -> BlockCodec:
    """The codec, as the class that encodes rows."""
    codec = codec_for(type_id, coding)
    assert isinstance(codec, BlockCodec)
    assert isinstance(codec, RowCodec)
    return codec


def check_quantizer_case(codec: RowCodec, key: str) -> None:
    """Bytes and decoded values of one case of the golden vectors, ``LIB.TYPE.MODE``."""
    expected, values = VECTORS[f"{key}__bytes"], VECTORS[f"{key}__y"]
    importance = VECTORS["w"] if key.endswith(".imatrix") else None
    found, lost = codec.encode_rows(VECTORS["x"][None], importance)
    block_bytes = codec.type.block_bytes
    same_bits(found[0], expected, block_bytes=block_bytes, what=key)
    assert lost == 0
    same_bits(codec.decode(expected, (1, 896))[0], values, block_bytes=128, what=key)
    codec.validate(expected, (1, 896))


def check_worked(codec: RowCodec, expected_hex: str) -> Array:
    """The bytes of ``WORKED``; returns its decoded values."""
    units = codec.encode_units(WORKED[None])
    check_golden(units, expected_hex)
    values: Array = codec.decode_units(units)[0]
    return values


def check_edges(codec: BlockCodec, *, searched: bool = True) -> None:
    """Zeros, input that no encoder takes, lengths, importance, and that inputs stay as they are."""
    k = 128
    rng = np.random.default_rng(codec.type.id)
    values = rng.standard_normal((3, k)).astype(np.float32)
    kept = values.copy()
    importance = rng.random(k).astype(np.float32)
    rows, lost = codec.encode_rows(values, importance)
    assert (rows.shape, lost) == ((3, codec.type.row_bytes(k)), 0)
    same_bits(values, kept, what="encoder's input")
    codec.validate(rows, values.shape)
    same_bits(
        codec.decode(rows, values.shape),
        codec.decode_units(codec.units(rows, (3, k))).reshape(3, k),
    )
    same_bits(codec.encode(values), codec.encode_rows(values)[0].reshape(-1))
    same_bits(codec.encode_rows(values.astype(np.float64))[0], codec.encode_rows(values)[0])

    zeros, lost = codec.encode_rows(np.zeros((2, k), np.float32), np.zeros(k, np.float32))
    assert not codec.decode(zeros, (2, k)).any()
    assert lost == 0  # nothing was weighed
    assert not codec.units(zeros, (2, k))[:, 4 * codec.bits :].any()

    for bad in (np.nan, np.inf, -np.inf):
        values[1, 70] = bad
        check_refused(
            PayloadValueError,
            lambda: codec.encode_rows(values),
            says=["not finite", f"{bad} in row 1, weight 70"],
        )
    values[1, 70] = -3e38
    for weights in (None, np.ones(k, np.float32)):
        if searched or weights is not None:
            check_refused(
                PayloadValueError,
                lambda weights=weights: codec.encode_rows(values, weights),  # type: ignore[misc]
                says=["overflows", "error of row 1 from weight ", "3e+38"],
            )
    values[1, 70] = 1
    for length in (k - 1, k - 16, 0):
        for use in (codec.encode_rows, codec.encode):
            check_refused(
                PayloadSizeError,
                lambda use=use, length=length: use(values[:, :length]),  # type: ignore[misc]
                says=[codec.type.name, "multiple of"],
            )
    for wrong in (-1.0, np.nan, np.inf):
        importance[9] = wrong
        check_refused(
            PayloadValueError,
            lambda: codec.encode_rows(values, importance),
            says=["importance", f"{wrong} in column 9"],
        )
    check_refused(
        PayloadSizeError,
        lambda: codec.encode_rows(values, importance[:-1]),
        says=["importance", "(128,)", "(127,)"],
    )


def check_lost_weights(codec: BlockCodec) -> None:
    """A group without weight is encoded as if there were no importance, and counted."""
    rng = np.random.default_rng(5)
    values = rng.standard_normal((2, 128)).astype(np.float32)
    importance = rng.random(128).astype(np.float32) + np.float32(0.1)
    importance[32:64] = 0
    rows, lost = codec.encode_rows(values, importance)
    assert lost == 2 * 32 // codec.group
    units = codec.units(rows, (2, 128))
    plain = codec.units(codec.encode_rows(values)[0], (2, 128))
    same_bits(units[1::4], plain[1::4])
    assert (units != plain).any()
    values[1, 32:64] = 0  # nothing is lost where there is nothing
    assert codec.encode_rows(values, importance)[1] == 32 // codec.group


def check_scale_bytes(codec: BlockCodec) -> None:
    """Which scale bytes are valid, and how the first one that is not is named."""
    per_row = 4
    shape = (6, 32 * per_row)
    units = np.full((6 * per_row, codec.type.block_bytes), 0xFF, dtype=np.uint8)
    units[:, 4 * codec.bits :] = 0
    codec.validate(units.reshape(-1), shape)  # every code is legal
    masked = codec.scale_bits == 0x7F
    for at in range(4 * codec.bits, codec.type.block_bytes):
        for byte in range(256):
            units[14, at] = byte
            if (byte & (0x7F if masked else 0xFF)) <= 0x7E:
                codec.validate(units.reshape(-1), shape)
                continue
            says = ["scale-byte", "row 35, block 2", f"found {byte:#04x}", "at most 0x7e"]
            check_refused(
                PayloadValueError,
                lambda: codec.validate(
                    units.reshape(-1), shape, first_row=32, path="p", tensor="t"
                ),
                path="p",
                tensor="t",
                says=says,
            )
            if byte == 0x7F:
                check_refused(
                    PayloadValueError,
                    lambda: codec.validate_units(units, first=64, path="p", tensor="t"),
                    path="p",
                    tensor="t",
                    says=["scale-byte", "in block 78", "0x7f"],
                )
        units[14, at] = 0


def check_error_bounds(codec: BlockCodec, values: Array, bound: Callable[[Array], Array]) -> None:
    """Every error is within ``bound``, in scales, of a weight's place, in scales; NaN: no bound."""
    units = codec.encode_units(values)
    decoded = codec.decode_units(units).astype(np.float64)
    bytes_ = units[:, 4 * codec.bits :]
    scale = np.repeat(codec.scales[bytes_].astype(np.float64), 32 // bytes_.shape[1], axis=1)
    scale = np.where(np.repeat(bytes_, 32 // bytes_.shape[1], axis=1) >> 7, -scale, scale)
    live = scale != 0
    place = values[live] / scale[live]
    allowed = bound(place)
    error = np.abs(decoded - values)[live] / np.abs(scale[live])
    bounded = ~np.isnan(allowed)
    # The place was rounded to float32 before it met a threshold.
    slack = 2e-7 * np.abs(place[bounded])
    assert (error[bounded] <= allowed[bounded] + slack).all()


def blocks_of(head: list[float]) -> Array:
    """One block."""
    return np.array(head, dtype=np.float32).reshape(1, 32)


# Weights of one block within a few scales of each other, where errors are bounded.
NEAR = st.lists(st.floats(-2, 2, width=32), min_size=32, max_size=32)
ANY = st.lists(FINITE, min_size=32, max_size=32)
WEIGHTS = st.lists(st.floats(0, 2.0**20, width=32), min_size=32, max_size=32)


def fp4_source(codes: list[int], exponent: int) -> Array:
    """A block of an FP4 checkpoint: E2M1 codes times 2^(exponent - 127)."""
    scaled: Array = E2M1[np.array(codes)] * np.float32(2.0 ** (exponent - 127))
    return scaled.reshape(1, 32)
