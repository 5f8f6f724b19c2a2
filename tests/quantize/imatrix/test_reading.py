"""What an imatrix says of experts: fallbacks, digests, laziness, and files that change."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from ds4q.quantize.errors import ImatrixError
from ds4q.quantize.imatrix import Imatrix, read_imatrix, reading
from tests.checks import check_refused, same_bits
from tests.quantize.imatrix.files import (
    EXPERTS,
    FINGERPRINT,
    HIDDEN,
    LAYERS,
    METADATA,
    WIDTH,
    dims,
    gguf,
    gguf_tensors,
    own,
    put,
    tensors,
)


def read(path: Path) -> Imatrix:
    return read_imatrix(path, dims=dims(), fingerprint=FINGERPRINT)


@pytest.mark.parametrize("format_", ["own", "gguf"])
def test_an_expert_without_tokens_takes_the_layers_mean(tmp_path: Path, format_: str) -> None:
    raw = own(tensors()) if format_ == "own" else gguf(gguf_tensors())
    imatrix = read(put(tmp_path, raw))
    assert imatrix.unseen == 1
    values = tensors()["layers.0.ffn.experts.gate_up"]
    expected = (20 * values[0] + 25 * values[1] + 15 * values[2]) / 60
    for projection in ("w1", "w3"):
        row = imatrix.importance(0, 3, projection)
        np.testing.assert_allclose(row, expected, rtol=1e-6)
        assert row.any()
    assert imatrix.tokens(0)[3] == 0


def test_a_layer_without_any_tokens_has_no_weights(tmp_path: Path) -> None:
    arrays = gguf_tensors()
    for word in ("gate", "up", "down"):
        for suffix in ("in_sum2", "counts"):
            arrays[f"blk.1.ffn_{word}_exps.weight.{suffix}"][:] = 0
    imatrix = read(put(tmp_path, gguf(arrays)))
    assert imatrix.unseen == 1 + EXPERTS
    same_bits(imatrix.importance(1, 2, "w1"), np.zeros(HIDDEN, np.float32))


@pytest.mark.parametrize("raw", [own(tensors()), gguf(gguf_tensors())])
def test_rows_are_of_one_array_type(tmp_path: Path, raw: bytes) -> None:
    imatrix = read(put(tmp_path, raw))
    for layer, expert in ((0, 0), (0, 3), (1, 0)):
        for projection, columns in (("w1", HIDDEN), ("w2", WIDTH), ("w3", HIDDEN)):
            row = imatrix.importance(layer, expert, projection)
            assert (row.dtype, row.shape) == (np.float32, (columns,))
            assert row.flags.carray  # compiled encoders exist once for such arrays


def test_digest(tmp_path: Path) -> None:
    raw = own(tensors())
    assert read(put(tmp_path, raw)).sha256 == hashlib.sha256(raw).hexdigest()


def test_few_layers_are_kept_and_threads_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_CACHED_LAYERS", 1)
    imatrix = read(put(tmp_path, own(tensors())))
    reads: list[int] = []
    stored = imatrix._read

    def counted(layer: int) -> object:
        reads.append(layer)
        return stored(layer)

    monkeypatch.setattr(imatrix, "_read", counted)
    for expert in range(EXPERTS):
        imatrix.importance(0, expert, "w1")
        imatrix.importance(0, expert, "w2")
    assert reads == [0]
    imatrix.tokens(1)
    imatrix.tokens(0)
    assert reads == [0, 1, 0]
    expected = [imatrix.importance(n % LAYERS, n % EXPERTS, "w1").copy() for n in range(64)]
    with ThreadPoolExecutor(8) as pool:
        found = list(
            pool.map(lambda n: imatrix.importance(n % LAYERS, n % EXPERTS, "w1"), range(64))
        )
    for one, other in zip(found, expected, strict=True):
        same_bits(one, other)


def test_a_file_that_changes_in_use(tmp_path: Path) -> None:
    path = put(tmp_path, own(tensors()))
    imatrix = read(path)
    other = tmp_path / "other"
    other.write_bytes(own(tensors(), METADATA | {"window_tokens": "17"}))
    os.replace(other, path)
    check_refused(ImatrixError, lambda: imatrix.tokens(0), path=path, says=["changed"])
    path.unlink()
    check_refused(ImatrixError, lambda: imatrix.tokens(0), path=path, says=["not there"])


def test_what_is_no_file(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, words in ((tmp_path, "not a regular file"), (pipe, "not a regular file")):
        check_refused(ImatrixError, partial(read, path), path=path, says=[words])
    check_refused(ImatrixError, lambda: read(tmp_path / "none"), says=["not there"])
