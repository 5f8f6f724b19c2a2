"""``encode_fp4`` against the codecs' own encoders: bytes, counts, refusals, threads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds4q.artifact.errors import (
    CodingError,
    PayloadSizeError,
    PayloadValueError,
    TensorTypeError,
)
from ds4q.artifact.formats import codec_for, hfp4g32
from ds4q.artifact.types import (
    HFP4G32,
    ROCMFP2,
    ROCMFP2_MIX,
    ROCMFP3,
    ROCMFP4,
    ROCMFP6,
    ROCMFP8,
    TensorType,
)
from ds4q.quantize.exact import encode, encode_fp4, kernel
from tests.checks import Array, check_refused, same_bits
from tests.quantize.exact import guarded_child
from tests.quantize.exact.sources import (
    BOOKS,
    TARGETS,
    check_same,
    exact,
    general,
    importance_of,
    mixed_codes,
    name_of,
    outcome,
    packed,
)

OVERFLOWS = 160  # from here on weighted errors of codes that are not zero may leave float32
every_target = pytest.mark.parametrize("target", TARGETS, ids=name_of)


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DS4Q_REFERENCE", raising=False)


def scales_of(rng: np.random.Generator, shape: tuple[int, int], low: int, high: int) -> Array:
    return rng.integers(low, high, shape, dtype=np.uint8)


def served(codes: Array, scales: Array, target: Any, weights: Any) -> bool:
    """Whether the tables answer, so that a comparison is not one of the codec with itself."""
    tables = encode.tables_of(*target)
    assert tables is not None
    out = np.empty((len(codes), target[0].row_bytes(2 * codes.shape[1])), np.uint8)
    return tables.encode(codes, scales, weights, out) != kernel.NOT_SERVED


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("weights", ["none", "full", "gaps"])
@every_target
def test_bytes_are_the_general_encoders(target: Any, weights: str) -> None:
    rng = np.random.default_rng(0)
    for rows, k, low, high in ((9, 1024, 110, 130), (17, 128, 90, 150), (1, 256, 118, 122)):
        codes = mixed_codes(rng, rows, k)
        scales = scales_of(rng, (rows, k // 32), low, high)
        importance = None if weights == "none" else importance_of(rng, k, gaps=weights == "gaps")
        lost = check_same(codes, scales, target, importance)
        assert weights == "gaps" or lost == 0
        if target[1] != "affine" or low >= encode.AFFINE_E:
            assert served(codes, scales, target, importance)


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("weighted", [False, True])
@every_target
def test_every_scale_byte(target: Any, weighted: bool) -> None:
    """Bytes agree as long as errors fit float32, and refusals from there on."""
    rng = np.random.default_rng(1)
    importance = importance_of(rng, 128, gaps=False) if weighted else None
    refused = []
    for e in range(256):
        codes, scales = mixed_codes(rng, 2, 128), np.full((2, 4), e, np.uint8)
        arrays = codes, scales, target, importance
        both = [outcome(encoder, *arrays) for encoder in (exact, general)]
        assert both[0] == both[1], f"scale byte {e}"
        refused += [e] if isinstance(both[0], str) else []
        if e < 255:
            zeros = codes & 0x88
            check_same(zeros, scales, target, importance)
    assert refused == list(range(refused[0], 256))
    assert refused[0] > 160


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("weighted", [False, True])
@every_target
def test_the_numpy_path_gives_the_same(
    target: Any, weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(2)
    codes, scales = mixed_codes(rng, 3, 128), scales_of(rng, (3, 4), 112, 126)
    importance = importance_of(rng, 128, gaps=True) if weighted else None
    found = exact(codes, scales, target, importance)
    monkeypatch.setenv("DS4Q_REFERENCE", "1")
    expected = exact(codes, scales, target, importance)
    same_bits(found[0], expected[0], block_bytes=target[0].block_bytes)
    assert found[1] == expected[1]


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize(
    "target", [t for t in TARGETS if t[0] not in (ROCMFP2, ROCMFP2_MIX)], ids=name_of
)
def test_rows_of_any_whole_number_of_blocks(target: Any) -> None:
    rng = np.random.default_rng(3)
    for blocks in (1, 2, 3, 5):
        codes = mixed_codes(rng, 4, 32 * blocks)
        scales = scales_of(rng, (4, blocks), 110, 130)
        check_same(codes, scales, target, importance_of(rng, 32 * blocks, gaps=False))
        check_same(codes, scales, target, None)


@pytest.mark.parametrize("coding", ["zero", "neg32"])
def test_six_bits_hold_the_source(coding: str) -> None:
    """Type 102 is exact for these scales: decoding gives the source back, but for the sign of 0."""
    rng = np.random.default_rng(4)
    codes, scales = mixed_codes(rng, 20, 512), scales_of(rng, (20, 16), 118, 137)
    rows, _ = exact(codes, scales, (ROCMFP6, coding), None)
    values = codec_for(ROCMFP6.id, coding).decode(rows.reshape(-1), (20, 512))
    same_bits(values + np.float32(0), hfp4g32.source_values(codes, scales) + np.float32(0))


def test_known_bytes() -> None:
    """Half 0: 6 6 6 ... at e = 127 is level 4 of scale 1.5; half 1 is zeros of both signs."""
    codes = np.array([[7] * 15 + [15] + [0, 8] * 8], np.uint8)
    rows, lost = exact(packed(codes), np.array([[127]], np.uint8), (ROCMFP3, None), None)
    three = sum(3 << 3 * i for i in range(15)) | 7 << 45
    assert rows.tobytes() == three.to_bytes(6, "little") + bytes(6) + bytes([0x44, 0x00])
    assert lost == 0


@pytest.mark.usefixtures("fast")
def test_lost_groups_are_counted_and_encoded_without_weights() -> None:
    rng = np.random.default_rng(5)
    codes, scales = mixed_codes(rng, 6, 128) | 0x11, np.full((6, 4), 121, np.uint8)
    importance = importance_of(rng, 128, gaps=False)
    importance[16:48] = 0
    for target in ((ROCMFP3, None), (ROCMFP8, None), (ROCMFP2_MIX, BOOKS[ROCMFP2_MIX])):
        lost = check_same(codes, scales, target, importance)
        assert lost == (0 if target[0] is ROCMFP8 else 12)
    importance[:] = 0
    plain = exact(codes, scales, (ROCMFP8, None), None)[0]
    rows, lost = exact(codes, scales, (ROCMFP8, None), importance)
    same_bits(rows, plain, block_bytes=33)
    assert lost == 6 * 4


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize(
    ("e", "code", "why"),
    [(254, 0x77, "not finite"), (255, 0x00, "not finite"), (230, 0x77, "overflows")],
)
@every_target
def test_what_no_type_can_hold_is_refused_as_by_the_codec(
    target: Any, e: int, code: int, why: str
) -> None:
    if target[0] is ROCMFP8 and why == "overflows":
        return  # unweighted, it looks at no error
    codes, scales = np.full((3, 64), 0x21, np.uint8), np.full((3, 4), 120, np.uint8)
    codes[1, 16:32], scales[1, 1] = code, e
    errors = [
        check_refused(
            PayloadValueError,
            lambda run=run: run(codes, scales, target, None),  # type: ignore[misc]
            says=[why, "row 1"],
        )
        for run in (exact, general)
    ]
    assert str(errors[0]) == str(errors[1])


@pytest.mark.usefixtures("fast")
def test_weights_beyond_float32_take_the_general_way() -> None:
    rng = np.random.default_rng(6)
    codes, scales = mixed_codes(rng, 3, 128), np.full((3, 4), 135, np.uint8)
    importance = np.full(128, 1e37, np.float32)
    importance[::3] = 0
    for target in ((ROCMFP3, None), (ROCMFP2, "affine"), (ROCMFP2_MIX, BOOKS[ROCMFP2_MIX])):
        arrays = codes, scales, target, importance
        both = [outcome(encoder, *arrays) for encoder in (exact, general)]
        assert both[0] == both[1]
        assert not served(codes, scales, target, importance)


@pytest.mark.parametrize("value", [-1.0, np.nan, np.inf])
@every_target
def test_bad_importance_is_refused(target: Any, value: float) -> None:
    codes, scales = np.full((2, 64), 0x21, np.uint8), np.full((2, 4), 120, np.uint8)
    importance = np.ones(128, np.float32)
    importance[9] = value
    check_refused(
        PayloadValueError,
        lambda: exact(codes, scales, target, importance),
        says=["importance", f"{value} in column 9"],
    )


@pytest.mark.usefixtures("fast")
def test_importance_in_other_forms() -> None:
    """Zeros may have a sign, rows may lie apart; another type of number is the codec's matter."""
    rng = np.random.default_rng(7)
    codes, scales = mixed_codes(rng, 4, 128), np.full((4, 4), 120, np.uint8)
    importance = importance_of(rng, 128, gaps=False)
    importance[32:64] = -0.0
    apart = np.repeat(importance, 2)[::2]
    for target in ((ROCMFP4, None), (ROCMFP2_MIX, BOOKS[ROCMFP2_MIX])):
        for form in (importance, apart, importance.astype(np.float64)):
            assert check_same(codes, scales, target, form) > 0


def test_arrays_that_do_not_agree_are_refused() -> None:
    codes, scales = np.zeros((2, 64), np.uint8), np.zeros((2, 4), np.uint8)
    out = np.zeros((2, 40), np.uint8)

    def refused(*arrays: Any, kind: TensorType = ROCMFP2) -> None:
        check_refused(
            PayloadSizeError,
            lambda: encode_fp4(arrays[0], arrays[1], kind, "dual", None, arrays[2]),
        )

    refused(codes[:, :32], scales, out)
    refused(codes, scales[:1], out)
    refused(codes, scales.reshape(-1), out)
    refused(codes, scales, out[:, :39])
    refused(codes, scales, np.zeros((2, 80), np.uint8)[:, ::2])
    refused(codes.astype(np.int16), scales, out)
    refused(codes[:, :48], scales[:, :3], out[:, :30])  # 96 columns are no multiple of 128
    assert encode_fp4(codes, scales, ROCMFP2, "dual", None, out) == 0


def test_codings_are_checked_first() -> None:
    arrays = np.zeros((2, 64), np.uint8), np.zeros((2, 4), np.uint8)
    out = np.zeros((2, 40), np.uint8)
    for coding in (None, "", "other"):
        check_refused(CodingError, lambda c=coding: encode_fp4(*arrays, ROCMFP2, c, None, out))  # type: ignore[misc]
    check_refused(CodingError, lambda: encode_fp4(*arrays, ROCMFP2_MIX, None, None, out))
    check_refused(TensorTypeError, lambda: encode_fp4(*arrays, HFP4G32, None, None, out))


@pytest.mark.usefixtures("fast")
def test_no_rows_are_no_work() -> None:
    empty = np.empty((0, 64), np.uint8), np.empty((0, 4), np.uint8)
    for weights in (None, np.ones(128, np.float32)):
        assert exact(*empty, (ROCMFP3, None), weights)[1] == 0


@pytest.mark.usefixtures("fast")
def test_threads_share_tables() -> None:
    """Eight threads begin with no table at all, on rows that need different ones."""
    rng = np.random.default_rng(8)
    codes, scales = mixed_codes(rng, 64, 256), scales_of(rng, (64, 8), 117, 123)
    importance = importance_of(rng, 256, gaps=True)
    jobs = [
        (slice(first, first + 8), target, weights)
        for target in TARGETS
        for weights in (None, importance)
        for first in range(0, 64, 8)
    ]

    def run(job: Any) -> Any:
        rows, target, weights = job
        return exact(codes[rows], scales[rows], target, weights)

    alone = list(map(run, jobs))
    encode.tables_of.cache_clear()
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(run, jobs))
    for (rows, lost), (expected, expected_lost) in zip(together, alone, strict=True):
        same_bits(rows, expected)
        assert lost == expected_lost


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("cpu", ["host", pytest.param("portable", marks=pytest.mark.slow)])
def test_each_cpu_writes_the_same_bytes_within_its_arrays(cpu: str, tmp_path: Path) -> None:
    """The child puts each array right before a page that must not be touched."""
    environment = {n: v for n, v in os.environ.items() if not n.startswith("NUMBA_CPU")}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    if cpu == "portable":  # no instruction that not every CPU of the kind has
        environment |= {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
        environment["NUMBA_CACHE_DIR"] = str(tmp_path)
    child = Path(guarded_child.__file__)
    done = subprocess.run(
        [sys.executable, str(child)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"exit {done.returncode}: {done.stderr}"
    report = json.loads(done.stdout)
    assert report["digest"] == guarded_child.digest(guarded=False)
    assert cpu == "host" or not report["shuffle"]


@pytest.mark.slow
@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    "target", [(ROCMFP2, "dual"), (ROCMFP3, None), (ROCMFP4, None)], ids=name_of
)
def test_ten_million_halves(target: Any, weighted: bool) -> None:
    k, rows, halves = 2048, 512, 0
    for seed in range(200):
        rng = np.random.default_rng([seed, weighted])
        if seed % 3:  # as in a trained model, where nothing is rare
            codes = np.frombuffer(rng.bytes(rows * k // 2), np.uint8).reshape(rows, -1)
            scales = scales_of(rng, (rows, k // 32), 110, 130)
        else:
            codes = mixed_codes(rng, rows, k)
            scales = scales_of(rng, (rows, k // 32), 0, 255)
            codes.reshape(-1, 16)[scales.reshape(-1) >= OVERFLOWS] &= 0x88
        importance = importance_of(rng, k, gaps=seed % 2 == 0) if weighted else None
        check_same(codes, scales, target, importance)
        halves += codes.size // 8
    assert halves >= 10**7
