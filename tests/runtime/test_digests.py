"""Digests of a receipt: only where it is this very file's, and said once where it is not."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import xxhash

from ds4q.artifact.errors import ReceiptError
from ds4q.artifact.hfq import Reader, TensorEntry
from ds4q.artifact.receipt import Receipt, TensorRecord, receipt_path
from ds4q.artifact.types import TYPES
from ds4q.runtime import digests as digests_module
from ds4q.runtime.digests import Digests
from ds4q.runtime.errors import DigestError
from tests.artifact.build import TWO, Tensor, sealed
from tests.checks import check_refused

OURS = {
    "recipe": "fp4",
    "tool_version": "0.1.0",
    "source_fingerprint": "7" * 64,
    "source_digest": "8" * 64,
    "partial": False,
}


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    path = tmp_path / "m.hfq"
    path.write_bytes(sealed(TWO, ours=dict(OURS)))
    return path


def receipt_of(path: Path) -> Receipt:
    with Reader(path) as reader:
        return Receipt(
            file_bytes=reader.file_bytes,
            sha256="5" * 64,
            index_xxh3=reader.index_xxh3,
            metadata_xxh3=reader.metadata_xxh3,
            skipped=(),
            tensors=tuple(
                TensorRecord(
                    name,
                    TYPES[entry.type_id].name,
                    entry.shape,
                    entry.nbytes,
                    xxhash.xxh3_128(reader.read(name).data).hexdigest(),
                    (),
                )
                for name, entry in reader.tensors.items()
            ),
            **OURS,  # type: ignore[arg-type]
        )


def put(path: Path, receipt: Receipt) -> None:
    receipt_path(path).write_bytes(receipt.encode())


def test_the_receipt_of_this_file(artifact: Path) -> None:
    put(artifact, receipt_of(artifact))
    notes: list[str] = []
    with Reader(artifact) as reader:
        digests = Digests.of(reader, notes, require=True)
        for name, entry in reader.tensors.items():
            payload = reader.read(name)
            assert digests.check(entry, payload)
            for at in (0, len(payload) - 1):
                altered = payload.copy()
                altered[at] ^= 1
                check_refused(
                    DigestError,
                    lambda entry=entry, altered=altered: digests.check(entry, altered),  # type: ignore[misc]
                    path=artifact,
                    tensor=name,
                    says=["differ from the receipt"],
                )
        check_refused(
            DigestError,
            lambda: digests.check(reader.entry("a.weight"), np.zeros(0, np.uint8)),
            tensor="a.weight",
        )
    assert notes == []


def refused(artifact: Path, *says: str) -> None:
    """A receipt that cannot be used is an error, required or not."""
    notes: list[str] = []
    with Reader(artifact) as reader:
        check_refused(ReceiptError, lambda: Digests.of(reader, notes, require=True), says=says)
        digests = Digests.of(reader, notes)
        digests.wait()
        entry = reader.entry("b.weight")
        payload = reader.read("b.weight")
        check_refused(ReceiptError, lambda: digests.check(entry, payload), says=says)
        check_refused(ReceiptError, lambda: digests.add(entry, 0, payload), says=says)
        check_refused(ReceiptError, digests.finish, says=says)
    assert notes == []


def test_no_receipt_is_a_note(artifact: Path) -> None:
    notes: list[str] = []
    with Reader(artifact) as reader:
        digests = Digests.of(reader, notes)
        for entry in reader.tensors.values():
            payload = reader.read(entry.name)
            assert not digests.check(entry, payload)
            digests.add(entry, 0, payload)
        digests.finish()
        assert digests.settle() is None
        (note,) = notes
        assert note.startswith(f"{artifact}: no receipt")
        check_refused(
            ReceiptError,
            lambda: Digests.of(reader, notes, require=True),
            path=artifact,
            says=["no receipt", "--require-receipt"],
        )
    assert len(notes) == 1


@pytest.mark.parametrize("early", [True, False], ids=["before the receipt", "behind the receipt"])
@pytest.mark.parametrize("damaged", [False, True], ids=["sound", "damaged"])
def test_pieces_in_any_order_from_any_thread(artifact: Path, damaged: bool, early: bool) -> None:
    payload = np.random.default_rng(7).integers(0, 256, 10_000, np.uint8)
    entry = TensorEntry("t", 1, (5000,), 0, payload.nbytes, 0)
    known = {"t": xxhash.xxh3_128(payload.data).digest()}
    if damaged:
        payload[7777] ^= 4
    parsed = threading.Event()

    def look_up() -> dict[str, bytes]:
        assert parsed.wait(300)
        return known

    digests = Digests(look_up, artifact, [])
    if not early:
        parsed.set()
        digests.settle()
    cuts = [*range(0, payload.nbytes, 321), payload.nbytes]
    spans = [(a, payload[a:b]) for a, b in pairwise(cuts)]
    order = np.random.default_rng(8).permutation(len(spans)).tolist()
    errors: list[DigestError] = []

    def add(number: int) -> None:
        try:
            digests.add(entry, *spans[number])
        except DigestError as error:
            errors.append(error)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(add, order))
    parsed.set()
    if damaged and early:
        assert errors == []
        check_refused(DigestError, digests.finish, path=artifact, tensor="t", says=["expected"])
        return
    digests.finish()
    assert len(errors) == damaged
    if damaged:
        assert errors[0].expected == known["t"].hex()
        assert errors[0].found == xxhash.xxh3_128(payload.data).hexdigest()


def test_a_tensor_of_which_a_piece_is_lost(artifact: Path) -> None:
    digests = Digests(lambda: {"t": b""}, artifact, [])
    digests.add(TensorEntry("t", 1, (2,), 0, 4, 0), 2, np.zeros(2, np.uint8))
    with pytest.raises(RuntimeError, match="only a part of t"):
        digests.finish()


def test_what_is_no_receipt(artifact: Path) -> None:
    receipt_path(artifact).write_bytes(b"garbage")
    refused(artifact, "not a zstd frame", "put the receipt of this very file beside it")
    refused(artifact, "--no-check-reads")
    receipt_path(artifact).unlink()
    receipt_path(artifact).mkdir()
    refused(artifact, "not a regular file", "put the receipt of this very file beside it")
    receipt_path(artifact).rmdir()
    receipt_path(artifact).write_bytes(b"")
    refused(artifact, "receipt is empty", "copy it again")  # which knows better


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"file_bytes": 1}, "file length"),
        ({"index_xxh3": "0" * 32}, "header or index"),
        ({"source_digest": "0" * 64}, "source_digest"),
        ({"source_fingerprint": "0" * 64}, "source_fingerprint"),
        ({"recipe": "mix"}, "recipe"),
        ({"tensors": ()}, "lacks a tensor"),
    ],
    ids=["length", "front", "source", "fingerprint", "recipe", "tensors"],
)
def test_a_receipt_of_another_file(artifact: Path, change: dict[str, object], says: str) -> None:
    """Right in every digest that it has, but not of this file: nothing is compared with it."""
    receipt = receipt_of(artifact)
    put(artifact, receipt)
    with Reader(artifact) as reader:
        assert Digests.of(reader, [], require=True).settle()  # the twin that belongs
    put(artifact, replace(receipt, **change))  # type: ignore[arg-type]
    refused(artifact, says, str(artifact))


def test_an_artifact_that_grew_a_tensor(artifact: Path) -> None:
    """The old receipt beside a new file of the same name."""
    put(artifact, receipt_of(artifact))
    more = (*TWO, Tensor("c.weight"))
    artifact.write_bytes(sealed(more, ours=dict(OURS)))
    refused(artifact, "belongs to another file")


def test_a_receipt_that_cannot_be_read(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(reader: Reader) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(digests_module, "find_receipt", fails)
    refused(artifact, "cannot be read", "Permission denied", str(receipt_path(artifact)))


def test_a_load_need_not_wait_for_the_receipt(artifact: Path) -> None:
    """It is parsed meanwhile; the first read waits, and so do others."""
    put(artifact, receipt_of(artifact))
    parsed, waiting = threading.Event(), threading.Semaphore(0)

    def slowly() -> dict[str, bytes]:
        assert parsed.wait(300)
        with Reader(artifact) as reader:
            return {
                name: xxhash.xxh3_128(reader.read(name).data).digest() for name in reader.tensors
            }

    digests, results = Digests(slowly, artifact, []), []
    with Reader(artifact) as reader:
        entry, payload = reader.entry("b.weight"), reader.read("b.weight")

        def check() -> None:
            waiting.release()
            results.append(digests.check(entry, payload))

        threads = [threading.Thread(target=check) for _ in range(3)]
        for thread in threads:
            thread.start()
            assert waiting.acquire(timeout=300)
        assert results == []
        parsed.set()
        for thread in threads:
            thread.join(300)
    assert results == [True] * 3


def test_another_error_is_no_missing_receipt(artifact: Path) -> None:
    def broken() -> dict[str, bytes]:
        raise ZeroDivisionError

    notes: list[str] = []
    digests = Digests(broken, artifact, notes)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            digests.settle()
    assert notes == []
