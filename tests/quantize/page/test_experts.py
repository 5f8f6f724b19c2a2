"""Cells, kinds and errors of routed experts, and their summary, worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ds4q.artifact.types import HFP4G32, ROCMFP2, ROCMFP3, ROCMFP4
from ds4q.quantize.deepseek4 import classify
from ds4q.quantize.measure import ErrorSums
from ds4q.quantize.page.experts import MAX_LAYERS, MAX_NRMSE, experts, nrmse
from tests.quantize.page.pages import Row, expert, flash, row, sums

W = "layers.{}.ffn.experts.{}.{}.weight"


def gathered(rows: list[Row], errors: dict[str, ErrorSums] | None = None) -> dict[str, Any]:
    found = experts(rows, [classify(r["name"]) for r in rows], errors or {}, True)
    assert found is not None
    return found


def test_cells_name_kinds_and_gaps() -> None:
    rows = [
        *expert(0, 0, ROCMFP2, ROCMFP3),
        *expert(0, 7, ROCMFP4, ROCMFP3),
        *expert(12, 0, ROCMFP2, ROCMFP4),
    ]
    found = gathered(rows)
    assert (found["layers"], found["columns"]) == (["0", "12"], [0, 7])
    gate_up, down = found["parts"]
    assert gate_up["part"] == "gate-up"
    assert gate_up["kinds"] == [
        {"number": 0, "type": "ROCmFP2", "bytes": 20480, "experts": 2},
        {"number": 1, "type": "ROCmFP4", "bytes": 36864, "experts": 1},
    ]
    assert gate_up["cells"] == [[0, 1], [0, -1]]
    assert down["cells"] == [[0, 0], [1, -1]]
    assert gate_up["errors"] is None
    assert found["measured"] is False
    assert found["bytes"] == sum(r["bytes"] for r in rows)


def test_the_error_of_a_part_is_that_of_its_tensors_together() -> None:
    rows = expert(0, 0, ROCMFP2, ROCMFP3) + expert(0, 1, ROCMFP2, HFP4G32)
    errors = {
        W.format(0, 0, "w1"): sums(1.0, 4.0),
        W.format(0, 0, "w3"): sums(3.0, 12.0),
        W.format(0, 0, "w2"): sums(1.0, 100.0),
        W.format(0, 1, "w1"): sums(4.0, 16.0),
        W.format(0, 1, "w3"): sums(5.0, 9.0),
    }
    found = gathered(rows, errors)
    gate_up, down = found["parts"]
    assert gate_up["errors"] == [[0.5, 0.6]]
    assert down["errors"] == [[0.1, None]]
    up, low = found["summary"]
    assert (up["error_mean"], up["error_max"], up["worst"]) == (0.55, 0.6, 1)
    assert (low["error_mean"], low["error_max"], low["worst"]) == (0.1, 0.1, 0)
    assert low["types"] == [("HFP4G32", 1), ("ROCmFP3", 1)]
    assert errors[W.format(0, 0, "w1")].sums[0] == 1.0  # summing left them alone


def test_of_equal_errors_the_first_expert_is_the_worst() -> None:
    rows = [r for number in (3, 1, 2) for r in expert(0, number, ROCMFP2, ROCMFP3)]
    errors = {W.format(0, number, "w2"): sums(1.0, 4.0) for number in (1, 2, 3)}
    (_, down) = gathered(rows, errors)["summary"]
    assert down["worst"] == 1


def test_a_layer_is_summed_up_by_type() -> None:
    rows = [*expert(4, 0, ROCMFP2, ROCMFP3), *expert(4, 1, ROCMFP4, ROCMFP3)]
    rows += expert(4, 2, ROCMFP4, ROCMFP3)
    up, down = gathered(rows)["summary"]
    assert (up["layer"], up["title"], up["types"]) == (
        "4",
        "gate and up",
        [("ROCmFP4", 2), ("ROCmFP2", 1)],
    )
    assert (up["bytes"], down["bytes"]) == (20480 + 2 * 36864, 3 * 14336)
    assert up["bpw"] == pytest.approx((2.5 + 4.5 + 4.5) / 3, abs=1e-6)
    assert (down["bpw"], down["error_max"], down["worst"]) == (3.5, None, None)


def test_drafts_come_after_the_trunk() -> None:
    rows = expert(0, 0, HFP4G32, HFP4G32, "mtp") + expert(10, 0, ROCMFP2, ROCMFP3)
    found = gathered(rows)
    assert found["layers"] == ["10", "mtp.0"]
    assert [r["layer"] for r in found["summary"]] == ["10", "10", "mtp.0", "mtp.0"]


def test_gate_and_up_of_two_types_are_one_cell_that_says_so() -> None:
    rows = expert(0, 0, ROCMFP2, ROCMFP3)
    rows[2] |= {"type": "ROCmFP4"}
    assert gathered(rows)["parts"][0]["kinds"][0]["type"] == "ROCmFP2 + ROCmFP4"


def test_a_part_that_is_not_there_has_no_map() -> None:
    found = gathered([row(W.format(0, 0, "w2"), ROCMFP3, (256, 128))])
    assert [part["part"] for part in found["parts"]] == ["down"]
    assert [r["part"] for r in found["summary"]] == ["down"]


def test_a_file_without_experts_has_none() -> None:
    rows = [row("embed.weight", HFP4G32, (8, 32)), row("strange", HFP4G32, (8, 32))]
    assert experts(rows, [classify(r["name"]) for r in rows], {}, True) is None


def test_numbers_that_no_model_has_are_not_drawn() -> None:
    """Two thousand tensors must not become a million cells."""
    rows = [row(W.format(i, i, "w2"), ROCMFP3, (1, 32)) for i in range(2000)]
    found = gathered(rows)
    assert (found["drawn"], found["parts"]) == (False, [])
    assert (len(found["summary"]), found["layers_left_out"]) == (MAX_LAYERS, 2000 - MAX_LAYERS)


def test_flash_is_drawn() -> None:
    rows, errors = flash()
    found = gathered(rows, errors)
    assert found["drawn"]
    for part in found["parts"]:
        assert [len(r) for r in part["cells"]] == [256] * 43
        assert sum(kind["experts"] for kind in part["kinds"]) == 43 * 256
    assert len(found["summary"]) == 86


def test_infinity_is_a_number_that_json_has() -> None:
    assert nrmse([sums(1.0, 0.0)]) == MAX_NRMSE
    assert nrmse([]) is None
    assert nrmse([sums(0.0, 0.0)]) == 0.0
    assert nrmse([sums(2.0, 1.0)]) == round(math.sqrt(2), 6)
