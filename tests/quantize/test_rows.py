"""Reading runs of rows: the right bytes, in buffers that are used again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from ds4q.artifact.numeric import E8M0
from ds4q.quantize.audit import Audit, audit
from ds4q.quantize.checkpoint import Checkpoint
from ds4q.quantize.convert import Rows
from ds4q.quantize.errors import SourceReadError, SourceValueError
from ds4q.quantize.plan import Options, PlannedTensor, make_plan
from ds4q.quantize.recipe import RECIPES
from ds4q.quantize.rows import Buffers, RowReader, source_ranges
from tests.quantize import models

TENSORS = models.mini_tensors()


@dataclass
class Opened:
    """An open checkpoint and what the plan makes of it, by name."""

    checkpoint: Checkpoint
    audit: Audit
    planned: dict[str, PlannedTensor]

    def reader(self, name: str, heard: list[int] | None = None) -> RowReader:
        reached = (lambda done: None) if heard is None else heard.append
        unit = self.planned[name].unit
        return RowReader(self.checkpoint, self.audit, unit, Buffers(), reached)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    with Checkpoint.open(models.mini(tmp_path), allow_partial=True) as checkpoint:
        audited = audit(checkpoint, allow_partial=True)
        options = Options(RECIPES["fp4"], draft="keep")
        plan = make_plan(checkpoint, audited, tmp_path / "x.hfq", options, "0")
        yield Opened(checkpoint, audited, {t.entry.name: t for t in plan.outputs[0].tensors})


def cut(name: str, rows: int, first: int, count: int) -> bytes:
    """Rows of a source tensor, by slicing its bytes."""
    data = TENSORS[name].data
    row_bytes = len(data) // rows
    return data[first * row_bytes : (first + count) * row_bytes]


@pytest.mark.parametrize(("first", "count"), [(0, 96), (0, 1), (31, 33), (95, 1)])
def test_fp4_rows_come_with_their_scales(first: int, count: int, opened: Opened) -> None:
    stem = "layers.0.ffn.experts.10.w1"
    rows, parts = opened.reader(f"{stem}.weight").read(first, count)
    weight, scale = (cut(f"{stem}.{kind}", 96, first, count) for kind in ("weight", "scale"))
    assert (rows.kind, rows.first, rows.count, rows.k) == ("fp4", first, count, 256)
    assert rows.weight.tobytes() == weight
    assert rows.scale is not None
    assert rows.scale.tobytes() == scale
    assert [part.tobytes() for part in parts] == [weight, scale]


def test_fp8_rows_come_with_the_whole_grid(opened: Opened) -> None:
    reader = opened.reader("layers.0.attn.wq_a.weight")
    raw = np.frombuffer(TENSORS["layers.0.attn.wq_a.scale"].data, np.uint8)
    assert reader.whole_scale is not None
    assert reader.whole_scale.tobytes() == raw.tobytes()
    for first, count in ((0, 5), (130, 70)):
        rows, parts = reader.read(first, count)
        assert [part.tobytes() for part in parts] == [
            cut("layers.0.attn.wq_a.weight", 200, first, count)
        ]
        assert (rows.first, rows.block) == (first, (128, 128))
        assert rows.scale is not None
        assert rows.scale.tolist() == E8M0[raw].reshape(2, 3).tolist()


@pytest.mark.parametrize(
    ("name", "rows"), [("layers.0.attn_norm.weight", 1), ("layers.0.ffn.gate.tid2eid", 32)]
)
def test_plain_rows_have_one_part(name: str, rows: int, opened: Opened) -> None:
    reader = opened.reader(name)
    read, parts = reader.read(rows - 1, 1)
    assert [part.tobytes() for part in parts] == [cut(name, rows, rows - 1, 1)]
    assert read.scale is None
    assert reader.whole_scale is None
    assert read.ids_below == 16  # the experts of the config


def test_the_kernel_hears_of_a_read_before_it(opened: Opened) -> None:
    heard: list[int] = []
    reader = opened.reader("layers.0.ffn.experts.0.w1.weight", heard)
    reader.read(0, 4)
    reader.read(40, 4)
    assert heard == [0, 40 * 128]


def test_rows_beyond_the_tensor_are_refused(opened: Opened) -> None:
    reader = opened.reader("layers.0.ffn.experts.0.w1.weight")
    with pytest.raises(SourceReadError, match="outside the tensor"):
        reader.read(90, 7)


def test_an_illegal_grid_is_refused_before_any_row(tmp_path: Path) -> None:
    tensors = models.mini_tensors()
    name = "layers.0.attn.wq_a.scale"
    tensors[name] = tensors[name]._replace(data=b"\x7f" * 5 + b"\xff")
    with Checkpoint.open(models.save(tmp_path, tensors), allow_partial=True) as checkpoint:
        audited = audit(checkpoint, allow_partial=True)
        plan = make_plan(checkpoint, audited, tmp_path / "x.hfq", Options(RECIPES["fp4"]), "0")
        planned = {t.entry.name: t for t in plan.outputs[0].tensors}
        with pytest.raises(SourceValueError, match="0xff at scale 5"):
            Opened(checkpoint, audited, planned).reader("layers.0.attn.wq_a.weight")


def test_ranges_name_weight_and_scale_in_their_files(opened: Opened) -> None:
    unit = opened.planned["layers.0.ffn.experts.0.w1.weight"].unit
    weight, scale = source_ranges(opened.checkpoint, unit)
    assert weight.fd != scale.fd  # two shards
    for part, kind in ((weight, "weight"), (scale, "scale")):
        raw = np.empty(part.nbytes, np.uint8)
        with Path(f"/proc/self/fd/{part.fd}").open("rb") as stream:
            stream.seek(part.offset)
            stream.readinto(raw.data)
        assert raw.tobytes() == TENSORS[f"layers.0.ffn.experts.0.w1.{kind}"].data
    norm = opened.planned["layers.0.attn_norm.weight"].unit
    assert len(source_ranges(opened.checkpoint, norm)) == 1


def test_buffers_grow_and_are_used_again() -> None:
    buffers = Buffers()
    small = buffers.take("a", 10)
    assert small.nbytes == 10
    large = buffers.take("a", 100)
    large[:] = 7
    assert buffers.take("a", 50).tobytes() == b"\x07" * 50  # the same memory
    assert not np.shares_memory(large, buffers.take("b", 100))


def test_a_run_of_rows_is_all_that_is_held(opened: Opened) -> None:
    buffers = Buffers()
    name = "layers.0.ffn.experts.0.w1.weight"
    reader = RowReader(opened.checkpoint, opened.audit, opened.planned[name].unit, buffers)
    first: Rows = reader.read(0, 8)[0]
    again: Rows = reader.read(8, 8)[0]
    assert np.shares_memory(first.weight, again.weight)
    assert sum(held.nbytes for held in buffers._held.values()) == 8 * (128 + 8)
