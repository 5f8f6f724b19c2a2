"""The GGUF reader of an imatrix: where the numbers lie, and every way to lie about it."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4q.artifact.errors import Ds4qError
from ds4q.quantize.errors import ImatrixError, ImatrixMissingError
from ds4q.quantize.imatrix import read_imatrix
from ds4q.quantize.imatrix.gguf import Vectors, read_gguf
from tests.checks import check_refused
from tests.quantize.imatrix.files import (
    EXPERTS,
    HIDDEN,
    KEYS,
    dims,
    gguf,
    gguf_tensors,
    key,
    put,
    text,
)

GATE = "blk.0.ffn_gate_exps.weight"


def read(path: Path) -> dict[str, Vectors]:
    with path.open("rb") as file:
        return read_gguf(file, path.stat().st_size, path)


@pytest.mark.parametrize("alignment", [32, 64, 8])
def test_places(tmp_path: Path, alignment: int) -> None:
    keys = [*KEYS, key("general.alignment", 4, struct.pack("<I", alignment))]
    arrays = gguf_tensors()
    raw = gguf(arrays, keys, alignment=alignment)
    found = read(put(tmp_path, raw))
    assert len(found) == len(arrays) // 2
    for name, place in found.items():
        sums, counts = arrays[f"{name}.in_sum2"], arrays[f"{name}.counts"]
        assert (place.rows, place.columns) == sums.shape
        assert raw[place.sums_at :].startswith(sums.tobytes())
        assert place.counts_at is not None
        assert raw[place.counts_at :].startswith(counts.tobytes())
    assert found[GATE].rows == EXPERTS
    assert found[GATE].columns == HIDDEN


def test_one_dimension_and_further_ones(tmp_path: Path) -> None:
    arrays = {
        "a.in_sum2": np.ones(8, "<f4"),
        "a.counts": np.ones(1, "<f4"),
        "b.in_sum2": np.ones((1, 1, 3, 8), "<f4"),
        "b.counts": np.ones(3, "<f4"),
    }
    found = read(put(tmp_path, gguf(arrays)))
    assert {name: (v.rows, v.columns) for name, v in found.items()} == {"a": (1, 8), "b": (3, 8)}


def test_the_last_padding_may_be_absent(tmp_path: Path) -> None:
    arrays = gguf_tensors()
    last = list(arrays.values())[-1].nbytes
    raw = gguf(arrays)
    bare = raw[: len(raw) - (-last % 32)]
    assert read(put(tmp_path, bare)) == read(put(tmp_path, raw))
    for wrong in (bare[:-1], bare + b"\0", raw + b"\0"):
        path = put(tmp_path, wrong)
        check_refused(ImatrixError, partial(read, path), path=path)


def keys_with(name: str, kind: int, value: bytes) -> bytes:
    return gguf(gguf_tensors(), [*KEYS, key(name, kind, value)])


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (gguf(gguf_tensors(), version=2), "GGUF version"),
        (gguf(gguf_tensors(), KEYS[1:]), "general.type 'imatrix'"),
        (gguf({}, [key("general.type", 8, text("model"))]), "no imatrix"),
        (gguf(gguf_tensors(), [*KEYS, KEYS[0]]), "key appears twice"),
        (gguf(gguf_tensors(), kind=1), "not F32"),
        (gguf(gguf_tensors(), alignment=64), "not F32, or not where"),
        (keys_with("x", 13, b""), "unknown type"),
        (keys_with("x", 9, struct.pack("<IQ", 9, 0)), "unknown type"),
        (keys_with("x", 9, struct.pack("<IQ", 8, 1 << 62)), "number of items"),
        (keys_with("x", 8, struct.pack("<Q", 1 << 62)), "length of metadata key x"),
        (keys_with("x", 8, text(b"\xff")), "not UTF-8"),
        (keys_with("", 4, bytes(4)), "length of a metadata key"),
        (keys_with("general.alignment", 4, bytes(4)), "general.alignment"),
        (keys_with("general.alignment", 8, text("32")), "general.alignment"),
        (gguf(gguf_tensors(), tail=b"\0" * 32), "after the last tensor"),
        (gguf(gguf_tensors())[:-200], "too short"),
        (gguf(gguf_tensors())[:60], "file ends within"),
        (b"GGUF", "file ends within"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 40, 0), "number of tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 40), "number of metadata keys"),
    ],
)
def test_damaged_files(tmp_path: Path, raw: bytes, words: str) -> None:
    path = put(tmp_path, raw)
    check_refused(ImatrixError, lambda: read(path), path=path, says=[words])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda raw: raw.replace(b"blk.0.ffn_up", b"blk.0.ffn_gq").replace(b"gq", b"up"), None),
        (lambda raw: raw.replace(b"blk.1.ffn_gate", b"blk.0.ffn_gate"), "appears twice"),
        (lambda raw: dimension(raw, 0), "dimension of"),
        (lambda raw: dimension(raw, 1 << 50), "dimension of"),
        (lambda raw: dimension(raw, 1 << 30), "not where"),
    ],
)
def test_damaged_tensors(
    tmp_path: Path, change: Callable[[bytes], bytes], words: str | None
) -> None:
    path = put(tmp_path, change(gguf(gguf_tensors())))
    if words is None:
        assert GATE in read(path)
    else:
        check_refused(ImatrixError, lambda: read(path), path=path, says=[words])


def dimension(raw: bytes, size: int) -> bytes:
    """The first dimension of the first tensor replaced."""
    at = raw.index(f"{GATE}.in_sum2".encode()) + len(f"{GATE}.in_sum2") + 4
    return raw[:at] + struct.pack("<Q", size) + raw[at + 8 :]


def test_sums_need_their_counts(tmp_path: Path) -> None:
    arrays = gguf_tensors()
    del arrays[f"{GATE}.counts"]
    path = put(tmp_path, gguf(arrays))
    check_refused(ImatrixMissingError, lambda: read(path), path=path, tensor=f"{GATE}.counts")
    path = put(tmp_path, gguf(gguf_tensors() | {f"{GATE}.counts": np.ones((3, 1), "<f4")}))
    check_refused(ImatrixError, lambda: read(path), tensor=GATE, says=["do not fit"])
    path = put(tmp_path, gguf(gguf_tensors() | {f"{GATE}.in_sum2": np.ones((2, 2, 8), "<f4")}))
    check_refused(ImatrixError, lambda: read(path), tensor=GATE, says=["do not fit"])


@given(at=st.integers(0, len(gguf(gguf_tensors())) - 1), value=st.integers(0, 255))
def test_any_changed_byte_is_refused_or_changes_a_number(
    tmp_path_factory: pytest.TempPathFactory, at: int, value: int
) -> None:
    raw = bytearray(gguf(gguf_tensors()))
    raw[at] = value
    path = put(tmp_path_factory.mktemp("changed"), bytes(raw))
    try:
        imatrix = read_imatrix(path, dims=dims(), fingerprint=None)
    except Ds4qError:
        return
    assert np.isfinite(imatrix.importance(0, 0, "w1")).all()
    assert imatrix.sizes.layers == 2
