"""The indexer: scores by the formula, the best topk with ties to the lower index."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4q.runtime.backend.workers import Workers
from ds4q.runtime.kvtable import Held, Table
from ds4q.runtime.model import indexer, rope

F32 = np.float32


def best(scores: list[float], topk: int) -> list[int]:
    """Higher score first, then lower index; ascending."""
    return sorted(sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:topk])


@pytest.mark.parametrize(
    ("tokens", "heads", "width", "seen", "topk"),
    [(6, 16, 128, 40, 8), (3, 20, 24, 9, 8), (1, 1, 16, 5, 1), (2, 64, 16, 1500, 100)],
)
def test_choice_by_the_formula(
    path: str, tokens: int, heads: int, width: int, seen: int, topk: int
) -> None:
    rng = np.random.default_rng(heads)
    first = 4 * seen - tokens
    q = rng.standard_normal((tokens, heads, width), dtype=F32)
    gates = rng.standard_normal((tokens, heads), dtype=F32)
    keys = np.full((-(-seen // 4) * 4, width), 1e6, dtype=F32)  # rows past the count must not win
    keys[:seen] = rng.standard_normal((seen, width), dtype=F32)
    cos, sin = rope.tables(rope.plain_frequencies(16, 1e4), first, tokens)
    visible_to = (first + np.arange(tokens) + 1) // 4
    given = Table([Held(keys)]), cos, sin, visible_to, np.zeros(tokens, dtype=np.int64)
    chosen, counts = indexer.choose(Workers(1), q, gates, *given, topk)
    for t in range(tokens):
        visible = visible_to[t]
        turned = rope.rotate_reference(q[t].astype(float), cos[t], sin[t])
        dots = np.maximum(turned @ keys[:visible].T.astype(float), 0)
        scores = (gates[t].astype(float) * (width * heads) ** -0.5) @ dots
        assert counts[t] == min(topk, visible)
        assert chosen[t, : counts[t]].tolist() == best(scores.tolist(), topk)


def test_slices_and_threads_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DS4Q_REFERENCE", raising=False)
    rng = np.random.default_rng(5)
    q = rng.standard_normal((40, 16, 64), dtype=F32)
    gates = rng.standard_normal((40, 16), dtype=F32)
    keys = rng.standard_normal((2000, 64), dtype=F32)
    cos, sin = rope.tables(rope.plain_frequencies(16, 1e4), 7960, 40)
    seen, owners = (7960 + np.arange(40) + 1) // 4, np.zeros(40, dtype=np.int64)
    args = (q, gates, Table([Held(keys)]), cos, sin, seen, owners, 64)
    whole = indexer.choose(Workers(1), *args)
    monkeypatch.setattr(indexer, "_SCORES_HELD", 7 * 2000)
    for threads in (1, 3):
        part = indexer.choose(Workers(threads), *args)
        assert np.array_equal(part[0], whole[0])
        assert np.array_equal(part[1], whole[1])


def test_company_does_not_show(path: str) -> None:
    """Beside a sequence whose tokens see more than topk entries, and one whose tokens see less."""
    rng = np.random.default_rng(6)
    seen, owners = np.array([50, 3, 9, 1500, 4, 51]), np.array([0, 1, 2, 3, 1, 0])
    q = rng.standard_normal((6, 16, 32), dtype=F32)
    gates = rng.standard_normal((6, 16), dtype=F32)
    keys = [rng.standard_normal((rows, 32), dtype=F32) for rows in (52, 8, 12, 1500)]
    cos, sin = rope.turns(rope.plain_frequencies(16, 1e4), 4 * seen)

    def choose(which: list[int], own: list[int]) -> list[list[int]]:
        held = Table([Held(keys[owner]) for owner in own])
        numbers = np.array([own.index(owners[t]) for t in which])
        given = q[which], gates[which], held, cos[which], sin[which], seen[which], numbers
        found = indexer.choose(Workers(1), *given, 8)
        return [line[:count].tolist() for line, count in zip(*found, strict=True)]

    alone = [choose([t], [owners[t]])[0] for t in range(6)]
    assert choose([*range(6)], [0, 1, 2, 3]) == alone
    assert [len(line) for line in alone] == [8, 3, 8, 8, 4, 8]


@settings(max_examples=60)
@given(
    scores=st.lists(st.sampled_from([-1.0, 0.0, 0.5, 0.5000001, 3.0]), min_size=1, max_size=30),
    topk=st.integers(1, 12),
)
def test_ties_go_to_the_lower_index(scores: list[float], topk: int) -> None:
    for select in (indexer.select.fast, indexer.select.reference):
        chosen, counts = np.full((1, topk), -5), np.zeros(1, dtype=np.int64)
        rows = np.array([[*scores, 9.0]], dtype=F32)  # the last column is not visible
        select(rows, np.array([len(scores)]), topk, chosen, counts)
        assert chosen[0, : counts[0]].tolist() == best(scores, topk)
