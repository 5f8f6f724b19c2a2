"""Fitting a predictor: what is linear is found, ranks lose least, memory decides nothing."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ds4q.runtime.errors import AdapterError, TraceError
from ds4q.runtime.experts.adapter import Adapter, read_adapter
from ds4q.runtime.experts.evaluation import evaluate
from ds4q.runtime.experts.fit import Sums, sources, train
from ds4q.runtime.experts.trace import read_trace
from tests.checks import check_refused, same_bits
from tests.runtime.experts.statetraces import LAYERS, D, E, header, truth, write_states


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_states(tmp_path_factory.mktemp("fit") / "t.trace", truth())


def apart(scores: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """What tells experts from each other."""
    return scores - scores.mean(axis=1, keepdims=True)


def predicted(adapter: Adapter, layer: int, x: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
    return apart(adapter.predict(layer, x))


def test_what_is_linear_is_found(trace: Path) -> None:
    model = truth()
    adapter = train([trace], rank=None, ridge=1e-9)
    assert list(adapter.entries) == [0, 1, 2]  # layer 0 looks its experts up, layer 3 is last
    assert adapter.rank == E
    x = np.random.default_rng(8).standard_normal((20, D)).astype(np.float32)
    for layer in adapter.entries:
        expected = x @ model.weights[layer + 1] + model.offset
        np.testing.assert_allclose(predicted(adapter, layer, x), apart(expected), atol=0.1)


def test_the_description_is_that_of_the_fit(trace: Path, tmp_path: Path) -> None:
    adapter = train([trace], ridge=0.25)
    assert adapter.about is not None
    assert (adapter.about.artifact, adapter.about.tokens) == (header().artifact, 400)
    assert (adapter.about.ridge, len(adapter.about.texts)) == (0.25, 1)
    (tmp_path / "a").write_bytes(adapter.encode())
    found = read_adapter(tmp_path / "a")
    for layer, entry in adapter.entries.items():
        for part, wanted in zip(found.entries[layer], entry, strict=True):
            same_bits(part, wanted)  # the fit is rounded as the file is


def test_a_rank_that_the_scores_have_loses_nothing(tmp_path: Path) -> None:
    model = truth(rank=2)
    adapter = train([write_states(tmp_path / "t", model)], rank=3, ridge=1e-9)
    x = np.random.default_rng(8).standard_normal((20, D)).astype(np.float32)
    for layer in adapter.entries:
        expected = x @ model.weights[layer + 1] + model.offset
        np.testing.assert_allclose(predicted(adapter, layer, x), apart(expected), atol=0.1)


def test_higher_ranks_predict_better(trace: Path) -> None:
    found = evaluate(train([trace], rank=None), read_trace(trace), ranks=[1, 2, 4, 9])
    recalls = [each.top[1].recall for each in found.predictors[:4]]
    assert recalls == sorted(recalls)
    assert recalls[0] < recalls[3] - 0.2
    assert recalls[3] > 0.97


def test_a_ridge_shrinks(trace: Path) -> None:
    loose, tight = train([trace], ridge=1e-9), train([trace], ridge=100.0)
    sizes = [float(np.abs(a.entries[1].b @ a.entries[1].a).max()) for a in (loose, tight)]
    assert 0 < sizes[1] < sizes[0] / 50


@pytest.mark.parametrize("batch", [1, 7, 400])
def test_the_cut_into_batches_does_not_matter(tmp_path: Path, batch: int) -> None:
    found = train([write_states(tmp_path / "t", truth(), batch=batch)], ridge=1e-9)
    for layer, (a, b, _) in found.entries.items():
        np.testing.assert_allclose((b @ a).T, apart(truth().weights[layer + 1]), atol=0.05)


def test_layers_fitted_in_turn_are_the_same(trace: Path) -> None:
    together, in_turn = train([trace]), train([trace], sums_bytes=Sums.nbytes(D, E))
    one_by_one = train([trace], sums_bytes=1)
    assert together.about == in_turn.about == one_by_one.about
    for layer, entry in together.entries.items():
        for other in (in_turn, one_by_one):
            for part, wanted in zip(other.entries[layer], entry, strict=True):
                same_bits(part, wanted)


def test_several_traces_are_one_fit(trace: Path, tmp_path: Path) -> None:
    more = write_states(tmp_path / "more", truth(), seed=1)
    heard: list[int] = []
    adapter = train([trace, more], sums_bytes=1, advance=heard.append)
    assert adapter.about is not None
    assert adapter.about.tokens == 800
    assert len(set(adapter.about.texts)) == 2
    assert sum(heard) == 2


def test_a_text_counts_once(trace: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    again.write_bytes(trace.read_bytes())
    more = write_states(tmp_path / "more", truth(), seed=1)
    for second in (trace, again):
        says = ["the text of another of these traces", str(trace), "leave one of them out"]
        check_refused(AdapterError, partial(train, [trace, more, second]), path=second, says=says)


def test_what_one_rank_made_of_a_text_is_refused(tmp_path: Path) -> None:
    ranks = dataclasses.replace(header(), owned=(0, E // 2))
    path = write_states(tmp_path / "r", truth(), head=ranks)
    says = [f"held all {E} experts, found 0 to {E // 2 - 1}", "without --expert-owner"]
    check_refused(TraceError, lambda: train([path]), path=path, says=says)
    whole = train([write_states(tmp_path / "w", truth())])
    check_refused(TraceError, lambda: evaluate(whole, read_trace(path)), path=path, says=says)


def test_traces_of_different_models_are_refused(trace: Path, tmp_path: Path) -> None:
    other = write_states(tmp_path / "o", truth(), head=header("00" * 16))
    says = ["different models", "00" * 16]
    check_refused(AdapterError, lambda: train([trace, other]), path=other, says=says)


def test_a_trace_without_states_is_refused(tmp_path: Path) -> None:
    empty = write_states(tmp_path / "e", truth(), tokens=0)
    check_refused(TraceError, lambda: train([empty]), path=empty, says=["--trace-states"])


@pytest.mark.parametrize("layer", [1, 2])
def test_a_trace_that_lacks_a_layer_somewhere_is_refused(tmp_path: Path, layer: int) -> None:
    path = write_states(tmp_path / "s", truth(), skip=(2, layer))
    check_refused(TraceError, lambda: train([path]), path=path, says=["states of a layer"])


def test_a_trace_cut_short_is_refused(trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut"
    path.write_bytes(trace.read_bytes()[:-200])
    check_refused(TraceError, lambda: train([path]), path=path, says=["cut short"])


def test_states_that_are_all_alike_are_refused(tmp_path: Path) -> None:
    path = write_states(tmp_path / "one", truth(), tokens=1, batch=1)
    check_refused(AdapterError, lambda: train([path]), says=["nothing can be fitted"])


@pytest.mark.parametrize(
    ("ridge", "rank"), [(0.0, 1), (-1.0, 1), (1e7, 1), (np.nan, 1), (1.0, 0), (1.0, -1)]
)
def test_a_ridge_or_rank_out_of_range_is_refused(trace: Path, ridge: float, rank: int) -> None:
    check_refused(AdapterError, lambda: train([trace], ridge=ridge, rank=rank), says=["range"])


def test_which_layers_predict() -> None:
    assert list(sources(header(hash_layers=0))) == [0, 1, 2]
    assert list(sources(header(hash_layers=3))) == [2]
    head = dataclasses.replace(header(), hash_layers=LAYERS)
    assert not sources(head)


def test_a_model_of_hash_layers_only_is_refused(tmp_path: Path) -> None:
    path = write_states(tmp_path / "h", truth(), head=header(hash_layers=LAYERS))
    check_refused(AdapterError, lambda: train([path]), path=path, says=["choose by score"])
