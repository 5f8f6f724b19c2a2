"""What predictors are worth: counted by hand on small traces, and compared where it is known."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from ds4q.artifact.newfile import NewFile
from ds4q.runtime.errors import AdapterError, TraceError
from ds4q.runtime.experts.adapter import Adapter, Entry
from ds4q.runtime.experts.evaluation import (
    LAST_TOKEN,
    NEXT_GATE,
    TOKEN_PROFILE,
    Figures,
    Predictor,
    default_tops,
    evaluate,
)
from ds4q.runtime.experts.fit import train
from ds4q.runtime.experts.trace import Recorder, read_trace
from tests.checks import check_refused
from tests.runtime.experts.statetraces import D, E, K, header, truth, write_states

I64 = npt.NDArray[np.int64]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_states(tmp_path_factory.mktemp("eval") / "t.trace", truth(), noise=0.3)


def names(found: tuple[Predictor, ...]) -> list[tuple[str, int | None]]:
    return [(each.name, each.rank) for each in found]


def test_the_table_has_every_predictor_at_every_m(trace: Path) -> None:
    found = evaluate(train([trace], rank=9), read_trace(trace))
    others = [(name, None) for name in (LAST_TOKEN, TOKEN_PROFILE, NEXT_GATE)]
    assert names(found.predictors) == [("adapter", 8), ("adapter", 9), *others]
    assert (found.tokens, found.layers, found.top_k) == (400, 3, K)
    for predictor in found.predictors:
        assert [each.m for each in predictor.top] == [2, 3, 4, 6]
        for each in predictor.top:
            assert each.covers == pytest.approx(each.recall * K)
            assert each.wasted == pytest.approx(each.m - each.covers)
            assert each.late == pytest.approx(K - each.covers)
            assert each.fetches == pytest.approx((each.m + each.late) / K)


def test_published_ms() -> None:
    assert default_tops(6, 256) == (4, 6, 8, 12)
    assert default_tops(1, 4) == (1, 2)
    assert default_tops(4, 5) == (3, 4, 5)


def test_a_text_of_the_fit_is_known_again(trace: Path, tmp_path: Path) -> None:
    adapter = train([trace])
    assert evaluate(adapter, read_trace(trace)).held_out is False
    other = write_states(tmp_path / "o", truth(), seed=9)
    assert evaluate(adapter, read_trace(other)).held_out is True
    nameless = Adapter(adapter.entries, None)
    assert evaluate(nameless, read_trace(other)).held_out is None


def test_an_exact_predictor_covers_everything(tmp_path: Path) -> None:
    model = truth()
    held_out = write_states(tmp_path / "o", model, seed=4)
    entries = {
        layer: Entry(
            np.eye(D, dtype=np.float32),
            model.weights[layer + 1].T.astype(np.float32),
            model.offset.astype(np.float32),
        )
        for layer in range(3)
    }
    found = evaluate(Adapter(entries, None), read_trace(held_out), ranks=[D])
    assert found.predictors[0].top[1] == Figures(K, 1.0, K, 0.0, 0.0, 1.0)
    assert found.predictors[0].top[3].wasted == K


def hand_made(
    path: Path,
    choices: list[list[int]],
    words: list[int],
    gate: int = 0,
    sequences: tuple[int, ...] = (0,) * 9,
) -> Path:
    """Layer 0 looks up, layer 1 chooses: one token a batch. The gate likes ``gate``, always."""
    head = dataclasses.replace(header(layers=2), top_k=2)
    recorder = Recorder(NewFile(path), head)
    weights = np.zeros((E, D), np.float32)
    weights[gate] = 1
    recorder.router(1, weights, np.zeros(E, np.float32))
    for token, (ids, word) in enumerate(zip(choices, words, strict=True)):
        for layer in (0, 1):
            recorder.states(
                token, sequences[token], "decode", token, layer, np.array([word]), np.array([ids]),
                np.ones((1, D), np.float32), np.zeros((1, E), np.float32),
            )  # fmt: skip
    recorder.close()
    return path


def covered(path: Path, name: str) -> float:
    """Of the chosen, at M = 2."""
    entry = Entry(*(np.zeros(shape, np.float32) for shape in ((1, D), (E, 1), E)))
    found = evaluate(Adapter({0: entry}, None), read_trace(path))
    return next(each for each in found.predictors if each.name == name).top[0].covers


def test_the_last_token_is_a_predictor(tmp_path: Path) -> None:
    # named before each: 0 1 (nothing was used), 7 8, 8 5 (7 would be third), 8 7
    path = hand_made(tmp_path / "t", [[7, 8], [8, 5], [8, 7], [8, 7]], [1, 2, 3, 4])
    assert covered(path, LAST_TOKEN) == pytest.approx((0 + 1 + 1 + 2) / 4)


def test_the_last_token_of_another_sequence_is_forgotten(tmp_path: Path) -> None:
    choices = [[7, 8], [7, 8], [7, 8], [7, 8]]
    path = hand_made(tmp_path / "t", choices, [1, 2, 3, 4], sequences=(0, 0, 1, 0))
    assert covered(path, LAST_TOKEN) == pytest.approx((0 + 2 + 0 + 0) / 4)


def test_a_profile_by_token_is_a_predictor(tmp_path: Path) -> None:
    # token 1 chose 7 8 before; token 2 is new and gets what was most frequent: 7 and 8 again
    path = hand_made(tmp_path / "t", [[7, 8], [7, 3], [8, 7], [3, 2]], [1, 2, 1, 2])
    assert covered(path, TOKEN_PROFILE) == pytest.approx((0 + 1 + 2 + 1) / 4)


def test_the_next_gate_is_a_predictor(tmp_path: Path) -> None:
    # it names 4, and 0 as the first of those that it gives no score
    path = hand_made(tmp_path / "t", [[4, 8], [0, 4], [8, 3]], [1, 2, 3], gate=4)
    assert covered(path, NEXT_GATE) == pytest.approx((1 + 2 + 0) / 3)


def test_another_model_is_refused(trace: Path, tmp_path: Path) -> None:
    other = dataclasses.replace(header("00" * 16), source="s" * 64)
    adapter = train([write_states(tmp_path / "o", truth(), head=other)])
    ours = dataclasses.replace(header(), source="t" * 64)
    named = write_states(tmp_path / "t", truth(), head=ours)
    says = ["another model", "s" * 64, "t" * 64]
    check_refused(AdapterError, lambda: evaluate(adapter, read_trace(named)), says=says)
    small = Adapter({0: Entry(*(np.zeros(s, np.float32) for s in ((1, D), (4, 1), 4)))}, None)
    check_refused(AdapterError, lambda: evaluate(small, read_trace(trace)), says=["4"])


def test_a_predictor_that_lacks_layers_is_refused(trace: Path) -> None:
    adapter = train([trace])
    part = Adapter({1: adapter.entries[1]}, adapter.about, "p")
    says = ["lacks layers", "[0, 2]"]
    check_refused(AdapterError, lambda: evaluate(part, read_trace(trace)), path="p", says=says)


def test_a_trace_of_hash_layers_only_is_refused(tmp_path: Path) -> None:
    path = write_states(tmp_path / "h", truth(), tokens=0, head=header(hash_layers=4))
    adapter = Adapter({0: Entry(*(np.zeros(s, np.float32) for s in ((1, D), (E, 1), E)))}, None)
    check_refused(TraceError, lambda: evaluate(adapter, read_trace(path)), path=path)


def test_a_rank_that_the_file_has_not_is_refused(trace: Path) -> None:
    adapter = train([trace], rank=4)
    says = ["1 to 4", "--rank"]
    check_refused(AdapterError, lambda: evaluate(adapter, read_trace(trace), ranks=[5]), says=says)


def test_a_trace_without_routers_is_refused(trace: Path, tmp_path: Path) -> None:
    adapter, path = train([trace]), tmp_path / "n"
    recorder = Recorder(NewFile(path), header())
    for record in read_trace(trace):
        if hasattr(record, "hidden"):
            recorder.states(*record)
    recorder.close()
    check_refused(
        TraceError, lambda: evaluate(adapter, read_trace(path)), path=path, says=["layer 1"]
    )
