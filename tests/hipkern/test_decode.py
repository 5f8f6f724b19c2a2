"""Decoding kernels: bits of the CPU codecs for every type, edges and odd places included."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ds4q.artifact.types import TYPES
from ds4q.hipkern import matrix
from tests.hipkern.packed import FORMS, ONE_EACH, Form, Rig, columns, payload, rig, values_of

__all__ = ["rig"]  # a fixture


def _decoded(rig: Rig, form: Form, data: np.ndarray, rows: int, cols: int) -> tuple[Any, Any]:
    row_bytes, books = matrix.row_bytes_of(form.type_id, cols), rig.books(form)
    at = rig.put(data, 16)
    found = []
    for kernel, dtype in (("decode_f32", np.float32), ("decode_f16", np.float16)):
        out = rig.room((rows, cols), dtype)
        rig.run(
            "decode.hip", kernel, matrix.decode_grid(rows, cols),
            at, books, out, rows, cols, row_bytes, DS4Q_DECODER=form.decoder,
        )  # fmt: skip
        found.append(rig.get(out, (rows, cols), dtype))
    return found[0], found[1]


@pytest.mark.parametrize("name", FORMS)
def test_every_type_decodes_to_the_codecs_bits(rig: Rig, name: str) -> None:
    form, rng = FORMS[name], np.random.default_rng(1)
    rows, cols = 37, columns(form, 160)
    data = payload(form, rows, cols, rng, edges=True)
    want = values_of(form, data, rows, cols)
    f32, f16 = _decoded(rig, form, data, rows, cols)
    np.testing.assert_array_equal(f32.view(np.uint32), want.view(np.uint32))
    with np.errstate(over="ignore"):
        halves = want.astype(np.float16)
    np.testing.assert_array_equal(f16.view(np.uint16), halves.view(np.uint16))


@pytest.mark.parametrize("name", ONE_EACH)
def test_every_scale_byte_decodes_every_code(rig: Rig, name: str) -> None:
    """256 blocks of each of two code patterns; what the codec refuses decodes as it does."""
    form, rng = FORMS[name], np.random.default_rng(2)
    rows, cols = 16, 1024
    data = payload(form, rows, cols, rng, edges=True).reshape(rows, -1)
    if name == "HFP4G32":  # the byte of NaN is refused, and has no fixed bits
        data[:, 16:].reshape(rows, 32, 17)[:, :, 0] = (np.arange(512) % 255).reshape(rows, 32)
    elif name.startswith("ROC"):
        kind = TYPES[form.type_id]
        blocks = data.reshape(-1, kind.block_bytes)
        blocks[:, -2:] = (np.arange(512)[:, None] + [0, 101]) % 256
        if kind.block_bytes in (17, 33):  # one scale byte, the other is a code
            blocks[:, -2] = rng.integers(0, 256, 512)
    want = values_of(form, data.reshape(-1), rows, cols)
    f32, _ = _decoded(rig, form, data, rows, cols)
    np.testing.assert_array_equal(f32.view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("name", ["BF16", "HFP4G32", "ROCmFP3"])
def test_an_embedding_row_is_copied_to_every_stream(rig: Rig, name: str) -> None:
    form, rng = FORMS[name], np.random.default_rng(3)
    rows, cols, streams = 9, 96, 3
    data = payload(form, rows, cols, rng)
    ids = np.array([8, 0, 5, 5], dtype=np.int32)
    table = rig.table([rig.matrix(form, data, rows, cols)])
    out = rig.room((len(ids), streams, cols))
    grid = matrix.embed_grid(cols, len(ids))
    rig.run(
        "decode.hip", "embed", grid, table, rig.put(ids), out, streams, DS4Q_DECODER=form.decoder
    )
    want = values_of(form, data, rows, cols)[ids][:, None].repeat(streams, axis=1)
    np.testing.assert_array_equal(rig.get(out, want.shape), want)
