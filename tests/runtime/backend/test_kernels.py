"""The compiled kernels: exact weights, one order, every CPU variant, no read past the end."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import llvmlite.binding
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4q.artifact.formats._fwht import rotate
from ds4q.artifact.types import (
    BF16,
    F16,
    F32,
    HFP4G32,
    MQ2_LLOYD,
    ROCMFP3,
    ROCMFP4_FAST,
    ROCMFP8,
    TensorType,
)
from ds4q.runtime.backend import Weight, kernels, reference
from tests.checks import same_bits
from tests.runtime.backend import packs

Array = npt.NDArray[Any]


def product(weight: Weight, x: Array) -> Array:
    out = np.full((len(x), weight.rows), np.nan, dtype=np.float32)
    kernels.multiply(weight.matrix, weight.rows, x, out)
    return out


@pytest.mark.parametrize(("kind", "rows", "cols"), packs.shapes(), ids=packs.name)
def test_products_are_those_of_float64(kind: packs.Kind, rows: int, cols: int) -> None:
    weight, values = packs.draw(kind, rows, cols, seed=1)
    x = packs.activations(6, cols)
    packs.check_close(product(weight, x), values, x)


@settings(max_examples=60)
@given(
    kind=st.sampled_from(packs.KINDS),
    rows=st.integers(1, 70),
    blocks=st.integers(1, 9),
    tokens=st.integers(1, 9),
    seed=st.integers(0, 1 << 30),
)
def test_a_row_does_not_depend_on_the_other_tokens(
    kind: packs.Kind, rows: int, blocks: int, tokens: int, seed: int
) -> None:
    weight, values = packs.draw(kind, rows, packs.columns(kind, blocks), seed)
    x = packs.activations(tokens, weight.cols, seed)
    together = product(weight, x)
    packs.check_close(together, values, x)
    alone = np.concatenate([product(weight, x[t : t + 1]) for t in range(tokens)])
    same_bits(together, alone)


@pytest.mark.parametrize("kind", [BF16, F16, F32], ids=packs.name)
def test_a_rest_of_columns_does_not_depend_on_the_other_tokens(kind: TensorType) -> None:
    weight, _ = packs.draw(kind, 9, 77, seed=2)
    x = packs.activations(7, 77)
    alone = np.concatenate([product(weight, x[t : t + 1]) for t in range(7)])
    same_bits(product(weight, x), alone)


def unit_products(weight: Weight) -> Array:
    """The weights as the kernel sees them: its products with the columns of the identity."""
    return product(weight, np.eye(weight.cols, dtype=np.float32)).T


def test_every_code_under_every_scale_byte_is_exact() -> None:
    scales = np.arange(255, dtype=np.uint8).reshape(255, 1)
    codes = np.tile(np.arange(32, dtype=np.uint8) % 16, (255, 1))
    weight, values = packs.hfp4g32(codes, scales, np.ones(255, dtype=np.float16))
    with np.errstate(over="ignore"):  # bytes 253 and 254 reach beyond float32
        expected = values.astype(np.float32)
    found = unit_products(weight)
    assert found[0, 1] == 2.0**-128, "scale byte 0 is 2^-127, a subnormal"
    assert np.isinf(found[254, 7])
    same_bits(found + 0.0, expected + 0.0)  # + 0: a sum that is zero carries no sign


def test_row_scales_are_applied() -> None:
    row_scales = np.array([1, -2, 0.5, 65504, 2.0**-24, 6.1e-5], dtype=np.float16)
    codes = np.tile(np.arange(32, dtype=np.uint8) % 16, (6, 1))
    weight, values = packs.hfp4g32(codes, np.full((6, 1), 127, dtype=np.uint8), row_scales)
    same_bits(unit_products(weight) + 0.0, values.astype(np.float32) + 0.0)


def test_every_finite_half_is_exact() -> None:
    words = np.arange(65536, dtype=np.uint16)
    words = words[(words & 0x7C00) != 0x7C00].reshape(-1, 32)
    weight, values = packs.plain(F16, words)
    same_bits(unit_products(weight) + 0.0, values.astype(np.float32) + 0.0)


@pytest.mark.parametrize("kind", [F16, BF16], ids=packs.name)
def test_every_16_bit_word_is_exact_past_the_last_step(kind: TensorType) -> None:
    words = np.arange(65536, dtype=np.uint16).reshape(-1, 1)
    weight, values = packs.plain(kind, words)
    found = product(weight, np.ones((1, 1), dtype=np.float32))[0]
    np.testing.assert_array_equal(found.astype(np.float64), values[:, 0])


def test_every_finite_bf16_is_exact() -> None:
    words = np.arange(65536, dtype=np.uint16)
    words = words[(words & 0x7F80) != 0x7F80].reshape(-1, 32)
    weight, values = packs.plain(BF16, words)
    same_bits(unit_products(weight) + 0.0, values.astype(np.float32) + 0.0)


def test_every_8_bit_code_under_odd_scales_is_exact() -> None:
    scales = np.array([1, -0.25, 65504, 2.0**-24, 3 * 2.0**-24, 6.1e-5], dtype=np.float16)
    codes = np.arange(256).astype(np.uint8).view(np.int8).reshape(8, 32)
    weight, values = packs.q8f16(np.tile(codes, (6, 1)), np.repeat(scales, 8).reshape(48, 1))
    same_bits(unit_products(weight) + 0.0, values.astype(np.float32) + 0.0)


@pytest.mark.parametrize("kind", packs.LOSSY, ids=packs.name)
def test_every_code_under_every_pair_of_scale_bytes_is_exact(kind: packs.Kind) -> None:
    """All bytes, legal or not, first with themselves and then with others in the second half."""
    table, _ = packs.parts(kind)
    rng = np.random.default_rng(table.id)
    blocks = rng.integers(0, 256, (128, 16, table.block_bytes), dtype=np.uint8)
    scales = np.arange(2048).reshape(128, 16).astype(np.uint8)
    blocks[:, :, -1] = scales
    if table not in (ROCMFP4_FAST, ROCMFP8):
        blocks[:, :, -2] = scales
        blocks[64:, :, -2] += rng.integers(0, 256, (64, 16), dtype=np.uint8)
    weight, values = packs.rocmfpx(kind, blocks)
    expected = values.astype(np.float32)
    np.testing.assert_array_equal(expected, values)  # float32 holds every value
    same_bits(unit_products(weight) + 0.0, expected + 0.0)


def test_a_type_without_a_case_gives_nan() -> None:
    weight, _ = packs.draw(F32, 2, 32, seed=3)
    out = np.zeros((1, 2), dtype=np.float32)
    x = packs.activations(1, 32)
    kernels.multiply((weight.address, 0, 99, weight.row_bytes), 2, x, out)
    assert np.isnan(out).all()


@pytest.mark.parametrize("kind", packs.KINDS, ids=packs.name)
def test_rows_in_pieces_are_the_rows_of_one_call(kind: packs.Kind) -> None:
    weight, _ = packs.draw(kind, 75, packs.columns(kind, 3), seed=4)
    x = packs.activations(5, weight.cols)
    out = np.full((5, 75), np.nan, dtype=np.float32)
    items, starts, matrices = np.arange(5), np.array([0, 5]), np.array([weight.matrix])
    xs = kernels.spread(x, matrices)
    for lo, hi in ((0, 1), (1, 33), (33, 34), (34, 75)):
        kernels.multiply_rows(matrices, starts, items, items, lo, hi, 75, xs, out)
        assert np.isnan(out[:, hi:]).all(), "rows of another piece were written"
    same_bits(out, product(weight, x))


def test_matrices_of_every_type_are_multiplied_together() -> None:
    """One call, and pieces that begin and end within any of them."""
    rows, tokens = 21, 6
    weights = [packs.draw(kind, rows, 256, seed=9)[0] for kind in packs.KINDS]
    x = packs.activations(tokens, 256)
    matrices = np.array([weight.matrix for weight in weights])
    reads = np.tile(np.arange(tokens), len(weights))
    writes = np.arange(len(reads))
    starts = np.arange(0, len(reads) + 1, tokens)
    xs = kernels.spread(x, matrices)
    out = np.full((len(reads), rows), np.nan, dtype=np.float32)
    cuts = [0, 5, 30, 31, 100, rows * len(weights)]
    for lo, hi in itertools.pairwise(cuts):
        kernels.multiply_rows(matrices, starts, reads, writes, lo, hi, rows, xs, out)
    same_bits(out, np.concatenate([product(weight, x) for weight in weights]))


@pytest.mark.parametrize("columns", [1, 32, 100, 4096])
def test_spread_activations_begin_on_a_cache_line(columns: int) -> None:
    x = packs.activations(3, columns)
    padded = np.pad(x, ((0, 0), (0, -columns % 32)))
    paired = padded.reshape(3, -1, 16, 2).transpose(0, 1, 3, 2).reshape(padded.shape)
    none = x[:0]
    cases: list[tuple[list[TensorType], tuple[Array, Array, Array]]] = [
        ([HFP4G32, BF16], (none, paired, none)),
        ([F32], (padded, none, none)),
        ([F32, BF16], (padded, paired, none)),
        ([ROCMFP3, HFP4G32, F32], (padded, paired, none)),
    ]
    if columns == 4096:
        cases.append(([MQ2_LLOYD, MQ2_LLOYD], (none, none, rotate(x))))
        cases.append(([MQ2_LLOYD, F32, BF16], (padded, paired, rotate(x))))
    for kinds, expected in cases:
        matrices = np.array([(0, 0, kind.id, 0) for kind in kinds])
        for found, order in zip(kernels.spread(x, matrices), expected, strict=True):
            assert found.ctypes.data % 64 == 0 or not len(found)
            np.testing.assert_array_equal(found, order)


def test_activation_clamps_before_silu_and_keeps_nan() -> None:
    gate = np.array([1, 20, -20, -200, 0, np.nan, 3], dtype=np.float32)
    up = np.array([2, 30, -30, 5, 7, 1, np.nan], dtype=np.float32)
    found = kernels.activate(np.stack([gate, up]), 10.0)[0]
    wide = np.array([1, 10, -20, -200, 0, np.nan, 3], dtype=np.float64)
    expected = wide / (1 + np.exp(-wide)) * np.array([2, 10, -10, 5, 7, 1, np.nan])
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-37)
    np.testing.assert_allclose(reference.activate(gate, up, 10.0), expected, rtol=1e-6, atol=1e-37)


# Each variant is compiled by a child process, as numba would for such a CPU.
VARIANTS = {
    "host": {},
    "avx2": {
        "NUMBA_CPU_NAME": "haswell",
        "NUMBA_CPU_FEATURES": "+sse2,+ssse3,+sse4.1,+avx,+avx2,+fma,+f16c",
    },
    "portable": {"NUMBA_CPU_NAME": "generic"},
}
CHOICES = {  # permute, octets, shuffle, half
    "avx2": [False, True, True, True],
    "portable": [False, False, False, False],
}
CHILD = Path(__file__).with_name("variant_child.py")


def runs_here(variant: str) -> bool:
    if variant in ("host", "portable"):
        return True
    host = llvmlite.binding.get_host_cpu_features()
    wanted = VARIANTS[variant]["NUMBA_CPU_FEATURES"].replace("+", "").split(",")
    return all(host.get(feature, False) for feature in wanted)


def run_child(folder: Path, variant: str, cache: Path) -> dict[str, Any]:
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("NUMBA_CPU")},
        **VARIANTS[variant],
        "NUMBA_CACHE_DIR": str(cache),
        "DS4Q_REFERENCE": "1",  # codecs that make level tables need not be compiled
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, str(CHILD), str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"exit {done.returncode}: {done.stderr}"
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.mark.parametrize(
    "variant",
    [pytest.param(each, marks=() if each == "host" else pytest.mark.slow) for each in VARIANTS],
)
def test_each_cpu_variant_computes_within_its_own_bytes(variant: str, tmp_path: Path) -> None:
    """The child puts each weight right before a page that must not be touched."""
    if not runs_here(variant):
        pytest.skip(f"this CPU lacks {variant}")
    first = run_child(tmp_path, variant, tmp_path / "cache")
    if variant != "host":
        portable_half = CHOICES[variant][3] or not first["x86"]
        assert first["cpu"] == [*CHOICES[variant][:3], portable_half]
    for kind in packs.KINDS:
        weight, values = packs.draw(kind, 37, packs.columns(kind, 5), seed=5)
        x = packs.activations(6, weight.cols)
        found = np.load(tmp_path / f"{packs.name(kind)}.npy")
        packs.check_close(found, values, x)
        if variant == "host":
            same_bits(found, product(weight, x))
    _, values = packs.draw(F16, 5, 39, seed=6)
    packs.check_close(np.load(tmp_path / "tail.npy"), values, packs.activations(5, 39))
    codes = np.load(tmp_path / "codes.npy")
    assert codes[0, 1] == 2.0**-128
    same_bits(codes, np.load(tmp_path / "codes_expected.npy"))
    halves = np.load(tmp_path / "halves.npy")
    _, values = packs.plain(F16, np.arange(65536, dtype=np.uint16).reshape(-1, 1))
    np.testing.assert_array_equal(halves.astype(np.float64), values[:, 0])
    if variant == "host":
        assert first["compiled"]
        again = run_child(tmp_path, variant, tmp_path / "cache")
        assert not again["compiled"], "a second process must load the cached code"
        assert again["digest"] == first["digest"]
