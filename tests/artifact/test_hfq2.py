"""Version 2's own parts: the metadata tail and the hash over index and payload."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import xxhash

from ds4q.api import verify
from ds4q.artifact.errors import ArtifactError, MetadataError
from ds4q.artifact.hfq import Reader
from ds4q.artifact.hfq2 import (
    HASH_SCOPES,
    check_quantization_hash,
    declares_hash,
    quantization_hash,
)
from ds4q.artifact.report import Check
from tests.artifact.build import File, Tensor
from tests.artifact.test_hfq import A_WEIGHT, N_WEIGHT
from tests.checks import check_refused

SCOPE = "hfq_v2_index_offsets_and_payload"
OLD_SCOPE = "hfq_tensor_index_and_payload_v1"
WORKED_HASH = "e097a4eade7a4a8d"
TENSORS = (N_WEIGHT, A_WEIGHT)
FULL = {"config": {"model_type": "deepseek_v4"}, "tokenizer": "{}"}


def declaration(value: str = WORKED_HASH, **changes: Any) -> dict[str, Any]:
    counted = {"tensor_count": 2, "payload_bytes": 312}
    fixed = {"algorithm": "xxh64", "seed": 0, "scope": SCOPE, "value": value}
    return fixed | counted | {"producer": "test"} | changes


def with_hash(tmp_path: Path, declared: object, *, version: int = 2, **changes: Any) -> Path:
    front = json.dumps({"config": {}, "quantization_hash": declared}).encode()
    return File(TENSORS, metadata=front, version=version, **changes).write(tmp_path)


def run(path: Path) -> Check:
    check = Check("quantization-hash")
    with Reader(path) as reader:
        assert declares_hash(reader)
        check_quantization_hash(reader, check)
    return check


# ------------------------------------------------------------------ the hash


def test_preamble_of_the_worked_hash() -> None:
    text, _ = HASH_SCOPES[SCOPE]
    assert xxhash.xxh64(text, seed=0).hexdigest() == "2fda375186dd1265"


def test_worked_hash(tmp_path: Path) -> None:
    with Reader(File(TENSORS, version=2).write(tmp_path)) as reader:
        assert not declares_hash(reader)
        assert quantization_hash(reader, SCOPE) == WORKED_HASH
        assert quantization_hash(reader, OLD_SCOPE) != WORKED_HASH


def test_declared_hash_is_confirmed(tmp_path: Path) -> None:
    # The declaration lengthens the metadata, which moves no payload: data_offset stays 4096.
    check = run(with_hash(tmp_path, declaration()))
    assert check.ok
    assert check.figures == {"xxh64": WORKED_HASH}


def test_old_scope_does_not_cover_offsets(tmp_path: Path) -> None:
    with Reader(File(TENSORS, version=1).write(tmp_path)) as reader:
        value = quantization_hash(reader, OLD_SCOPE)
    for version in (1, 2):
        path = with_hash(tmp_path, declaration(value, scope=OLD_SCOPE), version=version)
        assert run(path).ok


@pytest.mark.parametrize("at", [4096, 4103, 4128, 4431])
def test_changed_payload_byte(at: int, tmp_path: Path) -> None:
    path = with_hash(tmp_path, declaration())
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    check = run(path)
    assert [f.message for f in check.failures] == ["quantization hash differs"]
    assert check.failures[0].expected == WORKED_HASH


def test_changed_gap_byte_is_not_covered(tmp_path: Path) -> None:
    path = with_hash(tmp_path, declaration())
    data = bytearray(path.read_bytes())
    data[4110] = 1
    path.write_bytes(data)
    assert run(path).ok


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"value": "0" * 16}, "quantization hash differs"),
        ({"value": None}, "quantization hash differs"),
        ({"algorithm": "sha256"}, "quantization hash differs"),
        ({"seed": 1}, "quantization hash differs"),
        ({"tensor_count": 3}, "quantization_hash.tensor_count"),
        ({"payload_bytes": 311}, "quantization_hash.payload_bytes"),
    ],
)
def test_false_declaration(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    check = run(with_hash(tmp_path, declaration() | changes))
    assert [f.message for f in check.failures] == [words]


@pytest.mark.parametrize("declared", [{}, [], "x", None, {"scope": ["x"]}, {"scope": "other"}])
def test_declaration_that_cannot_be_checked(declared: object, tmp_path: Path) -> None:
    path = with_hash(tmp_path, declared)
    check_refused(ArtifactError, lambda: run(path), path=path, says=["unknown scope"])


def test_offsets_scope_in_a_version_1_file(tmp_path: Path) -> None:
    path = with_hash(tmp_path, declaration(), version=1)
    check_refused(ArtifactError, lambda: run(path), path=path, says=["version 1"])


def test_hash_reads_large_payloads_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ds4q.artifact.hfq2.CHUNK_BYTES", 7)
    with Reader(File(TENSORS, version=2).write(tmp_path)) as reader:
        assert quantization_hash(reader, SCOPE) == WORKED_HASH


def test_scalar_and_empty_payload_are_hashed(tmp_path: Path) -> None:
    odd = (Tensor("s", 1, (), 0, b"ab"), Tensor("z", 99, (3,), 0, b""))
    with Reader(File(odd, version=2).write(tmp_path)) as reader:
        one, two = (quantization_hash(reader, scope) for scope in HASH_SCOPES)
    assert one != two


def test_verify_checks_the_hash_where_there_is_one(tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.mkdir()
    bad.mkdir()
    found = {}
    for folder, declared in ((good, declaration()), (bad, declaration("0" * 16))):
        report = verify(with_hash(folder, declared))
        found[folder.name] = {check.name: check.ok for check in report.checks}
    assert found["good"]["quantization-hash"] is True
    assert found["bad"]["quantization-hash"] is False
    plain = verify(File(TENSORS, version=2).write(tmp_path))
    assert "quantization-hash" not in {check.name for check in plain.checks}


# ------------------------------------------------------------------ the tail


def tail_of(document: object) -> bytes:
    return json.dumps(document).encode()


TAIL = tail_of({"format": "hipfire.hfq.tail.v1", "metadata": FULL})
PAYLOAD_END = 4432
TAIL_AT = 4448  # the next multiple of 32


def with_tail(tmp_path: Path, tail: bytes = TAIL, **changes: Any) -> Path:
    declared: dict[str, Any] = {
        "format": "hipfire.hfq.tail.v1",
        "offset": TAIL_AT,
        "size": len(tail),
        "hash": {
            "algorithm": "xxh64",
            "seed": 0,
            "scope": "hfq_tail_metadata_v1",
            "value": xxhash.xxh64(tail, seed=0).hexdigest(),
        },
    }
    hash_changes = {k: v for k, v in changes.items() if k in declared["hash"]}
    declared["hash"] |= hash_changes
    declared |= {k: v for k, v in changes.items() if k not in declared["hash"]}
    declared = {k: v for k, v in declared.items() if v is not None}
    front = {"hfq_format": "hipfire.hfq.v2", "tail_metadata": declared}
    gap = bytes(TAIL_AT - PAYLOAD_END)
    return File(TENSORS, metadata=json.dumps(front).encode(), version=2, tail=gap + tail).write(
        tmp_path
    )


def test_tail_holds_the_full_metadata(tmp_path: Path) -> None:
    with Reader(with_tail(tmp_path)) as reader:
        assert reader.metadata == FULL
        assert reader.front_metadata["hfq_format"] == "hipfire.hfq.v2"
        assert reader.payload_end == reader.file_bytes
        assert reader.warnings == []


def test_tail_without_a_hash_is_read(tmp_path: Path) -> None:
    with Reader(with_tail(tmp_path, hash=None)) as reader:
        assert reader.metadata == FULL


def test_version_1_ignores_a_tail(tmp_path: Path) -> None:
    front = b'{"tail_metadata":{"offset":1,"size":1}}'
    with Reader(File(TENSORS, metadata=front).write(tmp_path)) as reader:
        assert reader.metadata == reader.front_metadata == json.loads(front)


@pytest.mark.parametrize(
    "changes",
    [
        {"offset": TAIL_AT + 1},
        {"offset": TAIL_AT - 32},  # on the last payload
        {"offset": 0},
        {"offset": -32},
        {"offset": "4448"},
        {"offset": None},
        {"offset": 2**80},
        {"size": 0},
        {"size": len(TAIL) + 1},
        {"size": 2**60},
        {"size": 1.5},
        {"size": None},
    ],
)
def test_tail_outside_its_place(changes: dict[str, Any], tmp_path: Path) -> None:
    path = with_tail(tmp_path, **changes)
    check_refused(MetadataError, lambda: Reader(path), path=path, says=["behind the payload"])


@pytest.mark.parametrize(
    "changes",
    [
        {"value": "0" * 16},
        {"value": None},
        {"algorithm": "crc32"},
        {"seed": 7},
        {"hash": "e097a4eade7a4a8d"},
        {"hash": {}},
        {"size": len(TAIL) - 1},
    ],
)
def test_tail_that_its_hash_denies(changes: dict[str, Any], tmp_path: Path) -> None:
    path = with_tail(tmp_path, **changes)
    check_refused(MetadataError, lambda: Reader(path), path=path, says=["does not match its hash"])


@pytest.mark.parametrize(
    ("tail", "words"),
    [
        (b" " + TAIL, "must begin with"),
        (TAIL + b" ", "follow the object"),
        (TAIL + b"{}", "follow the object"),
        (TAIL[:-1], "never closes"),
        (tail_of({"format": "other", "metadata": {}}), "hipfire.hfq.tail.v1"),
        (tail_of({"metadata": {}}), "hipfire.hfq.tail.v1"),
        (tail_of({"format": "hipfire.hfq.tail.v1"}), "no 'metadata' object"),
        (tail_of({"format": "hipfire.hfq.tail.v1", "metadata": []}), "no 'metadata' object"),
        (b'{"metadata":{},"metadata":{}}', "a key twice"),
        (b'{"metadata":{"x":NaN}}', "JSON forbids"),
        (b'{"metadata":' + b"[" * 300 + b"]" * 300 + b"}", "nested too deeply"),
        (b'{"metadata":{"x":"\xff"}}', "not UTF-8"),
    ],
)
def test_tail_that_is_not_what_it_should_be(tail: bytes, words: str, tmp_path: Path) -> None:
    path = with_tail(tmp_path, tail)
    check_refused(MetadataError, lambda: Reader(path), path=path, says=[words])


@pytest.mark.parametrize("declared", [[], "x", 7, None])
def test_tail_declaration_of_another_kind(declared: object, tmp_path: Path) -> None:
    front = json.dumps({"tail_metadata": declared}).encode()
    path = File(TENSORS, metadata=front, version=2).write(tmp_path)
    check_refused(MetadataError, lambda: Reader(path), path=path, says=["tail_metadata"])
