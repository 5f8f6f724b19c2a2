"""Experts' kernels: the indexed vectors, mixed decoders, absent experts, the shared one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import pytest

from ds4q.artifact.formats._fwht import rotate
from ds4q.hipkern import matrix
from tests.hipkern.packed import (
    F32,
    FORMS,
    U8,
    Form,
    Rig,
    bound,
    columns,
    dot_steps,
    multiplied,
    payload,
    rig,
    turned,
    values_of,
)

__all__ = ["rig"]  # a fixture

D, WIDTH = 256, 128
LIMIT = 10.0
EXP_ULPS = 4  # of ds4q_exp, the division and the products of SwiGLU, generously

Expert = tuple[Form, tuple[U8, U8, U8]]


def _expert(form: Form, rng: np.random.Generator, d: int = D, width: int = WIDTH) -> Expert:
    shapes = ((width, d), (width, d), (d, width))
    gate, up, down = (payload(form, rows, cols, rng) for rows, cols in shapes)
    return form, (gate, up, down)


def _structs(rig: Rig, experts: list[Expert], d: int, width: int) -> list[bytes]:
    shapes = ((width, d), (width, d), (d, width))
    return [
        rig.matrix(form, data, rows, cols)
        for form, trio in experts
        for data, (rows, cols) in zip(trio, shapes, strict=True)
    ]


def _run(
    rig: Rig,
    experts: list[Expert],
    shared: Expert | None,
    ids: np.ndarray,
    weights: F32,
    x: F32,
    decoders: tuple[int, int, int],
    width: int = WIDTH,
) -> tuple[F32, F32, F32]:
    """hidden [T][k + 1][width], routed [T][d], out [T][d]."""
    (tokens, k), d = ids.shape, x.shape[1]
    table = rig.table(_structs(rig, experts, d, width))
    third = rig.table(_structs(rig, [shared], d, width)) if shared else 0
    hidden = rig.put(np.zeros((tokens, k + 1, width), np.float32))
    parts = rig.room((tokens, k + 1, d))
    routed, out = rig.room((tokens, d)), rig.room((tokens, d))
    at = rig.put(ids.astype(np.int32))
    gate, down, common = decoders
    defines = {"DS4Q_GATE": gate, "DS4Q_DOWN": down, "DS4Q_SHARED_EXPERT": common}
    every = [*experts, shared] if shared else experts
    turns = any(form.decoder in matrix.ROTATED for form, _ in every)
    rotated = rig.put(rotate(x)) if turns else 0
    rig.run(
        "moe.hip", "moe_gate_up", matrix.gate_up_grid(width, k, tokens),
        table, third, at, rig.put(x), rotated, hidden, LIMIT, k, tokens, **defines,
    )  # fmt: skip
    made = rig.get(hidden, (tokens, k + 1, width))
    if turns:
        grid = matrix.rotate_hidden_grid(width, k, tokens)
        rig.run("rotate.hip", "rotate_hidden", grid, table, third, at, hidden, width, k)
    rig.run(
        "moe.hip", "moe_down", matrix.down_grid(d, k, tokens),
        table, third, at, rig.put(weights), hidden, parts, k, tokens, **defines,
    )  # fmt: skip
    rig.run("hyper.hip", "hc_sum", matrix.sum_grid(d, tokens), parts, routed, out, k + 1, d)
    return (
        made,
        rig.get(routed, (tokens, d)),
        rig.get(out, (tokens, d)),
    )


def _check(
    experts: list[Expert],
    shared: Expert | None,
    ids: np.ndarray,
    weights: F32,
    x: F32,
    found: tuple[F32, F32, F32],
) -> None:
    """Against float64, from the kernels' own hidden values for the second half."""
    hidden, routed, out = (part.astype(np.float64) for part in found)
    tokens, k = ids.shape
    d, width = x.shape[1], hidden.shape[2]
    for t in range(tokens):
        total, magnitude, steps = np.zeros(d), np.zeros(d), 0
        for j in range(k + 1):
            if (j == k and shared is None) or (j < k and ids[t, j] < 0):
                assert not hidden[t, j].any()
                continue
            form, trio = experts[ids[t, j]] if j < k else shared  # type: ignore[misc]
            g, u, w = (
                multiplied(form, data, *shape).astype(np.float64)
                for data, shape in zip(trio, ((width, d), (width, d), (d, width)), strict=True)
            )
            _check_hidden(form, g, u, turned(form, x[t]).astype(np.float64), hidden[t, j])
            share = float(weights[t, j]) if j < k else 1.0
            read = turned(form, found[0][t, j]).astype(np.float64)
            total += share * (w @ read)
            magnitude += abs(share) * (np.abs(w) @ np.abs(read))
            steps = max(steps, dot_steps(form, width))
            if j == k - 1:
                limit = bound(steps + k + 2, magnitude)
                assert (np.abs(routed[t] - total) <= limit).all()
        assert (np.abs(out[t] - total) <= bound(steps + k + 2, magnitude)).all()


def _check_hidden(
    form: Form, g: np.ndarray, u: np.ndarray, x: np.ndarray, found: np.ndarray
) -> None:
    """silu(min(g, limit)) * clamp(u), |silu'| <= 1.1: so errors of g and u pass on."""
    steps = dot_steps(form, len(x))
    gate, up = np.minimum(g @ x, LIMIT), np.clip(u @ x, -LIMIT, LIMIT)
    gate_error = bound(steps, np.abs(g) @ np.abs(x))
    up_error = bound(steps, np.abs(u) @ np.abs(x))
    silu = gate / (1 + np.exp(-gate))
    error = 1.1 * gate_error * (np.abs(up) + up_error) + (np.abs(silu) + gate_error) * up_error
    error += EXP_ULPS * 2.0**-23 * np.abs(silu * up) * (1 + np.abs(gate)) + 1e-30
    assert (np.abs(found - silu * up) <= error).all()


@pytest.mark.parametrize(
    "names", [("HFP4G32", "BF16"), ("ROCmFP2Mix-1", "Q8F16"), ("MQ2G256Lloyd", "Q8F16")]
)
def test_chosen_experts_and_the_shared_one_are_within_the_bound(
    rig: Rig, names: tuple[str, str]
) -> None:
    rng = np.random.default_rng(8)
    routed, common = FORMS[names[0]], FORMS[names[1]]
    width = columns(routed, WIDTH)
    experts = [_expert(routed, rng, width=width) for _ in range(3)]
    shared = _expert(common, rng, width=width)
    ids = np.array([[2, 0], [1, -1]])
    weights = rng.uniform(0.1, 1, ids.shape).astype(np.float32)
    x = (rng.standard_normal((2, D)) * 0.1).astype(np.float32)
    decoders = (routed.decoder, routed.decoder, common.decoder)
    found = _run(rig, experts, shared, ids, weights, x, decoders, width)
    _check(experts, shared, ids, weights, x, found)


@pytest.mark.parametrize(
    "name", ["HFP4G32", "MQ2G256Lloyd", "ROCmFP3Mix-1", "ROCmFP2Mix-1", "Q8F16", "BF16"]
)
@pytest.mark.parametrize(
    "shape", [(2048, 1024), pytest.param((4096, 2048), marks=pytest.mark.slow)]
)
def test_streamed_experts_are_within_the_bound(rig: Rig, name: str, shape: tuple[int, int]) -> None:
    """Shapes that blocks stream; the same as a mixed layer, whose kernels ask each matrix."""
    rng, form, (d, width) = np.random.default_rng(11), FORMS[name], shape
    experts = [_expert(form, rng, d, width) for _ in range(3)]
    ids = np.array([[2, -1, 0]])
    weights = rng.uniform(0.1, 1, ids.shape).astype(np.float32)
    x = (rng.standard_normal((1, d)) * 0.05).astype(np.float32)
    own = (form.decoder,) * 3
    found = _run(rig, experts, experts[1], ids, weights, x, own, width)
    _check(experts, experts[1], ids, weights, x, found)
    mixed = _run(rig, experts, experts[1], ids, weights, x, (0, 0, 0), width)
    for part, other in zip(found, mixed, strict=True):
        np.testing.assert_array_equal(part, other)


def test_a_layer_of_mixed_types_gives_the_bits_of_the_kernels_for_each(rig: Rig) -> None:
    """Decoder 0 asks each matrix; the same experts alone go through kernels of their decoder."""
    rng = np.random.default_rng(9)
    forms = [FORMS[name] for name in ("HFP4G32", "ROCmFP3Mix-1", "ROCmFP2Mix-1", "BF16")]
    experts = [_expert(form, rng) for form in forms]
    ids = np.arange(4)[None]
    weights = np.ones((1, 4), dtype=np.float32)
    x = (rng.standard_normal((1, D)) * 0.1).astype(np.float32)
    found = _run(rig, experts, experts[0], ids, weights, x, (0, 0, 0))
    _check(experts, experts[0], ids, weights, x, found)
    for e in (0, 1):
        own = (forms[e].decoder,) * 3
        alone = _run(rig, experts[e : e + 1], None, np.array([[0]]), weights[:, :1], x, own)
        np.testing.assert_array_equal(found[0][0, e], alone[0][0, 0])
        one = np.array([[e]])
        mixed = _run(rig, experts, None, one, weights[:, :1], x, (0, 0, 0))
        np.testing.assert_array_equal(mixed[2], alone[2])


def test_bits_do_not_depend_on_the_batch(rig: Rig) -> None:
    rng = np.random.default_rng(10)
    form = FORMS["HFP4G32"]
    experts, shared = [_expert(form, rng) for _ in range(4)], _expert(form, rng)
    ids = rng.permuted(np.tile(np.arange(4), (9, 1)), axis=1)[:, :3]
    weights = rng.uniform(0.1, 1, ids.shape).astype(np.float32)
    x = (rng.standard_normal((9, D)) * 0.1).astype(np.float32)
    own = (21, 21, 21)
    alone = [
        _run(rig, experts, shared, ids[t : t + 1], weights[t : t + 1], x[t : t + 1], own)
        for t in range(9)
    ]
    for tokens in (2, 9):
        found = _run(rig, experts, shared, ids[:tokens], weights[:tokens], x[:tokens], own)
        for part in range(3):
            want = np.concatenate([one[part] for one in alone[:tokens]])
            np.testing.assert_array_equal(found[part], want)


def test_launches_for_bands_of_experts_give_the_bits_of_one_launch(rig: Rig) -> None:
    """Ids below -1 leave what another launch has made; -1 is zeros in whichever has it."""
    rng, form, k, tokens = np.random.default_rng(12), FORMS["HFP4G32"], 3, 5
    experts, shared = [_expert(form, rng) for _ in range(4)], _expert(form, rng)
    ids = rng.permuted(np.tile(np.arange(-1, 4), (tokens, 1)), axis=1)[:, :k].astype(np.int32)
    assert (ids == -1).any()
    weights = rig.put(rng.uniform(0.1, 1, ids.shape).astype(np.float32))
    x = rig.put((rng.standard_normal((tokens, D)) * 0.1).astype(np.float32))
    table = rig.table(_structs(rig, experts, D, WIDTH))
    third = rig.table(_structs(rig, [shared], D, WIDTH))
    defines = {"DS4Q_GATE": 21, "DS4Q_DOWN": 21, "DS4Q_SHARED_EXPERT": 21}
    unwritten = np.full((tokens, k + 1, max(D, WIDTH)), np.nan, np.float32)

    def run(*bands: tuple[np.ndarray, int]) -> list[F32]:
        """Hidden values and parts after launches for (ids, slots)."""
        hidden, parts = rig.put(unwritten), rig.put(unwritten)
        for band, slots in bands:
            at = rig.put(band)
            grid = matrix.gate_up_grid(WIDTH, k, tokens)[0], slots, tokens
            arguments = table, third, at, x, x, hidden, LIMIT, k, tokens
            rig.run("moe.hip", "moe_gate_up", grid, *arguments, **defines)
            grid = matrix.down_grid(D, k, tokens)[0], slots, tokens
            then = table, third, at, weights, hidden, parts, k, tokens
            rig.run("moe.hip", "moe_down", grid, *then, **defines)
        return [rig.get(hidden, (tokens, k + 1, WIDTH)), rig.get(parts, (tokens, k + 1, D))]

    alone = np.full_like(ids, -2)
    low, high = np.where(ids < 2, ids, -2), np.where(ids < 2, -2, ids)
    whole = run((ids, k + 1))
    assert all(np.isfinite(part).all() for part in whole)
    for cut in (
        [(low, k + 1), (high, k)],
        [(high, k), (low, k + 1)],
        [(alone, k + 1), (low, k), (high, k)],
    ):
        for found, wanted in zip(run(*cut), whole, strict=True):
            np.testing.assert_array_equal(found, wanted)
    for found in run((low, k)):
        assert np.isnan(found[:, k]).all()
        assert np.isnan(found[:, :k][ids > 1]).all()
        assert not np.isnan(found[:, :k][ids < 2]).any()


# The indexed vectors: 4 experts, K = 256, 8 rows whose bytes come from a 64-bit xorshift.
HEADERS = ("3a00", "3acd", "3b9a", "3c33")
DIGESTS = (
    "6736a93fd41d1bf1f592fbc052254ea088bc68d7d7c7ba483300d45f4697fd72",
    "6f89307ece3a1e92a5fd45f4b61d0c51144fe33d48ee586eb9c4c02efdefc2df",
    "2b6795d397e7871160856259ad551e4f14d827841409585963e71abe2befb1fd",
    "4b966cb2bfecfc92c3c8d8f47b6d4fc4d1dab4d0bb0490814a16bc8a440d9818",
)


def _draws(state: int) -> Iterator[int]:
    mask = (1 << 64) - 1
    while True:
        state ^= state << 13 & mask
        state ^= state >> 7
        state ^= state << 17 & mask
        yield state


def _indexed_expert(e: int) -> U8:
    scale = np.array([np.float32(0.75) + np.float32(0.1) * np.float32(e)], dtype="<f2")
    rows = []
    for r in range(8):
        draws = _draws((131 * e + 17 * r + 1) | 1)
        row = bytearray(scale.tobytes() + bytes([0, 0, 8, 0]) + bytes(10))
        for _ in range(8):
            row.append(110 + next(draws) % 30)
            row += bytes(next(draws) % 16 | next(draws) % 16 << 4 for _ in range(16))
        rows.append(row)
    return np.frombuffer(b"".join(rows), np.uint8)


def test_the_indexed_vectors(rig: Rig) -> None:
    """Gate rows 0 to 3 and up rows 4 to 7 of a record; downs are all eight rows."""
    form, k = FORMS["HFP4G32"], 256
    blobs = [_indexed_expert(e) for e in range(4)]
    for blob, header, digest in zip(blobs, HEADERS, DIGESTS, strict=True):
        assert blob[1::-1].tobytes().hex() == header
        assert hashlib.sha256(blob.tobytes()).hexdigest() == digest
    at = np.arange(2 * k)
    one = (((at[:k] % 13) - 6) * 0.125)[None], (((at % 7) - 3) * 0.25).reshape(2, k)
    at = np.arange(6 * k)
    three = (((at[: 3 * k] % 11) - 5) * 0.1).reshape(3, k), (((at % 9) - 4) * 0.2).reshape(6, k)
    for ids, weights, (x, down_x) in (
        ([[3, 1]], [[0.6, 0.4]], one),
        ([[3, 1], [0, 2], [2, 3]], [[0.5, 0.5], [0.7, 0.3], [0.25, 0.75]], three),
    ):
        found = _indexed(rig, form, blobs, np.array(ids), np.array(weights), x, down_x)
        want = _indexed_want(form, blobs, np.array(ids), np.array(weights), x, down_x)
        for part, reference in zip(found, want, strict=True):
            error = np.abs(part - reference) / np.maximum(np.abs(reference), 1e-6)
            assert error.max() < 1e-5
    gate = values_of(form, blobs[3], 8, k)[:4].astype(np.float64) @ one[0][0]
    np.testing.assert_allclose(
        gate, [-25126.77532, -23.27110341, 1820.679749, 7326.013375], rtol=1e-8
    )


def _indexed(
    rig: Rig, form: Form, blobs: list[U8], ids: np.ndarray, weights: np.ndarray,
    x: np.ndarray, down_x: np.ndarray,
) -> tuple[F32, F32]:  # fmt: skip
    """Hidden values, and the weighted sums of downs over inputs of their own."""
    k = x.shape[1]
    halves = [(blob[: blob.size // 2], blob[blob.size // 2 :]) for blob in blobs]
    table = rig.table(
        [
            struct
            for (gate, up), blob in zip(halves, blobs, strict=True)
            for struct in (
                rig.matrix(form, gate, 4, k),
                rig.matrix(form, up, 4, k),
                rig.matrix(form, blob, 8, k),
            )
        ]
    )
    tokens, slots = ids.shape
    defines = {"DS4Q_GATE": 21, "DS4Q_DOWN": 21, "DS4Q_SHARED_EXPERT": 21}
    at, hidden = rig.put(ids.astype(np.int32)), rig.room((tokens, slots + 1, 4))
    rig.run(
        "moe.hip", "moe_gate_up", matrix.gate_up_grid(4, slots, tokens),
        table, 0, at, rig.put(x.astype(np.float32)), 0, hidden, 1e30, slots, tokens, **defines,
    )  # fmt: skip
    inputs = np.zeros((tokens, slots + 1, k), np.float32)
    inputs[:, :slots] = down_x.reshape(tokens, slots, k)
    parts, out = rig.room((tokens, slots + 1, 8)), rig.room((tokens, 8))
    rig.run(
        "moe.hip", "moe_down", matrix.down_grid(8, slots, tokens),
        table, 0, at, rig.put(weights.astype(np.float32)), rig.put(inputs), parts, slots, tokens,
        **defines,
    )  # fmt: skip
    grid = matrix.sum_grid(8, tokens)
    rig.run("hyper.hip", "hc_sum", grid, parts, rig.room((tokens, 8)), out, slots + 1, 8)
    return rig.get(hidden, (tokens, slots + 1, 4))[:, :slots], rig.get(out, (tokens, 8))


def _indexed_want(
    form: Form, blobs: list[U8], ids: np.ndarray, weights: np.ndarray,
    x: np.ndarray, down_x: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    tokens, slots = ids.shape
    k = x.shape[1]
    x32, down32 = (a.astype(np.float32).astype(np.float64) for a in (x, down_x))
    hidden, out = np.zeros((tokens, slots, 4)), np.zeros((tokens, 8))
    for t in range(tokens):
        for j in range(slots):
            w = values_of(form, blobs[ids[t, j]], 8, k).astype(np.float64)
            gate_up = w @ x32[t]
            with np.errstate(over="ignore"):
                hidden[t, j] = gate_up[:4] / (1 + np.exp(-gate_up[:4])) * gate_up[4:]
            share = np.float64(np.float32(weights[t, j]))
            out[t] += share * (w @ down32.reshape(tokens, slots, k)[t, j])
    return hidden, out
