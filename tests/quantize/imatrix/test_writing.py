"""Writing an imatrix: the same bytes each time, and nothing else in the way is lost."""

from __future__ import annotations

import hashlib
import json
import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import xxhash

from ds4q.artifact.locks import LockedError, WriteError
from ds4q.artifact.writer import PartialFile
from ds4q.quantize.imatrix import LayerStatistics, claim_place, read_imatrix, write_imatrix
from ds4q.quantize.imatrix.writing import ImatrixPlaceError
from tests.checks import check_refused, same_bits
from tests.quantize.imatrix.files import FINGERPRINT, TEXT, TOTAL, dims, own, tensors


def layers() -> list[LayerStatistics]:
    arrays, parts = tensors(), ("tokens", "gain", "gate_up", "down")
    return [
        LayerStatistics(*(arrays[f"layers.{layer}.ffn.experts.{part}"] for part in parts))
        for layer in (0, 1)
    ]


def write(path: Path, *, force: bool = False) -> str:
    return write_imatrix(
        path,
        layers(),
        fingerprint=FINGERPRINT,
        total_tokens=TOTAL,
        window_tokens=16,
        texts=[TEXT, FINGERPRINT],
        force=force,
    )


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "a.imatrix"
    sha256 = write(path)
    assert sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    imatrix = read_imatrix(path, dims=dims(), fingerprint=FINGERPRINT)
    assert imatrix.sha256 == sha256
    for number, layer in enumerate(layers()):
        same_bits(imatrix.tokens(number), layer.tokens)
        same_bits(imatrix.gain(number), layer.gain)
        same_bits(imatrix.importance(number, 1, "w1"), layer.gate_up[1])
        same_bits(imatrix.importance(number, 2, "w2"), layer.down[2])
    assert list(tmp_path.iterdir()) == [path]


def test_bytes_are_the_same_each_time_and_safetensors(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    assert write(first) == write(second)
    raw = first.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    assert end % 8 == 0
    header = json.loads(raw[8:end])
    assert header.pop("__metadata__") == {
        "format": "ds4q.imatrix.v1",
        "source_fingerprint": FINGERPRINT,
        "tensors_xxh3": xxhash.xxh3_128_hexdigest(raw[end:]),
        "texts": json.dumps([TEXT, FINGERPRINT], separators=(",", ":")),
        "tokens": "30",
        "window_tokens": "16",
    }
    assert header.keys() == tensors().keys()
    for name, values in tensors().items():
        start, stop = header[name]["data_offsets"]
        same_bits(np.frombuffer(raw[end + start : end + stop], values.dtype), values.reshape(-1))


def test_an_imatrix_of_ours_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.imatrix"
    sha256 = write(path)
    damaged = path.read_bytes()[:-1]
    path.write_bytes(damaged)
    assert write(path) == sha256 != hashlib.sha256(damaged).hexdigest()


@pytest.mark.parametrize("content", [b"", b"GGUF precious", own(tensors())[:8] + b'{"a":1}'])
def test_another_file_is_kept_unless_forced(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    check_refused(ImatrixPlaceError, lambda: write(path), path=path, says=["--force"])
    assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]
    write(path, force=True)
    assert read_imatrix(path, dims=None, fingerprint=None).unseen == 1


@pytest.mark.parametrize("force", [False, True])
def test_an_artifact_is_kept(force: bool, tmp_path: Path) -> None:
    path = tmp_path / "model.hfq"
    path.write_bytes(b"HFQM precious")
    check_refused(ImatrixPlaceError, lambda: write(path, force=force), path=path, says=["artifact"])
    assert path.read_bytes() == b"HFQM precious"


@pytest.mark.parametrize("force", [False, True])
def test_places_that_hold_no_file(tmp_path: Path, force: bool) -> None:
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to("nowhere")
    os.mkfifo(pipe)
    for path in (tmp_path, link, pipe):
        check_refused(
            ImatrixPlaceError,
            partial(claim_place, path, force=force),
            path=path,
            says=["a folder, a device or a link"],
        )
    check_refused(
        ImatrixPlaceError,
        lambda: claim_place(tmp_path / "none" / "a.imatrix", force=force),
        path=tmp_path / "none",
        says=["does not exist"],
    )


def test_a_failure_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.imatrix"
    path.write_bytes(own(tensors()))
    before = path.read_bytes()

    def fail(self: PartialFile) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(PartialFile, "sync", fail)
    with pytest.raises(WriteError, match=f"{path}: cannot be written: No space left"):
        write(path, force=True)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_two_writers(tmp_path: Path) -> None:
    path = tmp_path / "a.imatrix"
    other = PartialFile(path, 1)
    try:
        check_refused(LockedError, lambda: write(path), path=other.path)
    finally:
        other.discard()
    write(path)
