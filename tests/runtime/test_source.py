"""Tensors from an artifact: what does not fit is refused by name before any large read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
from ds4q.artifact.formats import codec_for
from ds4q.artifact.hfq import Reader
from ds4q.artifact.types import BF16, F32, HFP4G32, Q8F16, ROCMFP2, TIDI32, TYPES, TensorType
from ds4q.runtime import source as source_module
from ds4q.runtime.backend import reference
from ds4q.runtime.backend.cpu import CpuBackend
from ds4q.runtime.errors import BackendTypeError, ModelTensorError
from ds4q.runtime.source import ArtifactSource
from tests.checks import check_refused
from tests.runtime.artifacts import Packed, write

RNG = np.random.default_rng(7)
MATRIX = RNG.standard_normal((6, 64), dtype=np.float32)


def packed(kind: TensorType, values: Any) -> Packed:
    return kind, values.shape, codec_for(kind.id).encode(values)


TENSORS: dict[str, Packed] = {
    "a": packed(BF16, MATRIX),
    "b": packed(F32, MATRIX * 2),
    "c": packed(Q8F16, MATRIX[0]),
    "ids": packed(TIDI32, np.array([[3, 0], [1, 2]])),
}


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., tuple[Path, ArtifactSource]]]:
    """Writes an artifact of the given tensors and opens it."""
    readers = []

    def open_tensors(**tensors: Packed) -> tuple[Path, ArtifactSource]:
        path = write(tmp_path / "m.hfq", {}, TENSORS | tensors)
        readers.append(Reader(path))
        return path, ArtifactSource(readers[-1])

    yield open_tensors
    for reader in readers:
        reader.close()


def test_bytes_arrive_with_fill(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "_PIECE_BYTES", 300)  # several pieces per matrix
    _, source = opened()
    single = source.matrix("a", 6, 64)
    pair = source.matrices({"b": (6, 64), "a": (6, 64)})
    seen: list[tuple[int, int]] = []
    source.fill(lambda done, total: seen.append((done, total)))
    for weight in (single, pair["a"]):
        assert np.array_equal(weight.data, TENSORS["a"][2])
    assert np.array_equal(pair["b"].data, TENSORS["b"][2])
    assert pair["a"].data.base is pair["b"].data.base  # one buffer
    total = 2 * 6 * 64 * 2 + 6 * 64 * 4
    assert seen[-1] == (total, total)
    assert len(seen) > 3
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


def test_small_tensors_are_decoded_at_once(opened: Any) -> None:
    _, source = opened()
    assert np.array_equal(source.values("b", 6, 64), MATRIX * 2)
    assert np.abs(source.values("c", 64) - MATRIX[0]).max() < 0.02  # 8 bits of about 3
    table = source.ids("ids", 2, 2, below=4)
    assert table.dtype == np.int32
    assert table.tolist() == [[3, 0], [1, 2]]


@pytest.mark.parametrize(
    ("call", "kind", "tensor", "says"),
    [
        (lambda s: s.matrix("x", 6, 64), ModelTensorError, "x", ["missing"]),
        (lambda s: s.values("x", 6), ModelTensorError, "x", ["missing"]),
        (lambda s: s.matrix("a", 64, 6), ModelTensorError, "a", ["[64, 6]", "[6, 64]"]),
        (lambda s: s.matrices({"a": (6, 64), "b": (5, 64)}), ModelTensorError, "b", ["[5, 64]"]),
        (lambda s: s.matrix("ids", 2, 2), BackendTypeError, "ids", ["TidI32"]),
        (lambda s: s.values("ids", 2, 2), ModelTensorError, "ids", ["TidI32"]),
        (lambda s: s.ids("a", 6, 64, below=4), ModelTensorError, "a", ["BF16", "TidI32"]),
        (lambda s: s.ids("ids", 2, 2, below=3), ModelTensorError, "ids", ["0..2", "found 3"]),
    ],
)
def test_what_does_not_fit_is_refused(
    opened: Any, call: Any, kind: Any, tensor: str, says: list[str]
) -> None:
    path, source = opened()
    check_refused(kind, lambda: call(source), path=path, tensor=tensor, says=says)


def open_coded(folder: Path, **metadata: Any) -> tuple[Path, Packed]:
    """An artifact of one 107 matrix of ordinary bytes."""
    rows = np.random.default_rng(1).integers(0, 0x7F, ROCMFP2.payload_bytes((6, 128)), np.uint8)
    tensor: Packed = (ROCMFP2, (6, 128), rows)
    return write(folder / "m.hfq", {}, {"d": tensor}, rocmfpx={"spec": 1} | metadata), tensor


@pytest.mark.parametrize("variant", ["dual", "affine", "s40", "sign"])
def test_weights_are_read_as_the_artifact_says(tmp_path: Path, variant: str) -> None:
    path, (kind, shape, payload) = open_coded(tmp_path, variant_107=variant)
    values = codec_for(kind.id, variant).decode(payload, shape)
    with Reader(path) as reader:
        source = ArtifactSource(reader)
        weight = source.matrix("d", *shape)
        assert np.array_equal(source.values("d", *shape), values)
        source.fill(None)
    assert np.array_equal(reference.decode(weight), values)
    assert np.array_equal(CpuBackend(1).linear(weight, np.eye(128, dtype=np.float32)).T, values)


def test_weights_that_nothing_says_how_to_read_are_refused(tmp_path: Path) -> None:
    path, _ = open_coded(tmp_path)
    with Reader(path) as reader:
        opening = lambda: ArtifactSource(reader)  # noqa: E731
        check_refused(CodingError, opening, path=path, tensor="d", says=["variant-missing"])


def test_a_bad_scale_byte_is_refused(tmp_path: Path) -> None:
    path, (kind, shape, payload) = open_coded(tmp_path, variant_107="dual")
    payload[4 * 40 + 18] = 0x7F  # row 4, second block, first half
    write(path, {}, {"d": (kind, shape, payload)}, rocmfpx={"spec": 1, "variant_107": "dual"})
    with Reader(path) as reader:
        source = ArtifactSource(reader)
        source.matrix("d", *shape)
        check_refused(
            PayloadValueError,
            lambda: source.fill(None),
            path=path,
            tensor="d",
            says=["scale-byte", "row 4"],
        )


def test_types_without_a_kernel_are_refused(opened: Any) -> None:
    upstream = TYPES[13]
    payload = np.zeros(upstream.payload_bytes((2, 256)), dtype=np.uint8)
    path, source = opened(d=(upstream, (2, 256), payload))
    refused = lambda: source.matrix("d", 2, 256)  # noqa: E731
    check_refused(BackendTypeError, refused, path=path, tensor="d", says=["MQ4G256"])
    check_refused(TensorTypeError, lambda: source.values("d", 2, 256), path=path, tensor="d")


def test_non_finite_weights_are_refused(opened: Any) -> None:
    bits = TENSORS["a"][2].copy().view("<u2").reshape(6, 64)
    bits[4, 3] = 0x7FC0
    path, source = opened(d=(BF16, (6, 64), bits.reshape(-1).view(np.uint8)))
    source.matrix("d", 6, 64)
    check_refused(PayloadValueError, lambda: source.fill(None), path=path, tensor="d")
    check_refused(PayloadValueError, lambda: source.values("d", 6, 64), path=path, tensor="d")


def test_row_header_of_another_width_is_refused(opened: Any) -> None:
    rows = np.zeros((2, HFP4G32.row_bytes(64)), dtype=np.uint8)
    rows[:, 1] = 0x3C
    rows[:, 4] = 2
    rows[1, 4] = 4  # blocks of another row length: an older type behind the same number
    path, source = opened(d=(HFP4G32, (2, 64), rows.reshape(-1)))
    source.matrix("d", 2, 64)
    check_refused(PayloadValueError, lambda: source.fill(None), path=path, tensor="d")


def test_payload_of_another_length_is_refused(opened: Any, tmp_path: Path) -> None:
    path, _ = opened()
    raw = bytearray(path.read_bytes())
    at = raw.index(b"\x01\x00a") + 3 + 2 + 8 + 4  # name, type and dims, two dims, group size
    raw[at : at + 8] = (int.from_bytes(raw[at : at + 8], "little") - 2).to_bytes(8, "little")
    other = tmp_path / "short.hfq"
    other.write_bytes(raw)
    with Reader(other) as reader:
        source = ArtifactSource(reader)
        check_refused(PayloadSizeError, lambda: source.matrix("a", 6, 64), path=other, tensor="a")
