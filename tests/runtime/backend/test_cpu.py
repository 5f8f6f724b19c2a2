"""The CPU backend: what a call returns on both paths, what it refuses, which kernel it runs."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from benchmarks import decode_cpu
from ds4q.artifact.types import F32, HFP4G32, TIDI32
from ds4q.runtime.backend import Expert, Weight, kernels, reference, workers
from ds4q.runtime.backend.cpu import CpuBackend
from ds4q.runtime.errors import BackendTypeError, WeightError
from tests.checks import check_refused, same_bits
from tests.runtime.backend import packs

Array = npt.NDArray[Any]

LIMIT = 10.0


@pytest.fixture(params=["fast", "reference"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("DS4Q_REFERENCE", "1" if request.param == "reference" else "0")
    name: str = request.param
    return name


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS4Q_REFERENCE", "0")


def draw_experts(count: int, width: int, hidden: int, kind: packs.Kind = HFP4G32) -> list[Expert]:
    return [
        Expert(
            packs.draw(kind, width, hidden, 3 * e)[0],
            packs.draw(kind, width, hidden, 3 * e + 1)[0],
            packs.draw(kind, hidden, width, 3 * e + 2)[0],
        )
        for e in range(count)
    ]


def draw_mixed(width: int, hidden: int) -> list[Expert]:
    """An expert with each type as gate and up, and the next type but one as down."""
    kinds = packs.KINDS
    return [
        Expert(
            packs.draw(gate, width, hidden, 3 * e)[0],
            packs.draw(gate, width, hidden, 3 * e + 1)[0],
            packs.draw(down, hidden, width, 3 * e + 2)[0],
        )
        for e, (gate, down) in enumerate(zip(kinds, kinds[2:] + kinds[:2], strict=True))
    ]


def draw_ids(tokens: int, top_k: int, count: int) -> Array:
    rng = np.random.default_rng(tokens)
    return np.array([rng.permutation(count)[:top_k] for _ in range(tokens)])


@pytest.mark.parametrize(("kind", "rows", "cols"), packs.shapes(), ids=packs.name)
def test_linear_is_the_product(path: str, kind: packs.Kind, rows: int, cols: int) -> None:
    weight, values = packs.draw(kind, rows, cols, seed=1)
    x = packs.activations(3, cols)
    found = CpuBackend(1).linear(weight, x)
    assert found.shape == (3, rows)
    packs.check_close(found, values, x)


def test_no_tokens_give_no_rows(path: str) -> None:
    experts = draw_experts(2, 64, 32)
    backend = CpuBackend(1)
    nothing = np.empty((0, 32), dtype=np.float32)
    assert backend.linear(experts[0].gate, nothing).shape == (0, 64)
    ids = np.empty((0, 2), dtype=np.int64)
    assert backend.experts(nothing, ids, experts, LIMIT).shape == (0, 2, 32)


def test_the_switch_is_read_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, _ = packs.draw(HFP4G32, 64, 2048, seed=1)
    x = packs.activations(1, 2048)
    backend = CpuBackend(1)
    monkeypatch.setenv("DS4Q_REFERENCE", "1")
    same_bits(backend.linear(weight, x), reference.multiply(weight, x))
    monkeypatch.setenv("DS4Q_REFERENCE", "0")
    assert (backend.linear(weight, x) != reference.multiply(weight, x)).any()


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("kind", packs.KINDS, ids=packs.name)
def test_linear_does_not_depend_on_threads(
    fast: None, kind: packs.Kind, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, _ = packs.draw(kind, 101, packs.columns(kind, 5), seed=2)
    x = packs.activations(6, weight.cols)
    alone = CpuBackend(1).linear(weight, x)
    monkeypatch.setattr(workers, "SHARED_BYTES", 0)
    same_bits(CpuBackend(threads).linear(weight, x), alone)


@pytest.mark.parametrize("kind", packs.KINDS, ids=packs.name)
def test_linear_does_not_depend_on_tokens(fast: None, kind: packs.Kind) -> None:
    """Tiles of four and two tokens and single ones; the last row of an odd number is alone."""
    weight, _ = packs.draw(kind, 35, packs.columns(kind, 3), seed=3)
    x = packs.activations(7, weight.cols)
    backend = CpuBackend(1)
    alone = np.concatenate([backend.linear(weight, x[t : t + 1]) for t in range(7)])
    for tokens in range(2, 8):
        same_bits(backend.linear(weight, x[:tokens]), alone[:tokens])


@pytest.mark.parametrize("mixed", [False, True], ids=["one type", "mixed types"])
def test_each_slot_is_its_expert_alone(path: str, mixed: bool) -> None:
    experts = draw_mixed(256, 256) if mixed else draw_experts(5, 128, 256)
    x, ids = packs.activations(7, 256), draw_ids(7, 3, len(experts))
    backend = CpuBackend(1)
    found = backend.experts(x, ids, experts, LIMIT)
    assert found.shape == (7, 3, 256)
    activate = reference.activate if path == "reference" else joined_activate
    for t in range(7):
        for k in range(3):
            expert = experts[ids[t, k]]
            gate = backend.linear(expert.gate, x[t : t + 1])
            up = backend.linear(expert.up, x[t : t + 1])
            hidden = activate(gate, up, LIMIT)
            same_bits(found[t, k], backend.linear(expert.down, hidden)[0])


def joined_activate(gate: Array, up: Array, limit: float) -> Array:
    return kernels.activate(np.concatenate([gate, up]), limit)


@pytest.mark.parametrize("kind", packs.KINDS, ids=packs.name)
def test_experts_agree_with_the_numpy_path(
    kind: packs.Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    width, hidden = packs.columns(kind, 2), packs.columns(kind, 3)
    experts = draw_experts(4, width, hidden, kind)
    x, ids = packs.activations(5, hidden), draw_ids(5, 2, 4)
    backend = CpuBackend(1)
    monkeypatch.setenv("DS4Q_REFERENCE", "1")
    expected = backend.experts(x, ids, experts, LIMIT)
    monkeypatch.setenv("DS4Q_REFERENCE", "0")
    found = backend.experts(x, ids, experts, LIMIT)
    for t, k in np.ndindex(5, 2):
        # Errors of gate and up (1e-6 of their sums) pass through down, which adds its own.
        scale = np.abs(expected[t, k]).max()
        np.testing.assert_allclose(found[t, k], expected[t, k], rtol=0, atol=2e-5 * scale)


@pytest.mark.parametrize("mixed", [False, True], ids=["one type", "mixed types"])
def test_experts_do_not_depend_on_tokens_or_threads(
    fast: None, mixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = draw_mixed(256, 256) if mixed else draw_experts(6, 128, 256)
    x, ids = packs.activations(9, 256), draw_ids(9, 4, len(experts))
    one = CpuBackend(1)
    together = one.experts(x, ids, experts, LIMIT)
    for t in range(9):
        same_bits(one.experts(x[t : t + 1], ids[t : t + 1], experts, LIMIT)[0], together[t])
    monkeypatch.setattr(workers, "SHARED_BYTES", 0)
    for threads in (2, 3):
        same_bits(CpuBackend(threads).experts(x, ids, experts, LIMIT), together)


def test_an_expert_may_be_chosen_twice_by_one_token(path: str) -> None:
    experts = draw_experts(2, 64, 32)
    x = packs.activations(1, 32)
    found = CpuBackend(1).experts(x, np.array([[1, 1]]), experts, LIMIT)
    same_bits(found[0, 0], found[0, 1])


def test_the_limit_clamps_gate_above_and_up_on_both_sides(path: str) -> None:
    """One row of width 32 whose gate is 20 x0 and whose up is 30 x1, down copies the first 32."""
    gate, up, down = (np.zeros((32, 32), dtype=np.float32) for _ in range(3))
    gate[:, 0], up[:, 1] = 20, 30
    np.fill_diagonal(down, 1)
    expert = Expert(*(packs.plain(F32, matrix)[0] for matrix in (gate, up, down)))
    x = np.zeros((4, 32), dtype=np.float32)
    x[:, 0], x[:, 1] = (1, -1, 1, 0.1), (1, 1, -1, 0.1)
    found = CpuBackend(1).experts(x, np.zeros((4, 1), dtype=np.int64), [expert], LIMIT)
    g = np.array([10, -20, 10, 2], dtype=np.float64)
    u = np.array([10, 10, -10, 3], dtype=np.float64)
    expected = g / (1 + np.exp(-g)) * u
    np.testing.assert_allclose(found[:, 0, 0], expected, rtol=1e-6)


def test_each_distinct_expert_is_looked_up_once(path: str) -> None:
    experts = draw_experts(3, 64, 32)
    asked: list[int] = []

    class Store:
        def __getitem__(self, expert_id: int, /) -> Expert:
            asked.append(expert_id)
            return experts[expert_id]

    ids = np.array([[2, 0], [0, 2], [2, 0]], dtype=np.int32)
    CpuBackend(1).experts(packs.activations(3, 32), ids, Store(), LIMIT)
    assert asked == [2, 0]


@pytest.mark.parametrize("threads", [1, 3])
def test_bands_of_experts_leave_other_rows_alone(
    path: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "SHARED_BYTES", 0)
    experts = draw_experts(6, 64, 32)
    x, ids = packs.activations(9, 32), draw_ids(9, 4, 6)
    backend = CpuBackend(threads)
    whole = backend.experts(x, ids, experts, LIMIT)
    rows = np.full((9, 4, 32), -7, dtype=np.float32)
    for band in ([4], [0, 1, 5], []):
        where = np.isin(ids, band)
        before = rows.copy()
        held = {expert_id: experts[expert_id] for expert_id in band}
        found = backend.experts(x, ids, held, LIMIT, where=where, out=rows)
        assert found is rows
        same_bits(rows[where], whole[where])
        same_bits(rows[~where], before[~where])


@pytest.mark.parametrize(
    "out",
    [
        np.zeros((2, 1, 33), np.float32),
        np.zeros((2, 1, 32)),
        np.zeros((2, 2, 32), np.float32)[:, ::2],
    ],
    ids=["shape", "dtype", "stride"],
)
def test_wrong_places_for_outputs_are_refused(path: str, out: Array) -> None:
    x, ids = packs.activations(2, 32), np.zeros((2, 1), np.int64)
    check_refused(
        WeightError,
        lambda: CpuBackend(1).experts(x, ids, draw_experts(1, 64, 32), LIMIT, out=out),
        says=["expected float32 (2, 1, 32)", f"found {out.dtype} {out.shape}"],
    )


def test_wrong_activations_are_refused(path: str) -> None:
    weight, _ = packs.draw(F32, 4, 32, seed=1)
    for x in (
        np.zeros((1, 33), dtype=np.float32),
        np.zeros((1, 32), dtype=np.float64),
        np.zeros(32, dtype=np.float32),
    ):
        check_refused(
            WeightError,
            functools.partial(CpuBackend(1).linear, weight, x),
            says=["expected float32 (T, 32)", f"found {x.dtype} {x.shape}"],
        )


def test_wrong_ids_are_refused(path: str) -> None:
    experts = draw_experts(2, 64, 32)
    x = packs.activations(2, 32)
    for ids in (np.array([[0]]), np.array([0, 1])):
        check_refused(
            WeightError,
            functools.partial(CpuBackend(1).experts, x, ids, experts, LIMIT),
            says=["expected (2, k)", f"found {ids.shape}"],
        )


def test_experts_of_another_shape_are_refused(path: str) -> None:
    experts = [draw_experts(1, 64, 32)[0], draw_experts(1, 96, 32)[0]]
    check_refused(
        WeightError,
        lambda: CpuBackend(1).experts(packs.activations(1, 32), np.array([[0, 1]]), experts, LIMIT),
        says=["expert 1", "expected gate 64 x 32", "found gate 96 x 32"],
    )


def test_a_type_without_a_kernel_is_refused_by_name(path: str) -> None:
    weight = Weight(TIDI32.id, 32, 32, np.zeros(4096, dtype=np.uint8))
    x = packs.activations(1, 32)
    says = ["expected one of HFP4G32, Q8F16, BF16, F16, F32, ROCmFP4, ", "found TidI32"]
    check_refused(BackendTypeError, lambda: CpuBackend(1).linear(weight, x), says=says)
    good, _ = packs.draw(F32, 32, 32, seed=1)
    sound = Expert(good, good, good)
    for expert in (Expert(weight, weight, good), Expert(good, good, weight)):
        check_refused(
            BackendTypeError,
            functools.partial(CpuBackend(1).experts, x, np.array([[0, 1]]), [sound, expert], LIMIT),
            says=says,
        )


def test_every_kind_of_call_shares_one_compiled_kernel(
    fast: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second specialisation would be compiled for seconds in the middle of a run."""
    monkeypatch.setattr(workers, "SHARED_BYTES", 0)
    experts = draw_mixed(256, 256)
    x = packs.activations(4, 256)
    frozen = x.copy()
    frozen.setflags(write=False)
    expected = CpuBackend(1).linear(experts[0].gate, x)
    for view in (frozen, np.asfortranarray(x), np.repeat(x, 2, axis=0)[::2]):
        for backend in (CpuBackend(1), CpuBackend(2)):
            same_bits(backend.linear(experts[0].gate, view), expected)
            for kind in (np.int32, np.int64):
                backend.experts(view, draw_ids(4, 2, 9).astype(kind), experts, 10)
    for kernel in (kernels.multiply, kernels.multiply_rows, kernels.feed_forward):
        compiled: Any = kernel
        assert len(compiled.signatures) == 1, compiled.signatures


def test_the_benchmark_times_the_kernel_that_runs(
    fast: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sides of the benchmark and the model's calls end in ``kernels.multiply_rows``."""
    seen: list[str] = []

    def watch(name: str) -> None:
        kernel = getattr(kernels, name)

        def watched(*args: Any) -> None:
            seen.append(name)
            kernel(*args)

        monkeypatch.setattr(kernels, name, watched)

    for whole in (kernels.multiply, kernels.feed_forward):
        source: Any = whole
        assert source.py_func.__globals__ is vars(kernels)
        assert "multiply_rows" in source.py_func.__code__.co_names
    for name in ("multiply", "feed_forward", "multiply_rows"):
        watch(name)

    experts = draw_experts(6, 64, 32)
    x = packs.activations(1, 32)
    one, two = CpuBackend(1), CpuBackend(2)
    decode_cpu.matrix_side(one, [experts[0].gate, experts[1].gate], x)()
    one.linear(experts[0].gate, x)
    assert seen == ["multiply"] * 3
    seen.clear()
    decode_cpu.moe_side(one, experts, x)()
    one.experts(x, np.arange(6)[None], experts, LIMIT)
    assert seen == ["feed_forward"] * 2
    seen.clear()
    monkeypatch.setattr(workers, "SHARED_BYTES", 0)
    decode_cpu.moe_side(two, experts, x)()
    two.linear(experts[0].gate, x)
    assert set(seen) == {"multiply_rows"}


def test_the_benchmark_notices_a_wrong_product() -> None:
    weight, _ = packs.draw(HFP4G32, 8, 64, seed=1)
    x = packs.activations(1, 64)
    good = reference.multiply(weight, x)
    decode_cpu.check_product(weight, x, good)
    bad = good.copy()
    bad[0, 3] += np.abs(good).max() * np.float32(1e-3)
    with pytest.raises(SystemExit, match="wrong product"):
        decode_cpu.check_product(weight, x, bad)
