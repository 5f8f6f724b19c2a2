"""Experts in files of llama.cpp: means, names and sizes; and the older binary format."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4q.artifact.errors import Ds4qError
from ds4q.quantize.errors import (
    ImatrixError,
    ImatrixMissingError,
    ImatrixModelError,
    ImatrixValueError,
)
from ds4q.quantize.imatrix import Imatrix, read_imatrix
from tests.checks import check_refused, same_bits
from tests.quantize.imatrix import files
from tests.quantize.imatrix.files import dims, gguf, gguf_tensors, legacy, legacy_vectors, put

WORDS = {"w1": "gate", "w2": "down", "w3": "up"}
GATE = "blk.1.ffn_gate_exps.weight"


def read(path: Path, **changes: Any) -> Imatrix:
    return read_imatrix(path, dims=dims(**changes), fingerprint="f" * 64)


def entries(rows: int = 1, calls: int = 4) -> list[tuple[str | bytes, int, Any]]:
    return [(name, calls, values) for name, values in legacy_vectors(rows).items()]


# ---------------------------------------------------------------- GGUF


def test_gguf_means_are_sums_over_counts(tmp_path: Path) -> None:
    imatrix = read(put(tmp_path, gguf(gguf_tensors())))
    assert imatrix.fingerprint is None
    assert len(imatrix.warnings) == 1
    assert "names no checkpoint" in imatrix.warnings[0]
    assert imatrix.unseen == 1
    arrays = gguf_tensors()
    for layer, counts in enumerate(files.COUNTS):
        same_bits(imatrix.tokens(layer), np.array(counts, np.int64))
        same_bits(imatrix.gain(layer), np.ones(files.EXPERTS, np.float32))
        for w, word in WORDS.items():
            sums = arrays[f"blk.{layer}.ffn_{word}_exps.weight.in_sum2"]
            for expert in np.flatnonzero(counts):
                expected = sums[expert] / np.float32(counts[expert])
                same_bits(imatrix.importance(layer, int(expert), w), expected)


def test_gguf_row_that_all_experts_share(tmp_path: Path) -> None:
    imatrix = read(put(tmp_path, gguf(gguf_tensors(shared=True))))
    arrays = gguf_tensors(shared=True)
    name = "blk.1.ffn_down_exps.weight"
    expected = (arrays[f"{name}.in_sum2"] / arrays[f"{name}.counts"])[0]
    for expert in range(files.EXPERTS):
        same_bits(imatrix.importance(1, expert, "w2"), expected)
    same_bits(imatrix.tokens(1), np.ones(files.EXPERTS, np.int64))
    assert imatrix.unseen == 0


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0])
def test_gguf_illegal_sums(tmp_path: Path, value: float) -> None:
    arrays = gguf_tensors()
    arrays[f"{GATE}.in_sum2"][2, 1] = value
    path = put(tmp_path, gguf(arrays))
    check_refused(ImatrixValueError, lambda: read(path), path=path, tensor=GATE, says=["[2, 1]"])


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0, 2.5])
def test_gguf_illegal_counts(tmp_path: Path, value: float) -> None:
    arrays = gguf_tensors()
    arrays[f"{GATE}.counts"][1] = value
    path = put(tmp_path, gguf(arrays))
    check_refused(ImatrixValueError, lambda: read(path), path=path, tensor=f"{GATE}.counts")


def test_gguf_sums_without_tokens(tmp_path: Path) -> None:
    arrays = gguf_tensors()
    arrays[f"{GATE}.counts"][1] = 0
    path = put(tmp_path, gguf(arrays))
    check_refused(ImatrixValueError, lambda: read(path), tensor=GATE, says=["no token", "found 1"])


@pytest.mark.parametrize("changed", [{"experts": 5}, {"d": 16}, {"I": 8}, {"layers": 3}])
def test_gguf_of_another_model(tmp_path: Path, changed: dict[str, int]) -> None:
    path = put(tmp_path, gguf(gguf_tensors()))
    check_refused(ImatrixModelError, lambda: read(path, **changed), path=path)


def test_gguf_lacks_a_projection(tmp_path: Path) -> None:
    arrays = gguf_tensors()
    for suffix in ("in_sum2", "counts"):
        del arrays[f"blk.1.ffn_up_exps.weight.{suffix}"]
    path = put(tmp_path, gguf(arrays))
    check_refused(
        ImatrixMissingError, lambda: read(path), path=path, tensor="blk.1.ffn_up_exps.weight"
    )


def test_gguf_without_experts(tmp_path: Path) -> None:
    arrays = {k: v for k, v in gguf_tensors().items() if "attn" in k}
    path = put(tmp_path, gguf(arrays))
    check_refused(ImatrixMissingError, lambda: read(path), path=path, says=["no routed expert"])


def test_sizes_by_the_file_alone(tmp_path: Path) -> None:
    path = put(tmp_path, gguf(gguf_tensors()))
    sizes = read_imatrix(path, dims=None, fingerprint=None).sizes
    assert (sizes.layers, sizes.experts, sizes.hidden, sizes.width) == (2, 4, 8, 4)
    arrays = gguf_tensors() | {"blk.1.ffn_up_exps.weight.in_sum2": np.ones((4, 4), "<f4")}
    path = put(tmp_path, gguf(arrays))
    check_refused(
        ImatrixModelError,
        lambda: read_imatrix(path, dims=None, fingerprint=None),
        tensor="blk.1.ffn_up_exps.weight",
    )


# ---------------------------------------------------------------- the older format


def test_legacy_vector_that_all_experts_share(tmp_path: Path) -> None:
    others = [("blk.0.attn_kv.weight", 2, np.ones(3, "<f4"))]
    imatrix = read(put(tmp_path, legacy([*others, *entries(calls=4)])))
    assert imatrix.unseen == 0
    assert imatrix.fingerprint is None
    for name, values in legacy_vectors().items():
        layer, word = int(name.split(".")[1]), name.split("_")[1]
        w = next(w for w, other in WORDS.items() if other == word)
        for expert in range(files.EXPERTS):
            same_bits(imatrix.importance(layer, expert, w), values / np.float32(4))
        same_bits(imatrix.tokens(layer), np.ones(files.EXPERTS, np.int64))


def test_legacy_row_for_each_expert(tmp_path: Path) -> None:
    imatrix = read(put(tmp_path, legacy(entries(files.EXPERTS, calls=1))))
    rows = legacy_vectors(files.EXPERTS)["blk.1.ffn_down_exps.weight"].reshape(files.EXPERTS, -1)
    for expert in range(files.EXPERTS):
        same_bits(imatrix.importance(1, expert, "w2"), rows[expert])


def trailer(runs: int, name: bytes) -> bytes:
    return struct.pack("<ii", runs, len(name)) + name


@pytest.mark.parametrize("tail", [trailer(3, b"wiki.txt"), trailer(1, b"")])
def test_legacy_trailer_of_later_versions(tmp_path: Path, tail: bytes) -> None:
    assert read(put(tmp_path, legacy(entries(), tail))).unseen == 0


@pytest.mark.parametrize(
    "tail",
    [
        b"\0",
        bytes(4),
        bytes(8),
        trailer(3, b"wiki.txt") + b"x",
        trailer(3, b"wiki.txt")[:-1],
        trailer(3, b"\n\n"),
        trailer(3, b"\xff"),
    ],
)
def test_legacy_trailing_bytes(tmp_path: Path, tail: bytes) -> None:
    path = put(tmp_path, legacy(entries(), tail))
    check_refused(ImatrixError, lambda: read(path), path=path, says=["after the last entry"])


NAME = "blk.0.ffn_gate_exps.weight"
ONE = [(NAME, 1, np.ones(8, "<f4"))]


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "file ends within the number of entries"),
        (b"abc", "file ends within"),
        (b"# not an imatrix\n", "not an imatrix"),
        (struct.pack("<iI", 0, 1), "not an imatrix"),
        (struct.pack("<iI", 1_000_001, 1), "not an imatrix"),
        (struct.pack("<ii", 1, -1), "length of an entry's name"),
        (struct.pack("<ii", 1, 4097), "length of an entry's name"),
        (legacy([(b"\xff", 1, np.ones(8, "<f4"))]), "not UTF-8"),
        (legacy([(NAME, 0, np.ones(8, "<f4"))]), "calls of"),
        (legacy([(NAME, -5, np.ones(8, "<f4"))]), "calls of"),
        (legacy([(NAME, 1, np.ones(0, "<f4"))]), "length of blk"),
        (legacy(ONE)[:-1], "file ends within the numbers"),
        (legacy(ONE * 2), "appears twice"),
    ],
)
def test_legacy_damaged_files(tmp_path: Path, raw: bytes, words: str) -> None:
    path = put(tmp_path, raw)
    check_refused(ImatrixError, lambda: read(path), path=path, says=[words])


def test_legacy_vector_longer_than_any(tmp_path: Path) -> None:
    raw = bytearray(legacy(ONE))
    at = 4 + 4 + len(NAME) + 4
    raw[at : at + 4] = struct.pack("<i", (1 << 24) + 1)
    path = put(tmp_path, bytes(raw))
    check_refused(ImatrixError, lambda: read(path), path=path, says=["length of blk", "16777216"])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -0.5])
def test_legacy_illegal_numbers_even_of_what_is_not_needed(tmp_path: Path, value: float) -> None:
    other = [("output.weight", 1, np.array([1, value, 1], "<f4"))]
    path = put(tmp_path, legacy([*entries(), *other]))
    check_refused(ImatrixValueError, lambda: read(path), path=path, tensor="output.weight")


@pytest.mark.parametrize("changed", [{"d": 16}, {"I": 8}, {"layers": 1}])
def test_legacy_of_another_model(tmp_path: Path, changed: dict[str, int]) -> None:
    path = put(tmp_path, legacy(entries()))
    check_refused(ImatrixModelError, lambda: read(path, **changed), path=path)


def test_legacy_lacks_a_projection(tmp_path: Path) -> None:
    path = put(tmp_path, legacy(entries()[:-1]))
    check_refused(
        ImatrixMissingError, lambda: read(path), path=path, tensor="blk.1.ffn_down_exps.weight"
    )


@given(at=st.integers(0, len(legacy(entries())) - 1), value=st.integers(0, 255))
def test_any_changed_byte_is_refused_or_changes_a_number(
    tmp_path_factory: pytest.TempPathFactory, at: int, value: int
) -> None:
    raw = bytearray(legacy(entries()))
    raw[at] = value
    path = put(tmp_path_factory.mktemp("changed"), bytes(raw))
    try:
        imatrix = read(path)
    except Ds4qError:
        return
    assert np.isfinite(imatrix.importance(0, 0, "w1")).all()
