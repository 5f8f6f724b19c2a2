"""Attention: what a token sees, the sink, the rotation back, odd shapes, the trace."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ds4q.artifact.types import BF16, ROCMFP2
from ds4q.runtime.backend.weights import Weight
from ds4q.runtime.backend.workers import Workers
from ds4q.runtime.kvtable import Held, Table
from ds4q.runtime.kvtype import STORED, KvType, narrow, widen
from ds4q.runtime.model import attention, rope
from ds4q.runtime.model.norm import rms_norm
from tests.runtime.model.conftest import Operators, Trace

F32 = np.float32
TRACE = 2e-4


def naive(args: dict[str, Any], t: int, h: int) -> npt.NDArray[Any]:
    """One head of one token by the formula, in float64."""
    position, owner, width = args["positions"][t], args["owners"][t], args["q"].shape[2]
    window, entries = args["windows"][owner], args["entries"][owner]
    turn = lambda x, sign: rope.rotate_reference(  # noqa: E731
        x, args["cos"][t].astype(float), sign * args["sin"][t].astype(float)
    )
    q = args["q"][t, h].astype(float)
    q = turn(q / np.sqrt((q**2).mean() + args["eps"]), 1)
    rows = [
        window[p % len(window)] for p in range(max(0, position - args["reach"] + 1), position + 1)
    ]
    count = args["counts"][t]
    picks = args["chosen"][t, :count] if args["chosen"].shape[1] else range(count)
    keys = np.array([*rows, *(entries[i] for i in picks)], dtype=float)
    scores = np.exp(keys @ q * width**-0.5)
    return turn(scores @ keys / (scores.sum() + np.exp(float(args["sink"][h]))), -1)


def case(
    tokens: int, heads: int, width: int, reach: int, count: int, topk: int, first: int
) -> dict[str, Any]:
    rng = np.random.default_rng(tokens * heads + width)
    made = lambda *shape: rng.standard_normal(shape, dtype=F32)  # noqa: E731
    chosen = np.empty((tokens, 0), dtype=np.int64)
    counts = np.minimum(np.arange(tokens) + count, count + 1)
    if topk:
        counts = np.minimum(counts, topk)
        chosen = np.array([np.sort(rng.permutation(count)[:topk]) for _ in range(tokens)])
    cos, sin = rope.tables(rope.plain_frequencies(16, 1e4), first, tokens)
    return {
        "q": made(tokens, heads, width),
        "sink": made(heads),
        "windows": [made(reach - 1 + tokens, width)],
        "reach": reach,
        "entries": [made(count + 4, width)],
        "chosen": chosen,
        "counts": counts,
        "cos": cos,
        "sin": sin,
        "positions": first + np.arange(tokens),
        "owners": np.zeros(tokens, dtype=np.int64),
        "eps": 1e-6,
    }


def together(*cases: dict[str, Any]) -> dict[str, Any]:
    """The tokens of sequences of their own, turn and turn about: one of each, and so on."""
    turns = np.argsort(np.concatenate([np.arange(len(each["q"])) for each in cases]), kind="stable")
    joined = {**cases[0], "windows": [], "entries": []}
    for name in ("q", "chosen", "counts", "cos", "sin", "positions"):
        joined[name] = np.concatenate([each[name] for each in cases])[turns]
    joined["owners"] = np.repeat(np.arange(len(cases)), [len(each["q"]) for each in cases])[turns]
    for each in cases:
        joined["windows"] += each["windows"]
        joined["entries"] += each["entries"]
    return joined


def table(arrays: list[npt.NDArray[Any]]) -> Table:
    return Table([Held(rows) for rows in arrays])


def attend(threads: int, args: dict[str, Any]) -> npt.NDArray[Any]:
    given = {**args, "windows": table(args["windows"]), "entries": table(args["entries"])}
    return attention.attend(Workers(threads), **given)


@pytest.mark.parametrize(
    "args",
    [
        case(3, 4, 128, 64, 40, 8, 1000),
        case(2, 20, 40, 5, 0, 0, 3),  # heads and width fill no tile; the window is not full yet
        case(5, 1, 16, 1, 7, 0, 90),
        case(1, 16, 48, 3, 130, 0, 0),
    ],
    ids=["chosen", "young", "narrow", "first token"],
)
def test_attend_by_the_formula(path: str, args: dict[str, Any]) -> None:
    found = attend(1, args)
    tokens, heads, width = args["q"].shape
    expected = np.array([[naive(args, t, h) for h in range(heads)] for t in range(tokens)])
    assert found.shape == (tokens, heads, width)
    assert np.abs(found - expected).max() < 1e-5


def test_threads_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DS4Q_REFERENCE", raising=False)
    args = case(9, 40, 64, 128, 60, 0, 500)
    assert np.array_equal(attend(3, args), attend(1, args))


@pytest.mark.parametrize("topk", [0, 8])
@pytest.mark.parametrize("threads", [1, 3])
def test_company_does_not_show(path: str, topk: int, threads: int) -> None:
    cases = [case(n, 40, 64, 32, count, topk, 500 * n) for n, count in ((1, 30), (5, 9), (2, 77))]
    for each in cases:  # rings of one engine have one size
        each["windows"] = [np.resize(each["windows"][0], (36, 64))]
        each["sink"] = cases[0]["sink"]
    args = together(*cases)
    found = attend(threads, args)
    for owner, each in enumerate(cases):
        assert np.array_equal(found[args["owners"] == owner], attend(1, each))


@pytest.mark.parametrize("kv_type", ["f16", "bf16"])
@pytest.mark.parametrize("topk", [0, 8])
def test_stored_rows_are_read_as_their_values(path: str, kv_type: KvType, topk: int) -> None:
    args = case(3, 20, 40, 12, 30, topk, 100)
    for name in ("windows", "entries"):
        args[name] = [narrow(rows, STORED[kv_type]) for rows in args[name]]
    found = attend(1, args)
    for name in ("windows", "entries"):
        args[name] = [widen(rows) for rows in args[name]]
    assert np.array_equal(found, attend(1, args))


def test_large_scores_do_not_overflow(path: str) -> None:
    args = case(1, 2, 32, 4, 3, 0, 10)
    args["windows"][0] *= F32(1e4)
    args["sink"] += F32(300)
    assert np.isfinite(attend(1, args)).all()


def test_window_rows_are_normed_and_turned(path: str) -> None:
    rng = np.random.default_rng(0)
    kv, weight = rng.standard_normal((5, 32), dtype=F32), rng.standard_normal(32, dtype=F32)
    cos, sin = rope.tables(rope.plain_frequencies(16, 1e4), 6, 5)
    found = attention.turned(kv, weight, 1e-6, cos, sin)
    expected = rope.rotate_reference(rms_norm(kv, weight, 1e-6), cos, sin)
    assert np.abs(found - expected).max() < 1e-6


def test_row_groups_share_the_bytes() -> None:
    weight = Weight(BF16.id, 6, 32, np.arange(6 * 64, dtype=np.int64).astype(np.uint8))
    groups = attention.row_groups(weight, 3)
    assert [(g.rows, g.cols) for g in groups] == [(2, 32)] * 3
    assert [g.address - weight.address for g in groups] == [0, 128, 256]


def test_row_groups_are_read_as_the_whole() -> None:
    data = np.zeros(ROCMFP2.payload_bytes((6, 128)), dtype=np.uint8)
    groups = attention.row_groups(Weight(ROCMFP2.id, 6, 128, data, "sign"), 2)
    assert [g.coding for g in groups] == ["sign", "sign"]


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_trace_of_attention(
    path: str, operators: Operators, trace: Trace, prompt: npt.NDArray[np.int64], layer: int
) -> None:
    """Ratio 0; ratio 4 with its indexer; ratio 128, each from the trace's own input."""
    seen: dict[str, Any] = {}
    operator = operators.attention[layer]
    norm, eps = operators.attention_norms[layer], operators.config.rms_norm_eps
    x = rms_norm(trace[f"l{layer}.attn_in"], norm, eps)
    found = operator.forward(x, operators.step(prompt, seen.__setitem__))
    assert np.abs(found - trace[f"l{layer}.attn_out"]).max() < TRACE
    for name in (f"l{layer}.compressed_kv", f"l{layer}.index_topk"):
        assert (name in seen) == (layer > 0)
    if layer:
        entries = trace[f"l{layer}.compressed_kv"]
        assert seen[f"l{layer}.compressed_kv"].shape == entries.shape
        assert np.abs(seen[f"l{layer}.compressed_kv"] - entries).max() < TRACE
    if layer == 1:
        for t, expected in enumerate(trace["l1.index_topk"]):
            assert set(seen["l1.index_topk"][t]) - {-1} == set(expected) - {-1}, f"token {t}"
