"""What is measured at all: candidates, the variant, types that the pilot rules out, sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from ds4q.artifact.types import HFP4G32, ROCMFP2, ROCMFP3, ROCMFP4
from ds4q.quantize import pilot
from ds4q.quantize.errors import JobError
from ds4q.quantize.grid import ExpertDims
from ds4q.quantize.imatrix import Imatrix
from ds4q.quantize.losses import VARIANTS_107, WORDS, Meter, Words, weigh
from ds4q.quantize.pilot import Measured, measure
from tests.checks import check_refused
from tests.quantize import routed
from tests.quantize.routed import EXPERTS, LAYERS, WIDTH, K

DUAL, MIX2, MIX3 = (WORDS.index(w) for w in ("rocmfp2-dual", "rocmfp2-mix", "rocmfp3-mix"))
FP3, FP4 = WORDS.index("rocmfp3"), WORDS.index("fp4")


def measured(
    folder: Path, variant: str | None = None, imatrix: Imatrix | None = None, threads: int = 1
) -> Measured:
    with routed.opened(folder) as (checkpoint, audited):
        dims = ExpertDims.of(audited)
        meter = Meter.of(checkpoint, audited.units, dims, imatrix, threads)
        return measure(meter, variant, lambda nbytes: None)


def open_words(found: Measured, part: int) -> set[str]:
    """Types that some expert can have."""
    some = np.isfinite(found.losses[:, :, part]).any(axis=0).any(axis=0)
    return {WORDS[at] for at in np.flatnonzero(some)}


def test_a_small_model_is_measured_at_all_types(tmp_path: Path) -> None:
    found = measured(routed.write(tmp_path / "m"))
    best = min(found.variants, key=found.variants.__getitem__)
    assert set(found.variants) == set(VARIANTS_107)
    assert open_words(found, 0) == {best, "rocmfp2-mix", "rocmfp3", "rocmfp4", "fp4"}
    assert open_words(found, 1) == open_words(found, 0) | {"rocmfp3-mix"}
    assert found.weights == LAYERS * EXPERTS * 3 * WIDTH * K


def test_the_variant_is_that_of_the_least_loss(tmp_path: Path) -> None:
    folder = routed.write(tmp_path / "m")
    for imatrix in (None, routed.statistics(tmp_path / "i")):
        alone = {
            word: measured(folder, word.removeprefix("rocmfp2-"), imatrix) for word in VARIANTS_107
        }
        totals = {
            word: float(found.losses[..., WORDS.index(word)].sum()) for word, found in alone.items()
        }
        found = measured(folder, None, imatrix)
        assert found.variants == pytest.approx(totals)
        best = min(totals, key=totals.__getitem__)
        assert open_words(found, 0) & set(VARIANTS_107) == {best}
        assert np.array_equal(found.losses, alone[best].losses)


def test_a_variant_that_was_asked_for_is_the_only_one(tmp_path: Path) -> None:
    found = measured(routed.write(tmp_path / "m"), "dual")
    assert list(found.variants) == ["rocmfp2-dual"]
    assert open_words(found, 1) & set(VARIANTS_107) == {"rocmfp2-dual"}
    says = ["unknown variant", "q2"]
    check_refused(JobError, lambda: measured(tmp_path / "m", "q2"), says=says)


def test_sizes_are_those_of_the_tensors_that_are_there(tmp_path: Path) -> None:
    folder = routed.write(tmp_path / "m", without=("layers.0.ffn.experts.1.w3", "layers.1.ffn"))
    found = measured(folder)
    for word, kind in ((DUAL, ROCMFP2), (FP3, ROCMFP3), (FP4, HFP4G32)):
        one = kind.payload_bytes((WIDTH, K))
        assert found.nbytes[0, :, 0, word].tolist() == [2 * one, one, 2 * one]
        assert found.nbytes[0, :, 1, word].tolist() == [one] * 3
    assert found.weights == 8 * WIDTH * K


def test_absent_parts_have_no_types(tmp_path: Path) -> None:
    folder = routed.write(tmp_path / "m", without=("layers.0.ffn.experts.1.", "layers.1.ffn"))
    found = measured(folder)
    assert not found.nbytes[0, 1].any()
    assert np.isinf(found.losses[0, 1]).all()
    assert np.isfinite(found.losses[0, [0, 2], :, FP4]).all()


def test_rows_that_no_window_fits_have_no_two_bit_types(tmp_path: Path) -> None:
    found = measured(routed.write(tmp_path / "m", down_k=96))
    assert "rocmfp2-mix" in open_words(found, 0)
    assert open_words(found, 1) == {"rocmfp3", "rocmfp3-mix", "rocmfp4", "fp4"}
    assert not found.nbytes[:, :, 1, [DUAL, MIX2]].any()
    three = measured(routed.write(tmp_path / "n", k=96, down_k=96))
    assert not three.variants
    assert open_words(three, 0) == {"rocmfp3", "rocmfp4", "fp4"}


def test_types_dearer_than_lossless_are_no_candidates(tmp_path: Path) -> None:
    """A row header weighs less, the longer the row: from 512 on FP4 itself is the cheaper."""
    assert ROCMFP4.row_bytes(480) < HFP4G32.row_bytes(480)
    assert ROCMFP4.row_bytes(512) == HFP4G32.row_bytes(512)
    folder = routed.write(tmp_path / "m", layers=1, experts=1, k=512, down_k=384)
    found = measured(folder)
    assert "rocmfp4" not in open_words(found, 0)
    assert "rocmfp4" in open_words(found, 1)


@dataclass
class Scripted:
    """A meter that measures by a table of losses and remembers what it was asked."""

    dims: ExpertDims
    error: dict[str, float]
    asked: list[tuple[int, tuple[int, ...], Words]] = field(default_factory=list)
    imatrix: None = None
    units: dict[tuple[int, int, str], object] = field(default_factory=dict)

    def measure(
        self, layer: int, experts: Sequence[int], words: Words, advance: object
    ) -> npt.NDArray[np.float64]:
        self.asked.append((layer, tuple(experts), dict(words)))
        found = np.full((len(experts), 3, len(WORDS), 3), np.nan)
        for at, part in enumerate(("gate-up", "gate-up", "down")):
            for word in words[part]:  # type: ignore[index]
                found[:, at, WORDS.index(word)] = self.error[word], 1, 1
        return found


def test_in_a_large_model_the_pilot_rules_types_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pilot, "FEW_EXPERTS", 5)
    monkeypatch.setattr(pilot, "PILOT_EXPERTS", 2)
    error = dict.fromkeys(WORDS, 0.5) | {
        "rocmfp2-sign": 0.1,
        "rocmfp2-mix": 0.2,
        "rocmfp3": 0.03,
        "rocmfp3-mix": 0.02,
        "rocmfp4": 0.04,
        "fp4": 0.0,
    }
    meter = Scripted(ExpertDims(2, 6, K, K), error)
    found = measure(meter, None, lambda nbytes: None)  # type: ignore[arg-type]
    first, second, third, fourth = meter.asked
    assert (first[:2], second[:2]) == ((0, (1, 4)), (1, (1, 4)))
    assert set(first[2]["gate-up"]) == set(WORDS) - {"rocmfp3-mix"}
    assert set(first[2]["down"]) == set(WORDS)
    # The other variants, mixed 2-bit (no smaller and worse), and FP4 encoded (larger and worse).
    kept = {"gate-up": ["rocmfp2-sign", "rocmfp3", "fp4"]}
    kept["down"] = ["rocmfp2-sign", "rocmfp3-mix", "fp4"]
    assert third == (0, (0, 2, 3, 5), kept)
    assert fourth == (1, (0, 2, 3, 5), kept)
    for part, words in ((0, kept["gate-up"]), (1, kept["down"])):
        assert open_words(found, part) == set(words)
        assert np.isfinite(found.losses[:, :, part, [WORDS.index(w) for w in words]]).all()


def test_pilot_and_others_are_measured_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = routed.write(tmp_path / "m", experts=5)
    whole = measured(folder)
    monkeypatch.setattr(pilot, "FEW_EXPERTS", 4)
    monkeypatch.setattr(pilot, "PILOT_EXPERTS", 3)
    found = measured(folder, threads=3)
    same = np.isfinite(found.losses)
    assert same.any(axis=(0, 1)).sum() < np.isfinite(whole.losses).any(axis=(0, 1)).sum()
    assert np.array_equal(found.losses[same], whole.losses[same])


def test_weigh_is_what_losses_are_made_with(tmp_path: Path) -> None:
    folder = routed.write(tmp_path / "m")
    found = measured(folder, "dual")
    with routed.opened(folder) as (checkpoint, audited):
        meter = Meter.of(checkpoint, audited.units, ExpertDims.of(audited), None, 1)
        words: Words = {part: ["rocmfp2-dual", "fp4"] for part in ("gate-up", "down")}
        sums = [meter.measure(n, range(EXPERTS), words, lambda nbytes: None) for n in range(LAYERS)]
    assert np.array_equal(found.losses[..., DUAL], weigh(np.stack(sums), None)[..., DUAL])
