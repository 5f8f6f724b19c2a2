"""Decoding on the device against the CPU codecs: every type, faults by place, a device that fails.

The device is the simulated one.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from ds4q.artifact.codings import Codings
from ds4q.artifact.formats import codec_for
from ds4q.artifact.hfq import TensorEntry
from ds4q.artifact.report import Check
from ds4q.artifact.types import BF16, F16, F32, HFP4G32, Q8F16, RAW, TIDI32, TYPES, TensorType
from ds4q.hipkern.driver import Device
from ds4q.hipkern.kernels import Kernels
from ds4q.hipkern.selftest.inputs import Inputs
from ds4q.hipkern.selftest.packed import FORMATS, Format
from ds4q.hipkern.sim.control import Control
from ds4q.hipkern.source import FOLDER
from ds4q.runtime.device.decode_check import DeviceDecoding

U8 = npt.NDArray[np.uint8]
NAME = "layers.3.ffn.experts.7.w2.weight"
PLACE = (NAME, 3, 7, "w2")


def altered(folder: Path, file: str, before: str, after: str) -> Path:
    """A copy of the kernels' sources with one change."""
    copy = folder / "kernels"
    shutil.copytree(FOLDER, copy)
    text = (copy / file).read_text("utf-8")
    assert before in text
    (copy / file).write_text(text.replace(before, after), "utf-8")
    return copy


def entry_of(type_id: int, rows: int, k: int, name: str = NAME) -> TensorEntry:
    kind = TYPES[type_id]
    shape = (rows, k) if rows > 1 else (k,)
    return TensorEntry(name, type_id, shape, kind.group_size, kind.payload_bytes(shape), 0)


def check_tensor(
    form: Format, payload: U8, rows: int, k: int, *, folder: Path = FOLDER, piece: int = 32
) -> Check:
    """The check of one tensor, shown in pieces of ``piece`` rows."""
    check = Check("device")
    entry = entry_of(form.kind.id, rows, k)
    coding = {} if form.coding is None else {NAME: form.coding}
    device = Device.open()
    decoding = DeviceDecoding(check, Codings(by_name=coding), device, Kernels(device, folder))
    tensor = decoding.begin(entry, rows, k)
    assert tensor is not None
    for first in range(0, rows, piece):
        count = min(piece, rows - first)
        start, nbytes = form.kind.span(first, count, k)
        tensor.rows(first, count, payload[start : start + nbytes])
    for failure in tensor.done():
        check.fail(failure)
    decoding.close()
    return check


# ---------------------------------------------------------------- equal


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.label)
def test_every_type_in_every_coding_decodes_to_the_codecs_bits(sim: Control, form: Format) -> None:
    rows, k = 70, form.kind.row_multiple or 96
    payload = Inputs(form.label).packed(form.kind, rows, k, wide=True, coding=form.coding)
    check = check_tensor(form, payload.reshape(-1), rows, k)
    assert check.failures == []
    figures = check.figures
    assert (figures["tensors"], figures["weights"]) == (1, rows * k)
    assert figures["bytes"] == payload.size
    assert (figures["kind"], figures["arch"]) == ("sim", "sim")
    assert any("simulated" in note for note in check.notes)


@pytest.mark.parametrize("kind", [F16, F32, BF16], ids=lambda kind: kind.name)
@pytest.mark.parametrize(("rows", "k"), [(1, 1), (1, 3), (33, 5), (64, 96)])
def test_rows_that_are_no_whole_blocks(sim: Control, kind: TensorType, rows: int, k: int) -> None:
    form = Format("", kind)
    payload = codec_for(form.kind.id).encode(Inputs("odd").values(rows, k))
    check = check_tensor(form, payload, rows, k)
    assert check.failures == []
    assert check.figures["weights"] == rows * k


def test_blocks_that_run_across_rows(sim: Control) -> None:
    rows, k = 64, 24  # 48 groups of 32
    values = Inputs("across").values(rows, k)
    payload = codec_for(Q8F16.id).encode(values)
    check = check_tensor(Format("", Q8F16), payload, rows, k)
    assert check.failures == []
    assert check.figures["weights"] == rows * k


def test_ids_and_raw_bytes_are_counted_and_left_alone(sim: Control) -> None:
    check, device = Check("device"), Device.open()
    decoding = DeviceDecoding(check, Codings(), device, Kernels(device))
    assert decoding.begin(entry_of(TIDI32.id, 4, 6, "a"), 4, 6) is None
    assert decoding.begin(entry_of(RAW.id, 1, 90, "b"), 1, 90) is None
    decoding.close()
    assert check.ok
    assert (check.figures["tensors"], check.figures["without_weights"]) == (0, 2)


# ---------------------------------------------------------------- different

SCALE_ZERO = "byte == 0 || byte == 255 ? 0x00400000u"  # of ds4q_e8m0


def hfp4(rows: int, k: int) -> U8:
    packed = Inputs("hfp4").packed(HFP4G32, rows, k, wide=False, coding=None)
    packed[:, :2] = np.array([0x00, 0x3C], dtype=np.uint8)
    return packed


def test_a_decode_that_is_broken_is_named_by_place(sim: Control, tmp_path: Path) -> None:
    rows, k = 70, 96
    packed = hfp4(rows, k)
    block = packed[41, 16 + 2 * 17 : 16 + 3 * 17]  # row 41, block 2
    block[0] = 0  # 2^-127, a subnormal: what the altered kernel takes for zero
    block[1:] = 0x20  # codes 0 and 2
    folder = altered(tmp_path, "ds4q_unpack.h", SCALE_ZERO, SCALE_ZERO.replace("4", "0"))
    check = check_tensor(Format("", HFP4G32), packed.reshape(-1), rows, k, folder=folder)
    (failure,) = check.failures
    assert (failure.tensor, failure.layer, failure.expert, failure.projection) == PLACE
    assert (failure.row, failure.block) == (41, 2)
    assert failure.message == (
        "the device decodes 16 of 6,720 values to other bits, first value 1 of the block"
    )
    assert failure.expected == "0x00400000 (5.87747175e-39)"
    assert failure.found == "0x00000000 (0)"
    assert check_tensor(Format("", HFP4G32), packed.reshape(-1), rows, k).ok


def test_a_nan_is_a_nan(sim: Control) -> None:
    packed = hfp4(3, 64)
    packed[1, 16] = 0xFF  # which the payload's own check refuses
    assert check_tensor(Format("", HFP4G32), packed.reshape(-1), 3, 64).ok


def test_only_an_end_of_a_piece_is_wrong(sim: Control, tmp_path: Path) -> None:
    """The last value of the last row: no kernel result past a mistake is skipped."""
    rows, k = 33, 64
    packed = np.zeros((rows, 2 * k), dtype=np.uint8)
    packed[-1, -2:] = 1, 0x80  # -2^-24: the altered kernel has another sign
    text = "    value[i] = format::HEADER"
    after = "    if (i == 31 && exact < 0.0f) exact = -exact;\n" + text
    folder = altered(tmp_path, "decode.hip", text, after)
    check = check_tensor(Format("", F16), packed.reshape(-1), rows, k, folder=folder)
    (failure,) = check.failures
    assert (failure.row, failure.block) == (32, 1)
    assert "decodes 1 of 2,112 values" in failure.message
