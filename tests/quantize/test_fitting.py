"""Books of whole jobs where an imatrix says nothing: they are those of a job without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds4q import api
from ds4q.artifact.hfq import Reader
from ds4q.artifact.receipt import Receipt, read_receipt, receipt_path
from ds4q.artifact.types import MIXED, RAW, TYPES
from ds4q.quantize.checkpoint import Checkpoint
from ds4q.quantize.imatrix import LayerStatistics, write_imatrix
from tests.quantize import models
from tests.quantize.imatrix import files

LAYERS, EXPERTS, D, WIDTH = 4, 4, 256, 128
HELD = (0, 3)  # the layers that the checkpoint has


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    return models.save(folder / "s", models.expert_tensors(), config=models.EXPERT_CONFIG)


def silent_gguf(path: Path, source: Path) -> Path:
    """Statistics of llama.cpp: all experts saw tokens, all inputs were zero."""
    found: dict[str, np.ndarray[Any, Any]] = {}
    for layer in range(LAYERS):
        for word, columns in (("gate", D), ("up", D), ("down", WIDTH)):
            name = f"blk.{layer}.ffn_{word}_exps.weight"
            found[f"{name}.in_sum2"] = np.zeros((EXPERTS, columns), "<f4")
            found[f"{name}.counts"] = np.full((EXPERTS, 1), 25, "<f4")
    path.write_bytes(files.gguf(found))
    return path


def silent_own(path: Path, source: Path) -> Path:
    """The same as ds4q writes it."""
    layer = LayerStatistics(
        tokens=np.full(EXPERTS, 25),
        gain=np.ones(EXPERTS, np.float32),
        gate_up=np.zeros((EXPERTS, D), np.float32),
        down=np.zeros((EXPERTS, WIDTH), np.float32),
    )
    with Checkpoint.open(source, allow_partial=True) as checkpoint:
        write_imatrix(
            path,
            [layer] * LAYERS,
            fingerprint=checkpoint.fingerprint(),
            total_tokens=100,
            window_tokens=100,
            texts=["0" * 64],
        )
    return path


def quantize(source: Path, out: Path, recipe: str, **options: Any) -> Receipt:
    api.quantize(source, out, recipe=recipe, allow_partial=True, warn=lambda text: None, **options)
    return read_receipt(receipt_path(out))


def filled_groups(name: str, columns: int) -> int:
    """Groups of that many columns with a weight other than zero."""
    weight = models.expert_tensors()[name]
    codes = np.frombuffer(weight.data, np.uint8).reshape(-1, columns // 2)
    return int(((codes & 0x77) != 0).any(axis=1).sum())


@pytest.mark.parametrize("recipe", ["mix", "mix2", "rocmfp23"])
@pytest.mark.parametrize("silent", [silent_gguf, silent_own])
def test_an_imatrix_of_zeros_weighs_all_alike(
    recipe: str, silent: Any, source: Path, tmp_path: Path
) -> None:
    out, plain_out = tmp_path / "x.hfq", tmp_path / "plain.hfq"
    imatrix = silent(tmp_path / "i.imatrix", source)
    receipt = quantize(source, out, recipe, imatrix=imatrix)
    plain_receipt = quantize(source, plain_out, recipe)
    mixed = 0
    with Reader(out) as reader, Reader(plain_out) as plain:
        assert list(reader.tensors) == list(plain.tensors)
        for name, entry in reader.tensors.items():
            assert reader.read(name).tobytes() == plain.read(name).tobytes()
            mixed += TYPES[entry.type_id] in MIXED
    assert mixed == {"mix": 24, "mix2": 24, "rocmfp23": 0}[recipe]

    experts = [tensor for tensor in receipt.tensors if tensor.type != RAW.name]
    assert len(experts) == len(HELD) * EXPERTS * 3
    for tensor in experts:
        counted = tensor.events["unweighted_groups"]
        assert counted in [filled_groups(tensor.name, columns) for columns in (16, 32)]
    assert not any("unweighted_groups" in tensor.events for tensor in plain_receipt.tensors)
    weighed = api.verify(out, source=source, imatrix=imatrix)
    assert weighed.failure_lines() == []
    found, wanted = (
        next(check for check in report.checks if check.name == "source").figures
        for report in (weighed, api.verify(plain_out, source=source))
    )
    assert found == wanted
    assert found["nrmse"] > 0
