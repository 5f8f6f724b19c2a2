"""One pass over the payload: every row to every visitor, in order, whatever the threads."""

from __future__ import annotations

import hashlib
import threading
from concurrent.futures import CancelledError
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash

from ds4q.artifact import walk as walk_module
from ds4q.artifact.codings import Codings
from ds4q.artifact.errors import ChangedError, PayloadValueError, TruncatedError
from ds4q.artifact.hfq import Reader, TensorEntry
from ds4q.artifact.receipt import Receipt, TensorRecord
from ds4q.artifact.report import Check, Failure
from ds4q.artifact.types import TYPES
from ds4q.artifact.walk import LegalBytes, ReceiptDigests, Visitor, _Gate, walk
from tests.artifact.build import File, Tensor
from tests.checks import Array


def floats(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    values = np.random.default_rng(seed).standard_normal(shape).astype("<f2")
    return Tensor(name, 1, shape, 0, values.tobytes())


ROW = bytes.fromhex("003c0000020000000000000000000000") + (b"\x7f" + b"\x21" * 16) * 2
TENSORS = (
    floats("a", (200, 40), 1),
    floats("b", (), 2),
    Tensor("c", 21, (70, 64), 32, ROW * 70),
    floats("d", (3, 5, 40), 3),
    Tensor("e", 22, (7,), 0, bytes(28)),
)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few kilobytes are many runs of rows."""
    monkeypatch.setattr(walk_module, "CHUNK_BYTES", 2560)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return File(TENSORS).write(tmp_path)


class Recorder:
    """A visitor that keeps what it sees; ``skip`` names a tensor that it does not want."""

    def __init__(self, skip: str = "") -> None:
        self.check = Check("recorder")
        self.skip = skip
        self.seen: dict[str, list[tuple[int, int, bytes]]] = {}
        self.threads: dict[str, set[int]] = {}

    def begin(self, entry: TensorEntry, rows: int, k: int) -> _Recording | None:
        if entry.name == self.skip:
            return None
        return _Recording(self, entry.name, rows, k)


class _Recording:
    def __init__(self, parent: Recorder, name: str, rows: int, k: int) -> None:
        self.parent, self.name, self.shape = parent, name, (rows, k)
        parent.seen[name] = []
        parent.threads[name] = set()

    def rows(self, first: int, count: int, packed: Array) -> None:
        self.parent.seen[self.name].append((first, count, packed.tobytes()))
        self.parent.threads[self.name].add(threading.get_ident())

    def done(self) -> list[Failure]:
        return [Failure(f"seen {self.shape}", tensor=self.name)]


def run(
    path: Path, *visitors: Visitor, threads: int = 2, sha256: bool = False
) -> tuple[str | None, int]:
    advanced: list[int] = []
    with Reader(path) as reader:
        result = walk(reader, visitors, threads=threads, sha256=sha256, advance=advanced.append)
    return result, sum(advanced)


# ------------------------------------------------------------------ the pass


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_every_row_reaches_every_visitor_in_order(path: Path, threads: int) -> None:
    one, two = Recorder(), Recorder(skip="c")
    result, advanced = run(path, one, two, threads=threads)
    assert result is None
    assert advanced == sum(len(t.payload) for t in TENSORS)
    assert sorted(one.seen) == list("abcde")
    assert sorted(two.seen) == list("abde")
    for tensor in TENSORS:
        runs = one.seen[str(tensor.name)]
        rows = [first for first, _, _ in runs]
        assert rows == sorted(rows)
        assert b"".join(data for _, _, data in runs) == tensor.payload
        assert len(one.threads[str(tensor.name)]) == 1
    firsts = [first for first, _, _ in one.seen["a"]]
    assert firsts == [0, 32, 64, 96, 128, 160, 192]


@pytest.mark.parametrize("threads", [1, 8])
def test_failures_come_in_file_order(path: Path, threads: int) -> None:
    recorder = Recorder(skip="b")
    run(path, recorder, threads=threads)
    assert recorder.check.lines() == [
        "a: seen (200, 40)",
        "c: seen (70, 64)",
        "d: seen (15, 40)",
        "e: seen (1, 7)",
    ]


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("window", [512 << 20, 1])
def test_sha256_of_the_whole_file(
    path: Path, threads: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(walk_module, "WINDOW_BYTES", window)
    result, _ = run(path, Recorder(), threads=threads, sha256=True)
    assert result == hashlib.sha256(path.read_bytes()).hexdigest()


def test_file_without_tensors(tmp_path: Path) -> None:
    path = File([]).write(tmp_path)
    result, advanced = run(path, Recorder(), sha256=True)
    assert (result, advanced) == (hashlib.sha256(path.read_bytes()).hexdigest(), 0)


@pytest.mark.parametrize("sha256", [True, False])
def test_error_of_a_visitor_ends_the_walk(path: Path, sha256: bool) -> None:
    class Broken(Recorder):
        def begin(self, entry: TensorEntry, rows: int, k: int) -> _Recording | None:
            if entry.name == "c":
                raise PayloadValueError("broken", tensor="c")
            return super().begin(entry, rows, k)

    with pytest.raises(PayloadValueError, match="broken"):
        run(path, Broken(), sha256=sha256)


def test_file_cut_during_the_walk(path: Path) -> None:
    class Cutter(Recorder):
        def begin(self, entry: TensorEntry, rows: int, k: int) -> _Recording | None:
            if entry.name == "a":
                with path.open("r+b") as file:
                    file.truncate(5000)
            return super().begin(entry, rows, k)

    with pytest.raises(TruncatedError):
        run(path, Cutter(), threads=1)


def test_file_rewritten_during_the_walk(path: Path) -> None:
    class Writer(Recorder):
        def begin(self, entry: TensorEntry, rows: int, k: int) -> _Recording | None:
            if entry.name == "e":
                path.write_bytes(path.read_bytes() + b"x")
            return super().begin(entry, rows, k)

    with pytest.raises(ChangedError):
        run(path, Writer(), threads=1)


def test_closed_gate_lets_nobody_wait_and_stops_the_hash() -> None:
    gate = _Gate(10**12)
    gate.expect([0, 10**11])
    gate.hashed(1000)
    gate.close()
    gate.begin(10**11)
    with pytest.raises(CancelledError):
        gate.hashed(1)


# ------------------------------------------------------------------ legal bytes


def legal(tmp_path: Path, tensors: tuple[Tensor, ...]) -> list[str]:
    path = File(tensors).write(tmp_path)
    with Reader(path) as reader:
        visitor = LegalBytes(Check("payload"), Codings.of(reader), {})
    run(path, visitor)
    return visitor.check.lines()


def test_legal_payload(tmp_path: Path) -> None:
    assert legal(tmp_path, TENSORS) == []


def test_illegal_bytes_are_placed_in_the_whole_tensor(tmp_path: Path) -> None:
    half = bytearray(TENSORS[0].payload)
    half[2 * (40 * 150 + 7) : 2 * (40 * 150 + 7) + 2] = b"\x00\x7c"
    rows = bytearray(ROW * 70)
    rows[50 * 65 + 16 + 17] = 0xFF
    rows[50 * 69 + 6] = 1
    header = bytearray(ROW * 70)
    header[50 * 68 + 6] = 5
    tensors = (
        replace(TENSORS[0], payload=bytes(half)),
        replace(TENSORS[2], payload=bytes(rows)),
        replace(TENSORS[2], name="d", payload=bytes(header)),
    )
    assert legal(tmp_path, tensors) == [
        "a: value is not finite: found element 6007",
        "c: bad HFP4G32 row header in row 69: expected "
        "003c0000020000000000000000000000, found 003c0000020001000000000000000000",
        "d: bad HFP4G32 row header in row 68: expected "
        "003c0000020000000000000000000000, found 003c0000020005000000000000000000",
    ]
    rows[50 * 69 + 6] = 0
    assert legal(tmp_path, (replace(TENSORS[2], payload=bytes(rows)),)) == [
        "c: NaN scale byte in row 65, block 1: expected E8M0 below 0xff, found 0xff"
    ]


# ------------------------------------------------------------------ the receipt


def receipt_for(path: Path) -> Receipt:
    with Reader(path) as reader:
        records = tuple(
            TensorRecord(
                e.name,
                TYPES[e.type_id].name,
                e.shape,
                e.nbytes,
                xxhash.xxh3_128(reader.read(e.name).tobytes()).hexdigest(),
                (),
            )
            for e in reader.tensors.values()
        )
        digests = reader.index_xxh3, reader.metadata_xxh3
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    size = path.stat().st_size
    front, told = digests
    return Receipt(size, sha256, front, "fp4", "0", "", "", False, (), records, told)


def compared(path: Path, receipt: Receipt) -> list[str]:
    visitor = ReceiptDigests(Check("receipt"), receipt)
    with Reader(path) as reader:
        visitor.compare_front(reader)
        sha256 = walk(reader, [visitor], threads=2, sha256=True, advance=lambda nbytes: None)
    assert sha256 is not None
    visitor.compare_sha256(sha256)
    assert visitor.check.figures["sha256"] == sha256
    return [line.partition(": expected")[0] for line in visitor.check.lines()]


def test_file_that_its_receipt_describes(path: Path) -> None:
    assert compared(path, receipt_for(path)) == []


@pytest.mark.parametrize("tensor", range(len(TENSORS)))
def test_one_changed_payload_bit(path: Path, tensor: int) -> None:
    receipt = receipt_for(path)
    data = bytearray(path.read_bytes())
    at = 4096 + sum(len(t.payload) for t in TENSORS[: tensor + 1]) - 1
    data[at] ^= 0x40
    path.write_bytes(data)
    assert compared(path, receipt) == [
        f"{'abcde'[tensor]}: payload differs from its receipt",
        "SHA-256 of the file differs from the receipt",
    ]


def test_one_changed_padding_bit(path: Path) -> None:
    receipt = receipt_for(path)
    data = bytearray(path.read_bytes())
    data[4000] ^= 1
    path.write_bytes(data)
    (line,) = compared(path, receipt)
    assert line.startswith("SHA-256 of the file differs from the receipt, and all else agrees: ")
    assert "the padding differs" in line


def test_receipt_that_lists_other_tensors(path: Path) -> None:
    receipt = receipt_for(path)
    first, *others = receipt.tensors
    gone = replace(receipt, tensors=tuple(others))
    assert compared(path, gone) == ["a: tensor is not in the receipt"]
    extra = replace(receipt, tensors=(*receipt.tensors, replace(first, name="z")))
    assert compared(path, extra) == ["z: tensor of the receipt is not in the file"]
    other = replace(receipt, tensors=(replace(first, shape=(40, 200)), *others))
    assert compared(path, other) == ["a: type or shape differs from the receipt"]
    other = replace(receipt, tensors=(replace(first, type="BF16"), *others))
    assert compared(path, other) == ["a: type or shape differs from the receipt"]
    other = replace(receipt, file_bytes=1, index_xxh3="0" * 32)
    assert compared(path, other) == [
        "file length differs from the receipt",
        "header or index differs from the receipt",
    ]
