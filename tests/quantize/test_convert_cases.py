"""The case files of codes, scales and row lengths, from shard to artifact."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ds4q.artifact.formats import codec_for
from ds4q.artifact.hfq import Reader
from ds4q.quantize.errors import SourceValueError
from tests.checks import check_refused
from tests.quantize import models

Array = npt.NDArray[Any]


@pytest.fixture
def quantized(cases_dir: Path, tmp_path: Path) -> Any:
    """Quantize one case file; the open artifact."""
    opened = []

    def run(name: str) -> Reader:
        models.run(cases_dir / f"{name}.safetensors", tmp_path / f"{name}.hfq")
        opened.append(Reader(tmp_path / f"{name}.hfq"))
        return opened[-1]

    yield run
    for reader in opened:
        reader.close()


W1 = "layers.0.ffn.experts.0.w1.weight"


def values(reader: Reader, name: str = W1) -> Array:
    entry = reader.entry(name)
    return codec_for(entry.type_id).decode(reader.read(name), entry.shape)


def test_c06_nibble_order(quantized: Any) -> None:
    reader = quantized("c06_nibble")
    assert reader.read(W1).tobytes().hex() == (
        "003c0000010000000000000000000000" + "7f" + "1032547698badcfe" * 2
    )
    half = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert values(reader)[0].tolist() == half * 2
    assert np.signbit(values(reader)[0, 8])


def test_c07_scales_are_not_transposed(quantized: Any) -> None:
    assert values(quantized("c07_scale2x2")).sum(axis=1).tolist() == [96, 384]
    dense = values(quantized("c07_fp8_200x300"), "layers.0.attn.wq_a.weight")
    assert [dense[at] for at in ((127, 127), (0, 299), (128, 128), (150, 290))] == [1, 4, 16, 32]


def test_c07_another_grid_is_never_reshaped(cases_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"expected \[2, 3\], found \[3, 2\]"):
        models.run(cases_dir / "c07_fp8_grid_3x2.safetensors", tmp_path / "x.hfq")
    assert list(tmp_path.iterdir()) == []


def test_c08_exponent_is_a_code(quantized: Any) -> None:
    reader = quantized("c08_scale120")
    assert (values(reader) == 0.0078125).all()
    assert reader.read(W1)[16:19].tobytes().hex() == "782222"


def test_c09_ends_of_the_range(quantized: Any, tmp_path: Path) -> None:
    payload = quantized("c09_edge_scales").read(W1)
    assert hashlib.sha256(payload.tobytes()).hexdigest() == (
        "dd169fc35bf35c09fd09ada7e55dc74c2ab87514f200c7bf3981cb71b79c9c7b"
    )


def test_c09_events_are_in_summary_and_receipt(cases_dir: Path, tmp_path: Path) -> None:
    summary = models.run(cases_dir / "c09_edge_scales.safetensors", tmp_path / "x.hfq")
    events = {"tiny_scales": 2, "overflow_scales": 2}
    assert summary.document()["events"] == events
    assert summary.receipts[0].tensors[0].events == events


def test_c09_nan_scale_is_refused_and_leaves_nothing(cases_dir: Path, tmp_path: Path) -> None:
    source = cases_dir / "c09_scale_nan.safetensors"
    check_refused(
        SourceValueError,
        lambda: models.run(source, tmp_path / "x.hfq"),
        path=source,
        tensor=W1,
        says=["NaN scale byte", "row 0, block 7"],
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("k", "row_bytes"), [(32, 33), (64, 50), (192, 118), (288, 169), (704, 390), (2304, 1240)]
)
def test_c11_any_multiple_of_32_is_written_and_marked(
    k: int, row_bytes: int, quantized: Any, cases_dir: Path
) -> None:
    reader = quantized(f"c11_K{k}")
    rows = reader.read(W1).reshape(3, row_bytes)
    assert (rows == rows[0]).all()
    assert reader.metadata["ds4q"]["k256"] == (k % 256 == 0)


def test_c11_other_rows_are_refused(cases_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"w1\.weight: row length is not a multiple of 32"):
        models.run(cases_dir / "c11_K48.safetensors", tmp_path / "x.hfq")
    assert list(tmp_path.iterdir()) == []


def test_hash_table_that_names_no_expert_is_refused_by_the_job(tmp_path: Path) -> None:
    tensors = models.mini_tensors()
    name = "layers.0.ffn.gate.tid2eid"
    ids = np.zeros((32, 2), "<i8")
    ids[31, 1] = 16
    tensors[name] = models.Tensor("I64", ids.shape, ids.tobytes())
    source = models.save(tmp_path / "s", tensors)
    (tmp_path / "o").mkdir()
    check_refused(
        SourceValueError,
        lambda: models.run(source, tmp_path / "o" / "x.hfq"),
        tensor=name,
        says=["16 at row 31, column 1"],
    )
    assert list((tmp_path / "o").iterdir()) == []
