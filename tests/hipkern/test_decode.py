"""Decoding kernels: bits of the CPU codecs for every type, edges and odd places included."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from ds4q.hipkern import matrix
from ds4q.hipkern.driver import Device
from tests.hipkern.packed import FORMS, Form, Rig, columns, payload, values_of


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS4Q_HIP", "sim")
        with Device.open() as device:
            yield Rig(device)


def _decoded(rig: Rig, form: Form, data: np.ndarray, rows: int, cols: int) -> tuple[object, object]:
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
