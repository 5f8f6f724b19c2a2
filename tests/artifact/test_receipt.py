"""Receipts: the same bytes for the same job, strict reading, and finding the one that belongs."""

from __future__ import annotations

import contextlib
import json
import os
import struct
import tracemalloc
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import zstandard

from ds4q.artifact.errors import ReceiptError
from ds4q.artifact.hfq import Reader
from ds4q.artifact.receipt import (
    FORMAT,
    Receipt,
    SourceRecord,
    TensorRecord,
    find_receipt,
    read_receipt,
    receipt_path,
)
from tests.artifact.build import TWO, Tensor, sealed
from tests.checks import check_refused

RECEIPT = Receipt(
    file_bytes=4128,
    sha256="5" * 64,
    index_xxh3="6" * 32,
    recipe="fp4",
    tool_version="0.1.0",
    source_fingerprint="7" * 64,
    source_digest="8" * 64,
    partial=False,
    skipped=(("mtp.0.norm.weight", "draft dropped"),),
    tensors=(
        TensorRecord(
            "layers.0.w1",
            "HFP4G32",
            (2, 64),
            100,
            "a" * 32,
            (
                SourceRecord("layers.0.w1.weight", "I8", (2, 32), "b" * 32),
                SourceRecord("layers.0.w1.scale", "F8_E8M0", (2, 2), "c" * 32),
            ),
            {"tiny_scales": 3},
        ),
        TensorRecord("norm", "F16", (), 2, "d" * 32, (), {"max_error": 0.5}),
    ),
    metadata_xxh3="9" * 32,
)


def pack(text: bytes, **options: Any) -> bytes:
    return zstandard.ZstdCompressor(**{"level": 3, "write_checksum": True} | options).compress(text)


def document() -> dict[str, Any]:
    """The receipt's JSON, as it stands in the file."""
    parsed: dict[str, Any] = json.loads(json.dumps({"format": FORMAT} | asdict(RECEIPT)))
    return parsed


def written(tmp_path: Path, raw: bytes) -> Path:
    path = tmp_path / "x.hfq.receipt"
    path.write_bytes(raw)
    return path


def refused(tmp_path: Path, raw: bytes, *says: str) -> None:
    path = written(tmp_path, raw)
    check_refused(ReceiptError, lambda: read_receipt(path), path=path, says=says)


# ------------------------------------------------------------------ writing


def test_round_trip(tmp_path: Path) -> None:
    assert read_receipt(written(tmp_path, RECEIPT.encode())) == RECEIPT


def test_the_same_job_writes_the_same_bytes() -> None:
    again = replace(RECEIPT, tensors=tuple(replace(t) for t in RECEIPT.tensors))
    assert again.encode() == RECEIPT.encode()
    assert replace(RECEIPT, recipe="fp4-q8").encode() != RECEIPT.encode()


def test_a_receipt_is_canonical_json_in_one_checked_frame() -> None:
    raw = RECEIPT.encode()
    frame = zstandard.get_frame_parameters(raw)
    text = zstandard.ZstdDecompressor().decompress(raw)
    assert frame.has_checksum
    assert frame.content_size == len(text)
    parsed = json.loads(text)
    assert parsed == document()
    assert text == json.dumps(parsed, sort_keys=True, separators=(",", ":")).encode()
    assert sorted(parsed) == [
        "file_bytes",
        "format",
        "imatrix_sha256",
        "index_xxh3",
        "metadata_xxh3",
        "partial",
        "recipe",
        "sha256",
        "skipped",
        "source_digest",
        "source_fingerprint",
        "tensors",
        "tool_version",
    ]


V1, V2 = {"format": "ds4q.receipt.v1"}, {"format": "ds4q.receipt.v2"}
IMATRIX = {"imatrix_sha256": "5" * 64}


@pytest.mark.parametrize(
    ("version", "lacks", "fields"),
    [
        (V1, ("imatrix_sha256", "metadata_xxh3"), {}),
        (V2, ("metadata_xxh3",), IMATRIX),
    ],
)
def test_earlier_versions_are_read(
    version: dict[str, str], lacks: tuple[str, ...], fields: dict[str, Any], tmp_path: Path
) -> None:
    earlier = {k: v for k, v in (document() | version | fields).items() if k not in lacks}
    found = read_receipt(written(tmp_path, pack(json.dumps(earlier).encode())))
    assert found == replace(RECEIPT, metadata_xxh3="", **fields)
    assert "does not cover the metadata" in str(found.metadata_note)
    assert RECEIPT.metadata_note is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (V1 | IMATRIX, "v1 has no imatrix_sha256"),
        (V1, "v1 has no metadata_xxh3"),
        (V2, "v2 has no metadata_xxh3"),
        (V2 | {"metadata_xxh3": ""}, "v2 without imatrix_sha256"),
        ({"metadata_xxh3": ""}, "v3 without metadata_xxh3"),
        ({"metadata_xxh3": "5" * 31}, "wrong kind"),
        ({"imatrix_sha256": "5" * 63}, "wrong kind"),
        ({"imatrix_sha256": 5}, "wrong kind"),
    ],
)
def test_versions_are_not_mixed(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    refused(tmp_path, pack(json.dumps(document() | changes).encode()), says)


# ------------------------------------------------------------------ damage


def test_cut_receipt_is_refused(tmp_path: Path) -> None:
    raw = RECEIPT.encode()
    for length in (*range(0, len(raw) - 8, 9), *range(len(raw) - 8, len(raw))):
        refused(tmp_path, raw[:length], "receipt")


def test_a_cut_receipt_tells_what_is_there_and_what_to_do(tmp_path: Path) -> None:
    """The decoder gives out whole blocks only, so what it has decoded is no measure of the file."""
    raw = RECEIPT.encode()
    size = zstandard.frame_content_size(raw)
    said = f"ends before the {size:,} bytes of text that it states: found {len(raw) - 40:,} bytes"
    refused(tmp_path, raw[:-40], "cut short", said, "copy it again")
    refused(tmp_path, b"", "receipt is empty", "copy it again")
    refused(tmp_path, raw[:5], "not an intact zstd frame", "copy it again")


def test_a_folder_in_place_of_a_receipt_leaves_no_handle_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, honest, handles = tmp_path / "x.hfq.receipt", os.open, []
    path.mkdir()

    def noted(*args: Any, **options: Any) -> int:
        handles.append(honest(*args, **options))
        return handles[-1]

    monkeypatch.setattr(os, "open", noted)
    check_refused(ReceiptError, lambda: read_receipt(path), path=path, says=["a folder"])
    (handle,) = handles
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(handle)


def test_every_changed_byte_is_refused(tmp_path: Path) -> None:
    raw = RECEIPT.encode()
    path = written(tmp_path, raw)
    for at in range(len(raw)):
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 1 << at % 8]) + raw[at + 1 :])
        with contextlib.suppress(ReceiptError):
            assert read_receipt(path) == RECEIPT  # a bit of the frame that says nothing
    path.write_bytes(raw)
    assert read_receipt(path) == RECEIPT


@pytest.mark.parametrize("extra", [b"\0", b"x" * 5000, RECEIPT.encode()], ids=len)
def test_bytes_behind_the_frame(extra: bytes, tmp_path: Path) -> None:
    """python-zstandard stops at the end of the first frame without a word."""
    raw = RECEIPT.encode() + extra
    assert zstandard.ZstdDecompressor().decompress(raw) == zstandard.ZstdDecompressor().decompress(
        RECEIPT.encode()
    )
    refused(tmp_path, raw, "bytes follow the end")


def test_long_receipt_is_read_in_steps(tmp_path: Path) -> None:
    record = RECEIPT.tensors[0]
    many = tuple(
        replace(record, name=f"t{n}", xxh3=f"{n * 0x9E3779B97F4A7C15:032x}"[-32:])
        for n in range(2000)
    )
    big = replace(RECEIPT, tensors=many)
    raw = big.encode()
    assert len(raw) > 5 * 1024
    assert read_receipt(written(tmp_path, raw)) == big
    refused(tmp_path, raw[:-1], "receipt")
    refused(tmp_path, raw + b"x", "bytes follow the end")


def test_frame_that_does_not_state_its_length(tmp_path: Path) -> None:
    text = json.dumps(document()).encode()
    written(tmp_path, pack(text))
    read_receipt(tmp_path / "x.hfq.receipt")
    refused(tmp_path, pack(text, write_content_size=False), "does not state a length")


def test_frame_that_claims_too_much(tmp_path: Path) -> None:
    # Magic, descriptor "8-byte content size, single segment", the size; then one raw block.
    for claim in (2**63, 2**64 - 1, (256 << 20) + 1):
        raw = b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", claim) + b"\x01\x00\x00"
        refused(tmp_path, raw, "does not state a length")


def test_bomb_is_stopped_at_the_length_it_states(tmp_path: Path) -> None:
    # A window of 128 KiB, a stated length of 1 MiB, 4,000 run-length blocks of 128 KiB: 500 MB in
    # 16 KB. Where window and length are equal the library stops by itself; here it does not.
    block = struct.pack("<I", (131072 << 3) | (1 << 1))[:3] + b" "
    raw = b"\x28\xb5\x2f\xfd\x80\x38" + struct.pack("<I", 1 << 20) + block * 4_000
    path = written(tmp_path, raw)
    tracemalloc.start()
    try:
        with pytest.raises(ReceiptError):
            read_receipt(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 128 << 20


def test_an_artifact_given_as_receipt_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "model.hfq"
    with path.open("wb") as file:
        file.write(b"HFQM")
        file.truncate(1 << 40)  # sparse
    check_refused(ReceiptError, lambda: read_receipt(path), path=path, says=["not a zstd frame"])


def test_receipt_longer_than_the_limit(tmp_path: Path) -> None:
    path = written(tmp_path, RECEIPT.encode())
    with path.open("r+b") as file:
        file.truncate((256 << 20) + 1)
    check_refused(ReceiptError, lambda: read_receipt(path), path=path, says=["longer than"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "not JSON"),
        (b"[]", "not a JSON object"),
        (b"{}", "not a receipt of format"),
        (b'{"format":"ds4q.receipt.v4"}', "not a receipt of format ds4q.receipt.v1"),
        (b'{"format":["ds4q.receipt.v3"]}', "not a receipt of format ds4q.receipt.v1"),
        (b'{"format":"ds4q.receipt.v1"}', "lacks a field of Receipt"),
        (b'{"format":1,"format":1}', "a key twice"),
        (b'{"format":"\xff"}', "not UTF-8"),
        (b'{"format":NaN}', "JSON forbids"),
        (b"[" * 100_000, "not JSON"),
    ],
    ids=range(10),
)
def test_text_that_is_no_receipt(text: bytes, words: str, tmp_path: Path) -> None:
    refused(tmp_path, pack(text), words)


# ------------------------------------------------------------------ wrong kinds

LEGAL_KEYS: dict[str, dict[str, Any]] = {
    "": document(),
    "tensors": document()["tensors"][0],
    "sources": document()["tensors"][0]["sources"][0],
}
WRONG: list[Any] = [
    None,
    [],
    {},
    "",
    "x",
    -1,
    1.5,
    True,
    [[]],
    [None],
    {"x": None},
    ["ab"],
    [["a", 1]],
]


def spoil(place: str, key: str, value: object) -> dict[str, Any]:
    """The document with one key replaced, or removed where ``value`` is ``...``."""
    spoiled = document()
    where = spoiled
    if place:
        where = where["tensors"][0]
    if place == "sources":
        where = where["sources"][0]
    where[key] = value
    if value is ...:
        del where[key]
    return spoiled


FITS: dict[str, list[Any]] = {
    "partial": [True],
    "recipe": ["", "x"],
    "tool_version": ["", "x"],
    "source_fingerprint": ["", "x"],
    "source_digest": ["", "x"],
    "imatrix_sha256": [""],
    "name": ["", "x"],
    "dtype": ["", "x"],
    "shape": [[]],
    "events": [{}],
    "skipped": [[]],
    "sources": [[]],
    "tensors": [[]],
}


@pytest.mark.parametrize(("place", "key"), [(p, k) for p, v in LEGAL_KEYS.items() for k in v])
def test_field_of_another_kind(place: str, key: str, tmp_path: Path) -> None:
    for value in [*WRONG, ...]:
        raw = pack(json.dumps(spoil(place, key, value)).encode())
        if any(type(fit) is type(value) and fit == value for fit in FITS.get(key, [])):
            read_receipt(written(tmp_path, raw))
        else:
            refused(tmp_path, raw, "receipt")


@pytest.mark.parametrize("place", LEGAL_KEYS)
def test_field_too_many(place: str, tmp_path: Path) -> None:
    refused(tmp_path, pack(json.dumps(spoil(place, "clock", 1)).encode()), "one too many")


@pytest.mark.parametrize("sha256", ["5" * 63, "5" * 65, "A" * 64, "sha256:" + "5" * 57, "g" * 64])
def test_malformed_digest(sha256: str, tmp_path: Path) -> None:
    refused(tmp_path, pack(json.dumps(spoil("", "sha256", sha256)).encode()), "sha256")


def test_unknown_type_and_tensor_named_twice(tmp_path: Path) -> None:
    first, second = RECEIPT.tensors
    unknown = replace(RECEIPT, tensors=(first, replace(second, type="Q9")))
    path = written(tmp_path, unknown.encode())
    check_refused(ReceiptError, lambda: read_receipt(path), path=path, tensor="norm", says=["Q9"])
    path = written(tmp_path, replace(RECEIPT, tensors=(first, first)).encode())
    check_refused(
        ReceiptError, lambda: read_receipt(path), path=path, tensor=first.name, says=["twice"]
    )


# ------------------------------------------------------------------ the receipt that belongs

OURS = {"source_digest": "8" * 64}


def artifact(tmp_path: Path, name: str = "x.hfq", digest: str = "8" * 64) -> Path:
    path = tmp_path / name
    path.write_bytes(sealed(TWO, ours={"source_digest": digest}))
    return path


def receipt_of(path: Path) -> Receipt:
    with Reader(path) as reader:
        return replace(
            RECEIPT,
            file_bytes=reader.file_bytes,
            index_xxh3=reader.index_xxh3,
            metadata_xxh3=reader.metadata_xxh3,
            source_digest=reader.metadata["ds4q"]["source_digest"],
        )


def found(path: Path, explicit: Path | None = None) -> str | None:
    with Reader(path) as reader:
        pair = find_receipt(reader, explicit)
    return None if pair is None else pair[0].name


def test_by_name(tmp_path: Path) -> None:
    path = artifact(tmp_path)
    assert found(path) is None
    receipt_path(path).write_bytes(RECEIPT.encode())  # not judged here: verify compares it
    assert found(path) == "x.hfq.receipt"


def test_by_name_but_broken(tmp_path: Path) -> None:
    path = artifact(tmp_path)
    receipt_path(path).write_bytes(b"")
    check_refused(ReceiptError, lambda: found(path), path=receipt_path(path))


def test_explicit_comes_first(tmp_path: Path) -> None:
    path = artifact(tmp_path)
    receipt_path(path).write_bytes(b"broken")
    other = tmp_path / "other"
    other.write_bytes(RECEIPT.encode())
    assert found(path, other) == "other"
    with pytest.raises(FileNotFoundError):
        found(path, tmp_path / "none")


def test_renamed_artifact_is_known_by_size_and_digests(tmp_path: Path) -> None:
    path = artifact(tmp_path)
    receipt_path(path).write_bytes(receipt_of(path).encode())
    renamed = path.rename(tmp_path / "renamed.hfq")
    assert found(renamed) == "x.hfq.receipt"


@pytest.mark.parametrize("length", [247, 248, 255])
def test_a_receipt_whose_name_cannot_be_is_looked_for_under_others(
    length: int, tmp_path: Path
) -> None:
    path = artifact(tmp_path)
    renamed = path.rename(tmp_path / f"{'x' * (length - 4)}.hfq")
    assert found(renamed) is None
    (tmp_path / "x.receipt").write_bytes(receipt_of(renamed).encode())
    assert found(renamed) == "x.receipt"


def test_renamed_and_damaged_artifact_still_finds_its_receipt(tmp_path: Path) -> None:
    path = artifact(tmp_path)
    receipt_path(path).write_bytes(receipt_of(path).encode())
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    renamed = tmp_path / "renamed.hfq"
    renamed.write_bytes(data)
    assert found(renamed) == "x.hfq.receipt"


def test_renamed_artifact_does_not_take_the_receipt_of_a_sister_model(tmp_path: Path) -> None:
    """Two fine-tunes of one architecture have equal length, header and index."""
    one, two = artifact(tmp_path, "one.hfq"), artifact(tmp_path, "two.hfq", "9" * 64)
    assert receipt_of(one).index_xxh3 == receipt_of(two).index_xxh3
    receipt_path(one).write_bytes(receipt_of(one).encode())
    renamed = two.rename(tmp_path / "three.hfq")
    assert found(renamed) is None
    receipt_path(two).write_bytes(receipt_of(renamed).encode())
    assert found(renamed) == "two.hfq.receipt"


@pytest.mark.parametrize(
    "changes",
    [{"file_bytes": 1}, {"index_xxh3": "0" * 32}, {"source_digest": "0" * 64}],
    ids=lambda c: next(iter(c)),
)
def test_receipt_that_does_not_belong(changes: dict[str, Any], tmp_path: Path) -> None:
    path = artifact(tmp_path)
    receipt = receipt_of(path)
    (tmp_path / "other.receipt").write_bytes(replace(receipt, **changes).encode())
    assert found(path) is None


def test_copies_and_strangers_in_the_folder(tmp_path: Path) -> None:
    path = artifact(tmp_path)
    for name in ("b.receipt", "c.receipt"):
        (tmp_path / name).write_bytes(receipt_of(path).encode())
    (tmp_path / "a.receipt").write_bytes(b"a shopping receipt")
    (tmp_path / "aa.receipt").mkdir()
    assert found(path) == "b.receipt"


def test_artifact_of_another_tool(tmp_path: Path) -> None:
    path = tmp_path / "x.hfq"
    path.write_bytes(sealed([Tensor()]))
    other = artifact(tmp_path, "other.hfq")
    receipt_path(other).write_bytes(receipt_of(other).encode())
    assert found(path) is None


def test_a_pipe_in_place_of_a_receipt_is_refused_at_once(tmp_path: Path) -> None:
    path = artifact(tmp_path)
    os.mkfifo(tmp_path / "pipe.receipt")
    assert found(path) is None
    with pytest.raises(ReceiptError, match="not a regular file"):
        read_receipt(tmp_path / "pipe.receipt")
