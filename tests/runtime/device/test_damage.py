"""Damage and writes to a file: seen while it is loaded and run, resident and paged, CPU and device.

Each way of loading has the same outcome, so they share the tests.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds4q.artifact.errors import ChangedError, Ds4qError, ReceiptError
from ds4q.artifact.hfq import Reader
from ds4q.artifact.receipt import receipt_path
from ds4q.runtime.device import weights as weights_module
from ds4q.runtime.engine import Engine
from ds4q.runtime.errors import DigestError
from ds4q.runtime.experts.options import CacheOptions
from tests.checks import check_refused, same_bits
from tests.runtime.artifacts import put_receipt
from tests.runtime.device.conftest import Load
from tests.runtime.device.micro import CONFIG
from tests.runtime.device.paged import CHOSEN

LONG_AGO_NS = 10**18
PROMPT = list(range(1, 25))  # they choose every expert
EXPERT = "layers.1.ffn.experts.0.w2.weight"
# One of each kind of read: matrices whole and cut into groups, values, ids, both roles of experts.
TENSORS = [
    "embed.weight",
    "norm.weight",
    "layers.0.hc_attn_fn",
    "layers.0.ffn.gate.tid2eid",
    "layers.1.attn.wo_a.weight",
    "layers.1.ffn.gate.bias",
    "layers.1.ffn.shared_experts.w3.weight",
    "layers.0.ffn.experts.3.w1.weight",
    EXPERT,
]

Loads = Callable[..., Any]


@pytest.fixture(params=["cpu", "hip"])
def loads(request: pytest.FixtureRequest, load: Load) -> Loads:
    """Loads an artifact on the CPU or the simulated device; ``slots`` pages."""

    def loads(path: Path, slots: int | None = None, progress: Any = None, **checks: bool) -> Any:
        cache = CacheOptions(slots=slots, **checks)  # type: ignore[arg-type]
        if request.param == "hip":
            return load(path, max_context=64, batch_tokens=8, cache=cache, progress=progress)
        return Engine.load(path, threads=1, cache=cache, progress=progress)

    return loads


@pytest.fixture
def artifact(tmp_path: Path, micro_path: Path) -> Path:
    path = put_receipt(Path(shutil.copy(micro_path, tmp_path / "m.hfq")))
    os.utime(path, ns=(LONG_AGO_NS, LONG_AGO_NS))
    return path


def flip(path: Path, tensor: str) -> None:
    """Another value that the type allows: the lowest bit of the tensor's last element or code."""
    with Reader(path) as reader:
        entry = reader.entry(tensor)
    width = {"layers.0.ffn.gate.tid2eid": 4, "embed.weight": 2}.get(tensor, 1)
    if entry.group_size == 0 and width == 1:
        width = entry.nbytes // int(np.prod(entry.shape))
    with open(path, "r+b") as file:
        file.seek(entry.offset + entry.nbytes - width)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def answer(engine: Any) -> Any:
    return engine.forward(engine.new_state(), PROMPT, "all")


@pytest.mark.parametrize("slots", [None, CHOSEN], ids=["resident", "paged"])
def test_a_flipped_bit_of_any_tensor_is_named(
    artifact: Path, loads: Loads, slots: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_module, "PIECE_BYTES", 1500)  # tensors that come in pieces
    monkeypatch.setattr("ds4q.runtime.source._PIECE_BYTES", 1500)
    sound = artifact.read_bytes()
    with loads(artifact, slots, require_receipt=True) as engine:
        answer(engine)
        assert not engine.notes
    for tensor in TENSORS:
        artifact.write_bytes(sound)
        flip(artifact, tensor)
        error = check_refused(
            DigestError,
            lambda: answer(loads(artifact, slots)),
            path=artifact,
            tensor=tensor,
            says=["expected", "found", "ds4q registry pull"],
        )
        assert error.expected != error.found
        loads(artifact, slots, check_reads=False).close()


@pytest.mark.parametrize("slots", [None, CHOSEN], ids=["resident", "paged"])
def test_a_receipt_that_cannot_be_used_is_an_error(
    artifact: Path, loads: Loads, slots: int | None
) -> None:
    path = receipt_path(artifact)
    sound = path.read_bytes()
    for raw, says in ((sound[:-9], "receipt"), (b"junk", "zstd")):
        path.write_bytes(raw)
        check_refused(ReceiptError, lambda: loads(artifact, slots), path=path, says=[says])
    with open(artifact, "ab") as file:
        file.write(b"more")
    path.write_bytes(sound)
    check_refused(
        ReceiptError, lambda: loads(artifact, slots), says=["another file", "--no-check-reads"]
    )
    loads(artifact, slots, check_reads=False).close()
    path.unlink()
    with loads(artifact, slots) as engine:
        assert [note for note in engine.notes if "no receipt" in note]


@pytest.mark.parametrize("check_reads", [True, False])
def test_a_file_that_is_written_to_while_it_is_loaded(
    artifact: Path, loads: Loads, check_reads: bool
) -> None:
    """Bytes that were read before and bytes that were read behind the write do not belong together.

    So a load fails even where each tensor that it read has its digest.
    """
    with Reader(artifact) as reader:
        unread = reader.payload_end - 1  # of the last tensor by name: read with the others or not

    def progress(done: int, total: int) -> None:
        if done == total:
            with open(artifact, "r+b") as file:
                file.seek(unread)
                file.write(b"\x00")

    check_refused(
        ChangedError,
        lambda: loads(artifact, progress=progress, check_reads=check_reads),
        path=artifact,
        says=["written to"],
    )


@pytest.mark.parametrize("check_reads", [True, False])
def test_a_file_that_is_written_to_while_experts_are_read(
    artifact: Path, loads: Loads, check_reads: bool
) -> None:
    with loads(artifact, CHOSEN, check_reads=check_reads) as engine:
        flip(artifact, EXPERT)
        for _ in range(2):
            with pytest.raises(ChangedError, match="written to"):
                answer(engine)


@pytest.mark.parametrize("slots", [None, CHOSEN], ids=["resident", "paged"])
def test_a_new_file_at_the_path_is_a_note(artifact: Path, loads: Loads, slots: int | None) -> None:
    with loads(artifact, slots) as engine:
        expected = answer(engine)

    def replace(done: int = 0, total: int = 0) -> None:
        if done == total:
            other = artifact.with_name("other")
            other.write_bytes(b"another model")
            other.replace(artifact)

    sound = artifact.read_bytes()
    with loads(artifact, slots, replace) as engine:  # in the middle of the load
        same_bits(answer(engine), expected)
        assert len([note for note in engine.notes if "another file" in note]) == 1
    artifact.write_bytes(sound)
    with loads(artifact, slots) as engine:
        replace()
        same_bits(answer(engine), expected)
        assert len([note for note in engine.notes if "another file" in note]) == (slots is not None)


def test_an_engine_survives_nothing_of_a_failed_load(artifact: Path, loads: Loads) -> None:
    """No file stays open, and a sound file loads behind it."""
    before = set(os.listdir("/proc/self/fd"))
    sound = artifact.read_bytes()
    flip(artifact, "embed.weight")
    with pytest.raises(Ds4qError):
        loads(artifact, CHOSEN)
    assert set(os.listdir("/proc/self/fd")) <= before
    artifact.write_bytes(sound)
    loads(artifact).close()
    assert CONFIG["vocab_size"] == 96
