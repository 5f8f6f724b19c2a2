"""Blocks outside the range of a ROCmFPX type: counted where they cost accuracy, and only there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds4q import api
from ds4q.artifact import types as t
from ds4q.artifact.formats import codec_for, hfp4g32
from ds4q.artifact.receipt import read_receipt, receipt_path
from ds4q.quantize.errors import SaturationError
from ds4q.quantize.exact import encode_fp4
from ds4q.quantize.job import Summary
from ds4q.quantize.saturation import saturated_blocks
from tests.quantize import models

NAME = "layers.0.ffn.experts.0.w1"
RANGES = [  # E8M0 bytes from and to which a block whose largest code is 6 is within range
    (t.ROCMFP4, None, 118, 135),
    (t.ROCMFP4_FAST, None, 118, 135),
    (t.ROCMFP6, "zero", 118, 137),
    (t.ROCMFP6, "neg32", 118, 137),
    (t.ROCMFP8, None, 118, 139),
    (t.ROCMFP3, None, 118, 134),
    (t.ROCMFP2, "dual", 117, 133),
    (t.ROCMFP2, "affine", 116, 132),
    (t.ROCMFP2, "s40", 118, 134),
    (t.ROCMFP2, "sign", 117, 133),
]


def measured(e: int, kind: t.TensorType, coding: str | None) -> tuple[int, float]:
    """Saturated blocks of 64, and the relative error, of random codes at one E8M0 byte."""
    rng = np.random.default_rng(7)
    codes = rng.integers(0, 256, (16, 64), dtype=np.uint8)
    codes[:, ::8] |= 0x77  # each half holds a 6
    scales = np.full((16, 4), e, np.uint8)
    packed = np.empty((16, kind.row_bytes(128)), np.uint8)
    encode_fp4(codes, scales, kind, coding, None, packed)
    x = hfp4g32.source_values(codes, scales).astype(np.float64)
    y = codec_for(kind.id, coding).decode(packed.reshape(-1), x.shape)
    error = float(np.sqrt(((x - y) ** 2).sum() / (x**2).sum()))
    return saturated_blocks(codes, scales, packed, kind, coding), error


@pytest.mark.parametrize(("kind", "coding", "low", "high"), RANGES)
def test_blocks_are_saturated_where_the_range_costs_accuracy(
    kind: t.TensorType, coding: str | None, low: int, high: int
) -> None:
    _, ordinary = measured(125, kind, coding)
    for e in [*range(100, 122), *range(130, 151)]:
        count, error = measured(e, kind, coding)
        assert (count == 64) == (not low <= e <= high), e
        assert count in (0, 64)
        if count == 0:
            assert error <= 1.25 * ordinary + 0.02
        else:
            assert error > 1.01 * ordinary


def quantize(source: Path, out: Path, recipe: str = "fp4", **options: Any) -> Summary:
    """The job on a partial model, whose warnings are not the point here."""
    return api.quantize(
        source, out, recipe=recipe, allow_partial=True, warn=lambda text: None, **options
    )


def source_at(folder: Path, e: int, rows: int) -> Path:
    """A checkpoint with the blocks of some rows of one matrix at E8M0 byte ``e``."""
    tensors = dict(models.expert_tensors(layers=(0,), experts=2))
    for name, tensor in tensors.items():
        if name.endswith(".scale"):
            tensors[name] = models.Tensor("F8_E8M0", tensor.shape, b"\x7d" * len(tensor.data))
    scales = np.full(tensors[f"{NAME}.scale"].shape, 125, np.uint8)
    scales[:rows] = e
    tensors[f"{NAME}.scale"] = models.Tensor("F8_E8M0", scales.shape, scales.tobytes())
    return models.save(folder, tensors, config=models.EXPERT_CONFIG)


@pytest.mark.parametrize("recipe", ["rocmfp4", "rocmfp8", "rocmfp2-affine", "mix"])
@pytest.mark.parametrize("e", [108, 150])
def test_a_lost_expert_is_refused_and_otherwise_counted_everywhere(
    tmp_path: Path, recipe: str, e: int
) -> None:
    source = source_at(tmp_path / "s", e, 128)
    out = tmp_path / "x.hfq"
    with pytest.raises(SaturationError, match="allow-saturation") as caught:
        quantize(source, out, recipe)
    assert f"{NAME}.weight" in str(caught.value)
    assert not out.exists()

    summary = quantize(source, out, recipe, allow_saturation=True, resume=True)
    assert summary.resumed_bytes > 0
    blocks = 128 * 8
    assert summary.document()["events"]["saturated_blocks"] == blocks
    note = f"not exact: {blocks:,} blocks saturated in 1 tensor"
    events = {r.name: r.events for r in read_receipt(receipt_path(out)).tensors}
    assert events.pop(f"{NAME}.weight") == {"saturated_blocks": blocks}
    assert not any("saturated_blocks" in each for each in events.values())

    report = api.verify(out, source=source)
    assert report.ok
    figures = {check.name: check.document()["figures"] for check in report.checks}
    assert figures["source"]["saturated_blocks"] == blocks
    assert any(note in n for n in figures["source"]["notes"])
    assert any(note in n for n in figures["receipt"]["notes"])


def test_a_few_blocks_are_written_and_counted(tmp_path: Path) -> None:
    source = source_at(tmp_path / "s", 117, 1)
    summary = quantize(source, tmp_path / "x.hfq", "rocmfp3")
    assert summary.document()["events"] == {"saturated_blocks": 8}


def test_a_lossless_artifact_holds_every_scale(tmp_path: Path) -> None:
    source = source_at(tmp_path / "s", 150, 128)
    summary = quantize(source, tmp_path / "x.hfq")
    assert summary.document()["events"] == {}


def test_a_budget_keeps_an_expert_that_no_type_reaches_lossless(tmp_path: Path) -> None:
    source = source_at(tmp_path / "s", 150, 128)
    out = tmp_path / "x.hfq"
    quantize(source, out, "budget", target_bpw=3.9)
    types = {r.name: r.type for r in read_receipt(receipt_path(out)).tensors}
    gate = [types[f"layers.0.ffn.experts.{i}.w1.weight"] for i in range(2)]
    assert gate[0] == "HFP4G32"
    assert gate[1] != "HFP4G32"
