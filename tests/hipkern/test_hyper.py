"""Hyper-connections: mixing, collapse and Sinkhorn against float64; batches against tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from ds4q.runtime.model import hyper
from tests.hipkern.dense import F32, F64, Rig, U, check_same, check_within, open_rig

ITERATIONS, HC_EPS, NORM_EPS = 20, 1e-6, 1e-6


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with open_rig() as rig:
        yield rig


@dataclass
class Case:
    """Streams x [T, n, d] and what mixes them: parts [T, .., d] of y; fn [rows, n d]."""

    x: F32
    parts: F32
    post: F32
    comb: F32
    fn: F32

    @staticmethod
    def of(tokens: int, n: int, d: int, rows: int, seed: int = 1, parts: int = 1) -> Case:
        rng = np.random.default_rng(seed)

        def normal(*shape: int) -> F32:
            return rng.normal(size=shape).astype(np.float32)

        fn = normal(rows, n * d) / np.float32(np.sqrt(n * d))
        return Case(
            normal(tokens, n, d),
            normal(tokens, parts, d),
            normal(tokens, n),
            normal(tokens, n, n),
            fn,
        )

    @property
    def y(self) -> F32:
        """What the parts add up to, ascending."""
        total: F32 = np.add.accumulate(self.parts, axis=1)[:, -1]
        return total

    @property
    def slices(self) -> int:
        return -(-self.x.shape[2] // 32)


def _mix(rig: Rig, case: Case, mixes: bool) -> tuple[F32, F32]:
    """Streams and partial sums [T, rows + 1, S] after hc_mix."""
    (tokens, n, d), rows = case.x.shape, len(case.fn)
    x, partial = rig.put(case.x), rig.room(tokens, rows + 1, case.slices)
    rig.run(
        "hyper.hip", "hc_mix", (case.slices, tokens, 1),
        x, rig.put(case.parts) if mixes else 0, rig.put(case.post) if mixes else 0,
        rig.put(case.comb) if mixes else 0, rig.put(case.fn), partial,
        case.parts.shape[1] if mixes else 0, d, rows,
        DS4Q_STREAMS=n,
    )  # fmt: skip
    return rig.get(x, tokens, n, d), rig.get(partial, tokens, rows + 1, case.slices)


def _collapse(
    rig: Rig, case: Case, partial: F32, scale: F32, base: F32, norm: F32
) -> tuple[F32, F32, F32, F32]:
    tokens, n, d = case.x.shape
    collapsed, normed = rig.room(tokens, d), rig.room(tokens, d)
    post, comb = rig.room(tokens, n), rig.room(tokens, n, n)
    rig.run(
        "hyper.hip", "hc_collapse", (2, tokens, 1),
        rig.put(case.x), rig.put(partial), rig.put(scale), rig.put(base), rig.put(norm), collapsed,
        normed, post, comb, d, case.slices, ITERATIONS, HC_EPS, NORM_EPS,
        DS4Q_STREAMS=n,
    )  # fmt: skip
    return (
        rig.get(collapsed, tokens, d),
        rig.get(normed, tokens, d),
        rig.get(post, tokens, n),
        rig.get(comb, tokens, n, n),
    )


def _weights(n: int, d: int, seed: int = 2) -> tuple[F32, F32, F32]:
    rng = np.random.default_rng(seed)
    rows = (2 + n) * n
    return (
        np.array([0.7, 1.3, 2.0], np.float32),
        rng.normal(size=rows).astype(np.float32),
        rng.normal(size=d).astype(np.float32),
    )


def _expand(x: F64, y: F64, post: F64, comb: F64) -> F64:
    return post[:, :, None] * y[:, None, :] + np.einsum("tjk,tjd->tkd", comb, x)


def _products(case: Case, x: F32) -> tuple[F64, F64]:
    """What partial should hold for streams ``x``, and the sums of magnitudes."""
    n, d = x.shape[1:]
    fn = case.fn.reshape(1, -1, n, d).astype(np.float64)
    own = x.astype(np.float64)[:, None]
    terms = np.concatenate([fn * own, own * own], axis=1)  # [T, rows + 1, n, d]
    cut = np.zeros((*terms.shape[:3], 32 * case.slices))
    cut[..., :d] = terms
    slices = cut.reshape(*terms.shape[:3], case.slices, 32)
    return slices.sum(axis=(2, 4)), np.abs(slices).sum(axis=(2, 4))


@pytest.mark.parametrize(("n", "d"), [(4, 256), (4, 4096), (4, 100), (2, 64), (5, 32)])
def test_mixing_and_its_products(rig: Rig, n: int, d: int) -> None:
    case = Case.of(2 if d < 4096 else 1, n, d, (2 + n) * n, parts=n + 4)
    x, partial = _mix(rig, case, mixes=True)
    wide = [a.astype(np.float64) for a in (case.x, case.y, case.post, case.comb)]
    # A chain of n + 1 rounded terms: (n + 1)u of the sum of magnitudes.
    check_within(x, _expand(*wide), (n + 1) * U * _expand(*(np.abs(a) for a in wide)))
    np.testing.assert_allclose(
        x, hyper.expand_reference(case.x, case.y, case.post, case.comb), rtol=0, atol=1e-5
    )
    want, magnitude = _products(case, x)
    check_within(partial, want, (n + 5) * U * magnitude)  # n fused steps, 5 levels of the tree


def test_without_y_the_streams_stay(rig: Rig) -> None:
    case = Case.of(3, 4, 128, 4)
    x, partial = _mix(rig, case, mixes=False)
    check_same(x, case.x)
    want, magnitude = _products(case, x)
    check_within(partial, want, 9 * U * magnitude)


def _gates(partial: F64, scale: F64, base: F32, n: int, d: int, slices: int) -> tuple[F64, F64]:
    """Arguments of sigmoids and softmax [T, rows], and the bound of their error."""
    sums, factor = partial.sum(axis=-1), 1 / np.sqrt(partial[:, -1].sum(-1) / (n * d) + NORM_EPS)
    spread = np.repeat(scale, [n, n, n * n]) if len(scale) == 3 else np.repeat(scale, n)
    logits = sums[:, :-1] * factor[:, None] * spread + base
    magnitude = np.abs(partial[:, :-1]).sum(-1) * factor[:, None] * np.abs(spread) + np.abs(base)
    # Sums over slices: slices / 32 steps and 5 levels; half of that for the factor; 6 roundings.
    return logits, (1.5 * (slices / 32 + 5) + 6) * U * magnitude


def _check_weighed(
    x: F32, pre: F64, pre_error: F64, norm: F32, collapsed: F32, normed: F32
) -> None:
    """Collapsed streams and their norm against float64."""
    wide = x.astype(np.float64)
    n, d = x.shape[1:]
    want = np.einsum("tj,tjd->td", pre, wide)
    # The weights' own error, and a chain of n rounded terms.
    error = np.einsum("tj,tjd->td", pre_error + n * U * pre, np.abs(wide))
    check_within(collapsed, want, error)
    squares = (want**2).sum(-1, keepdims=True)
    r = 1 / np.sqrt(squares / d + NORM_EPS)
    # Half the relative error of the sum of squares: inherited, and 8 + 5 + 32 rounded steps.
    relative = ((2 * np.abs(want) * error).sum(-1, keepdims=True) / squares + 45 * U) / 2 + 3 * U
    target = norm * want * r
    check_within(normed, target, np.abs(norm) * r * error + np.abs(target) * (relative + 2 * U))


def _sinkhorn(logits: F64) -> F64:
    c = np.exp(logits - logits.max(-1, keepdims=True))
    c = c / c.sum(-1, keepdims=True) + HC_EPS
    c = c / (c.sum(-2, keepdims=True) + HC_EPS)
    for _ in range(ITERATIONS - 1):
        c = c / (c.sum(-1, keepdims=True) + HC_EPS)
        c = c / (c.sum(-2, keepdims=True) + HC_EPS)
    return np.asarray(c)


@pytest.mark.parametrize(("n", "d"), [(4, 256), (4, 4096), (4, 100), (2, 64), (5, 32), (4, 7168)])
def test_collapse(rig: Rig, n: int, d: int) -> None:
    case = Case.of(2 if d < 4096 else 1, n, d, (2 + n) * n)
    _, partial = _mix(rig, case, mixes=False)
    scale, base, norm = _weights(n, d)
    collapsed, normed, post, comb = _collapse(rig, case, partial, scale, base, norm)
    logits, error = _gates(
        partial.astype(np.float64), scale.astype(np.float64), base, n, d, case.slices
    )
    gate = 1 / (1 + np.exp(-logits))
    gate_error = error / 4 + 5 * U  # the slope of a sigmoid is at most 1/4
    _check_weighed(case.x, gate[:, :n] + HC_EPS, gate_error[:, :n], norm, collapsed, normed)
    check_within(post, 2 * gate[:, n : 2 * n], 2 * gate_error[:, n : 2 * n])
    want = _sinkhorn(logits[:, 2 * n :].reshape(-1, n, n))
    # A pass adds n + 2 roundings and, being non-expansive in Hilbert's metric, amplifies none;
    # that metric sees an entry's error through two rows and two columns.
    worst = error[:, 2 * n :].max() + (2 * ITERATIONS) * (n + 2) * U
    check_within(comb, want, 4 * worst * want)
    expected = hyper.collapse_reference(
        case.x, partial.sum(-1)[:, :-1], scale, base, norm, ITERATIONS, HC_EPS, NORM_EPS
    )
    for found, value in zip((collapsed, normed, post, comb), expected, strict=True):
        np.testing.assert_allclose(found, value, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("logits", "want"),
    [
        (
            [[9, 1, 0, 0], [9, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 9]],
            [
                [0.499883, 0.362192, 0.133924, 0.001928],
                [0.499883, 0.133924, 0.362192, 0.001928],
                [0.000230, 0.495336, 0.495336, 0.007131],
                [0.000004, 0.008547, 0.008547, 0.989012],
            ],
        ),
        (
            [[8, 0, -8, -8], [8, 0, -8, -8], [0, 0, -8, -8], [0, 0, 0, 0]],
            [None, None, [0.001051, 0.756857, 0.121046, 0.121046], None],
        ),
    ],
)
def test_sinkhorn_of_known_matrices(
    rig: Rig, logits: list[list[float]], want: list[list[float] | None]
) -> None:
    case = Case.of(1, 4, 32, 24)
    base = np.concatenate([np.zeros(8), np.ravel(logits)]).astype(np.float32)
    partial = np.zeros((1, 25, 1), np.float32)
    norm = np.ones(32, np.float32)
    comb = _collapse(rig, case, partial, np.ones(3, np.float32), base, norm)[3][0]
    for found, row in zip(comb, want, strict=True):
        if row is not None:
            np.testing.assert_allclose(found, row, rtol=0, atol=1e-5)


def test_the_head_collapses_without_mixing(rig: Rig) -> None:
    n, d = 4, 256
    case = Case.of(3, n, d, n)
    _, partial = _mix(rig, case, mixes=True)
    x = hyper.expand_reference(case.x, case.y, case.post, case.comb)
    scale, base, norm = (a[:length] for a, length in zip(_weights(n, d), (1, n, d), strict=True))
    collapsed, normed = rig.room(3, d), rig.room(3, d)
    rig.run(
        "hyper.hip", "hc_head", (1, 3, 1),
        rig.put(x), rig.put(partial), rig.put(scale), rig.put(base), rig.put(norm), collapsed,
        normed, d, case.slices, HC_EPS, NORM_EPS,
    )  # fmt: skip
    logits, error = _gates(partial.astype(np.float64), scale.astype(np.float64), base, n, d, 8)
    pre = 1 / (1 + np.exp(-logits)) + HC_EPS
    found = rig.get(collapsed, 3, d), rig.get(normed, 3, d)
    _check_weighed(x, pre, error / 4 + 5 * U, norm, *found)


def test_a_token_does_not_depend_on_its_batch(rig: Rig) -> None:
    case = Case.of(9, 4, 256, 24)
    scale, base, norm = _weights(4, 256)
    x, partial = _mix(rig, case, mixes=True)
    after = Case(x, case.parts, case.post, case.comb, case.fn)
    together = (x, partial, *_collapse(rig, after, partial, scale, base, norm))
    for t in range(9):
        s = slice(t, t + 1)
        one = Case(case.x[s], case.parts[s], case.post[s], case.comb[s], case.fn)
        x, partial = _mix(rig, one, mixes=True)
        after = Case(x, one.parts, one.post, one.comb, one.fn)
        alone = (x, partial, *_collapse(rig, after, partial, scale, base, norm))
        for whole, part in zip(together, alone, strict=True):
            check_same(part, whole[s])
