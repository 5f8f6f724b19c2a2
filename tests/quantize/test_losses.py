"""What types cost: the sums against plain numpy, the formulas by hand, samples, threads, faults."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
import pytest

from ds4q.artifact.errors import PayloadValueError
from ds4q.artifact.formats import Coding, RowCodec, codec_for
from ds4q.artifact.formats.hfp4g32 import source_values
from ds4q.quantize.books import BookFit
from ds4q.quantize.errors import SourceValueError
from ds4q.quantize.grid import ExpertDims
from ds4q.quantize.imatrix import Imatrix
from ds4q.quantize.losses import (
    GATE_UP_WEIGHT,
    MIX_WEIGHT,
    WORDS,
    Meter,
    Words,
    energies,
    reach,
    relative_errors,
    sample_rows,
    weigh,
)
from ds4q.quantize.recipe import EXPERT_TYPES
from tests.checks import check_refused
from tests.quantize import routed
from tests.quantize.routed import EXPERTS, LAYERS, WIDTH, K

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
ALL: Words = {"gate-up": [w for w in WORDS if w != "rocmfp3-mix"], "down": WORDS}
FP4 = WORDS.index("fp4")


def measure(
    folder: Path, words: Words = ALL, imatrix: Imatrix | None = None, **options: int
) -> F64:
    """Sums of all experts of all layers."""
    heard: list[int] = []
    with routed.opened(folder) as (checkpoint, audited):
        dims = ExpertDims.of(audited)
        settings = {"threads": 1} | options
        meter = Meter.of(checkpoint, audited.units, dims, imatrix, **settings)
        found = [
            meter.measure(layer, range(dims.experts), words, heard.append)
            for layer in range(dims.layers)
        ]
        assert sum(heard) == meter.sample_bytes()
    return np.stack(found)


def by_hand(
    folder: Path, name: str, word: str, importance: F32 | None, partner: str = ""
) -> list[float]:
    """Sums for one matrix: general encoder, float64 arithmetic, no code of the meter."""
    with routed.opened(folder) as (checkpoint, audited):
        units = {unit.name: unit for unit in audited.units}

        def raw(stem: str) -> list[npt.NDArray[np.uint8]]:
            unit = units[f"{stem}.weight"]
            rows = unit.info.logical_shape[0]
            return [checkpoint.read(tensor).reshape(rows, -1) for tensor in unit.tensors]

        codes, scales = raw(name)
        x = source_values(codes, scales)
        kind, coding = EXPERT_TYPES[word][0], EXPERT_TYPES[word][1] or None
        chosen: Coding | None = coding
        if kind.coding == "row":
            fit = BookFit(4 if word == "rocmfp2-mix" else 8)
            for stem in sorted({name, partner or name}):
                codes, scales = raw(stem)
                fit.add(codes, scales, importance)
            chosen = fit.fit().row
        codec = codec_for(kind.id, chosen)
        y = x
        if word != "fp4":
            assert isinstance(codec, RowCodec)
            packed = codec.encode_rows(x, importance)[0]
            y = codec.decode(packed.reshape(-1), x.shape)
    wide, back = x.astype(np.float64), y.astype(np.float64)
    terms = ((wide - back) ** 2, wide**2, wide * back)
    weights = 1.0 if importance is None else importance.astype(np.float64)
    return [float((weights * term).sum()) for term in terms]


@pytest.mark.parametrize("word", WORDS)
def test_sums_are_those_of_plain_numpy(tmp_path: Path, word: str) -> None:
    folder = routed.write(tmp_path / "m")
    imatrix = routed.statistics(tmp_path / "i")
    for statistics in (None, imatrix):
        sums = measure(folder, {"gate-up": ALL["gate-up"], "down": WORDS}, statistics)
        for at, projection in ((1, "w3"), (2, "w2")):
            if word == "rocmfp3-mix" and projection == "w3":
                assert np.isnan(sums[1, 0, at, WORDS.index(word)]).all()
                continue
            weights = None if statistics is None else statistics.importance(1, 0, projection)
            stem = "layers.1.ffn.experts.0."
            partner = f"{stem}w1" if projection == "w3" else ""
            expected = by_hand(folder, f"{stem}{projection}", word, weights, partner)
            assert sums[1, 0, at, WORDS.index(word)] == pytest.approx(expected, rel=1e-9)


def test_only_what_is_asked_for_is_measured(tmp_path: Path) -> None:
    folder = routed.write(tmp_path / "m", without=("layers.0.ffn.experts.1.w3", "layers.1"))
    sums = measure(folder, {"gate-up": ["rocmfp2-mix", "rocmfp3"], "down": ["fp4"]})
    measured = ~np.isnan(sums[0, :, :, :, 0])
    assert set(np.flatnonzero(measured[0, 0])) == {WORDS.index("rocmfp2-mix"), 5}
    assert set(np.flatnonzero(measured[0, 2])) == {FP4}
    # Without its partner a gate can have no books, and an absent tensor has no sums at all.
    assert set(np.flatnonzero(measured[1, 0])) == {WORDS.index("rocmfp3")}
    assert not measured[1, 1].any()


def test_threads_and_runs_change_nothing(tmp_path: Path) -> None:
    folder = routed.write(tmp_path / "m", experts=9)
    one = measure(folder)
    assert np.array_equal(one, measure(folder, threads=4), equal_nan=True)
    assert np.array_equal(one, measure(folder, threads=2), equal_nan=True)


def test_samples_are_evenly_spaced_whole_rows_scaled_up(tmp_path: Path) -> None:
    assert sample_rows(12, 128, 3 * 128 + 5) == [2, 6, 10]
    assert sample_rows(12, 128, 1) == [6]
    assert sample_rows(5, 128, 10_000) == [0, 1, 2, 3, 4]
    words: Words = {"gate-up": ["rocmfp3"], "down": ["rocmfp3"]}
    folder = routed.write(tmp_path / "m", rows=12)
    sampled = measure(folder, words, sample_weights=3 * K)
    at = WORDS.index("rocmfp3")
    with routed.opened(folder) as (checkpoint, audited):
        unit = next(u for u in audited.units if u.name.endswith("1.ffn.experts.2.w2.weight"))
        arrays = [checkpoint.read(t).reshape(12, -1)[[2, 6, 10]] for t in unit.tensors]
    x = source_values(arrays[0], arrays[1]).astype(np.float64)
    assert sampled[1, 2, 2, at, 1] == pytest.approx(4 * (x * x).sum())
    # Rows of zeros in between cost nothing, so that the whole matrix gives something else.
    assert sampled[1, 2, 2, at, 1] != pytest.approx(measure(folder, words)[1, 2, 2, at, 1])


def test_relative_errors_by_hand() -> None:
    sums = np.full((3, len(WORDS), 3), np.nan)
    plain, mixed = WORDS.index("rocmfp3"), WORDS.index("rocmfp3-mix")
    sums[0, plain] = 2, 100, 95  # error 0.02, shrunk by 0.05
    sums[1, plain] = 6, 200, 200
    sums[2, plain] = 5, 50, 48
    sums[2, mixed] = 5, 50, 50
    found = relative_errors(sums)
    gate, up, down = 0.02 + 3 * 0.05**2, 0.03, 0.1 + 3 * 0.04**2
    assert found[0, plain] == pytest.approx(GATE_UP_WEIGHT * (gate + up))
    assert found[1, plain] == pytest.approx(down)
    assert found[1, mixed] == pytest.approx(MIX_WEIGHT * 0.1)
    assert np.isnan(found[0, mixed])
    assert np.isnan(found[:, FP4]).all()


def test_a_matrix_of_zeros_loses_nothing() -> None:
    sums = np.zeros((1, 1, 3, len(WORDS), 3))
    assert not relative_errors(sums).any()
    assert not weigh(sums, None).any()


def sums_of_down(source: list[list[float]]) -> F64:
    """Sums with which down of every expert has the given energy, NaN where it is absent."""
    energy = np.array(source)
    sums = np.full((*energy.shape, 3, len(WORDS), 3), np.nan)
    sums[:, :, 2, FP4] = np.stack([np.zeros_like(energy), energy, energy], axis=-1)
    return sums


def test_energies_fill_what_is_absent() -> None:
    sums = sums_of_down([[1, np.nan, 9], [np.nan, np.nan, np.nan], [0, 0, 0]])
    found = energies(sums, None)
    roots = np.sqrt([1, 5, 9])
    assert found[0] == pytest.approx(15 * roots / roots.sum())
    assert found[1].tolist() == [1, 1, 1]
    assert found[2].tolist() == [0, 0, 0]


def test_energies_count_tokens_and_routing_weights(tmp_path: Path) -> None:
    imatrix = routed.statistics(tmp_path / "i")
    found = energies(sums_of_down([[2.0] * EXPERTS] * LAYERS), imatrix)
    for layer in range(LAYERS):
        tokens, gain = imatrix.tokens(layer), imatrix.gain(layer).astype(np.float64)
        assert (tokens[-1], gain[-1]) == (0, 0)
        each = 2 * np.append(gain[:-1], gain[:-1].mean())
        assert found[layer].sum() == pytest.approx(((tokens + 1) * each).sum())
        shares = (tokens + 1) * np.sqrt(each)
        assert found[layer] / found[layer].sum() == pytest.approx(shares / shares.sum())


def test_reach_falls_with_the_layers_behind_and_the_stream_so_far() -> None:
    energy = np.array([[1.0, 1.0], [2.0, 2.0], [0.0, 0.0]])
    # Mean energy of a layer is 2: the stream is 1 + 1, 1 + 3, 1 + 3 at the layers' ends.
    assert reach(energy).tolist() == [3 / 2, 2 / 4, 1 / 4]
    assert reach(np.zeros((2, 1))).tolist() == [2, 1]


def test_losses_add_up_to_the_relative_error(tmp_path: Path) -> None:
    sums = measure(routed.write(tmp_path / "m"), imatrix=routed.statistics(tmp_path / "i"))
    at = WORDS.index("rocmfp3")
    sums[:, :, 2, at, 0] = 0.25 * sums[:, :, 2, at, 1]
    sums[:, :, 2, at, 2] = sums[:, :, 2, at, 1]
    losses = weigh(sums, routed.statistics(tmp_path / "i"))
    assert losses.shape == (LAYERS, EXPERTS, 2, len(WORDS))
    assert losses[:, :, 1, at].sum() == pytest.approx(0.25)
    assert np.isinf(losses[:, :, 0, WORDS.index("rocmfp3-mix")]).all()
    assert not losses[..., FP4].any()


def test_more_bits_lose_less(tmp_path: Path) -> None:
    losses = weigh(measure(routed.write(tmp_path / "m", rows=WIDTH)), None)[..., 1, :].sum((0, 1))
    total = dict(zip(WORDS, losses.tolist(), strict=True))
    assert total["rocmfp2-dual"] > total["rocmfp3"] > total["rocmfp4"] > total["fp4"] == 0
    assert total["rocmfp3-mix"] < total["rocmfp3"]
    assert total["rocmfp2-sign"] < total["rocmfp2-dual"]


class Silent:
    """An imatrix whose text reached no expert."""

    def importance(self, layer: int, expert: int, projection: str) -> F32:
        return np.zeros(K, np.float32)


def test_importance_of_zeros_weighs_all_alike(tmp_path: Path) -> None:
    folder = routed.write(tmp_path / "m", layers=1, experts=1)
    words: Words = {"gate-up": ["rocmfp2-mix"], "down": ["rocmfp3"]}
    found = measure(folder, words, cast(Imatrix, Silent()))
    assert np.array_equal(found, measure(folder, words), equal_nan=True)


@pytest.mark.parametrize("words", [["rocmfp3"], ["rocmfp2-affine"], ["rocmfp2-mix", "fp4"]])
def test_values_that_are_no_numbers_are_refused_by_name(tmp_path: Path, words: list[str]) -> None:
    folder = routed.write(tmp_path / "m")
    shard = folder / "model-scales.safetensors"
    with routed.opened(folder) as (checkpoint, _):
        tensor = checkpoint.tensors["layers.1.ffn.experts.2.w1.scale"]
    raw = bytearray(shard.read_bytes())
    raw[tensor.offset + 5] = 0xFF
    shard.write_bytes(raw)
    check_refused(
        PayloadValueError if "rocmfp2-mix" not in words else SourceValueError,
        lambda: measure(folder, {"gate-up": words, "down": []}),
        path=folder / "model-weights.safetensors",
        tensor="layers.1.ffn.experts.2.w1.weight",
    )
