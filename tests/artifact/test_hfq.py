"""The reader on whole files: the worked files of both versions, payload reads, sealed files."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from ds4q.artifact import writer
from ds4q.artifact.errors import (
    ArtifactError,
    ChangedError,
    IndexFieldError,
    MagicError,
    MetadataError,
    PayloadBoundsError,
    TruncatedError,
    UnknownTensorError,
)
from ds4q.artifact.formats import codec_for, hfp4g32
from ds4q.artifact.hfq import Reader
from tests.artifact.build import METADATA, TWO, File, Tensor, sealed
from tests.checks import check_refused

# ------------------------------------------------------------------ worked files
#
# Two tensors: four f16 ones, and two HFP4G32 rows of 256 whose block j of row r has scale byte
# 127 + j + 8r and codes 0..15 twice. The hex text and the digests were computed independently.

FRONT_V1 = """
    4846514d 01000000 09000000 02000000 2000000000000000 0010000000000000
    7b22636f6e666967223a7b7d7d
    02000000
    0800 6e2e776569676874 01 01 04000000 00000000 0800000000000000
    0800 612e776569676874 15 02 02000000 00010000 20000000 3001000000000000
"""
CODES = bytes.fromhex("1032547698badcfe" * 2)
ROWS = b"".join(
    bytes.fromhex("003c0000080000000000000000000000")
    + b"".join(bytes([127 + j + 8 * r]) + CODES for j in range(8))
    for r in range(2)
)
N_WEIGHT = Tensor("n.weight")
A_WEIGHT = Tensor("a.weight", 21, (2, 256), 32, ROWS)
SHA256_V1 = "015a7eb14ddaf4d9d1e6c1ed42e44e967ecacb69d51784ded6b11cefe72cd0a6"
SHA256_V1_SORTED = "5b7a7f7eefade04f0d4b2626ea698c817d2fa11d527048655975ac504553340f"
SHA256_V2 = "ceae3f31bad29b4f21fdcb26286207e3ad4b553f680fd177c9caec8420e8a2ba"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def planned(tensors: tuple[Tensor, ...]) -> bytes:
    specs = [writer.TensorSpec(str(t.name), t.type_id, t.shape) for t in tensors]
    plan = writer.layout(specs, len(METADATA), arch_id=9)
    return plan.front(METADATA) + b"".join(t.payload for t in tensors)


def test_worked_version_1_file_is_laid_out_to_the_byte() -> None:
    data = planned((N_WEIGHT, A_WEIGHT))
    assert data[:109] == bytes.fromhex(FRONT_V1)
    assert data[109:4096] == bytes(3987)
    assert sha256(data[4104:]) == "fdd7aa6213bfc550b0c3facb4a84d9b223d5f27c0bb13b494b27ab998627c24a"
    assert (len(data), sha256(data)) == (4408, SHA256_V1)
    assert File((N_WEIGHT, A_WEIGHT)).data() == data


def test_worked_version_1_file_sorted_by_name() -> None:
    data = planned((A_WEIGHT, N_WEIGHT))
    assert (len(data), sha256(data)) == (4408, SHA256_V1_SORTED)


def test_worked_version_1_file_is_read(tmp_path: Path) -> None:
    with Reader(File((N_WEIGHT, A_WEIGHT)).write(tmp_path)) as reader:
        assert (reader.version, reader.arch_id) == (1, 9)
        assert (reader.metadata, reader.metadata_raw) == ({"config": {}}, METADATA)
        assert (reader.data_offset, reader.file_bytes, reader.payload_end) == (4096, 4408, 4408)
        assert reader.warnings == reader.strict_warnings == []
        assert list(reader.tensors) == ["n.weight", "a.weight"]
        first, second = reader.tensors.values()
        assert (first.type_id, first.shape, first.group_size) == (1, (4,), 0)
        assert (first.nbytes, first.offset) == (8, 4096)
        assert (second.type_id, second.shape, second.group_size) == (21, (2, 256), 32)
        assert (second.nbytes, second.offset) == (304, 4104)
        assert reader.read("n.weight").tobytes() == N_WEIGHT.payload
        payload = reader.read("a.weight")
    assert payload.tobytes() == ROWS
    values = codec_for(21).decode(payload, (2, 256))
    assert values[0, :4].tolist() == [0, 0.5, 1, 1.5]
    assert values[1, 33] == 0.5 * 2.0**9
    assert hfp4g32.unpack(payload.reshape(2, -1))[1].tolist() == [
        list(range(127, 135)),
        list(range(135, 143)),
    ]


def test_worked_version_2_file_is_read(tmp_path: Path) -> None:
    data = File((N_WEIGHT, A_WEIGHT), version=2).data()
    assert (len(data), sha256(data)) == (4432, SHA256_V2)
    assert data[77:85] == bytes.fromhex("8000000000000000")
    assert data[117:125] == bytes.fromhex("8100000000000000")
    path = tmp_path / "two.hfq"
    path.write_bytes(data)
    with Reader(path) as reader:
        assert reader.version == 2
        assert [(e.offset, e.nbytes) for e in reader.tensors.values()] == [(4096, 8), (4128, 304)]
        assert reader.read("n.weight").tobytes() == N_WEIGHT.payload
        assert reader.read("a.weight").tobytes() == ROWS
        assert reader.warnings == []


def test_payload_sizes_4_and_6_begin_where_each_version_puts_them(tmp_path: Path) -> None:
    pair = (Tensor("a", 1, (2,), 0, b"abcd"), Tensor("b", 1, (3,), 0, b"efghij"))
    for version, offsets in ((1, [4096, 4100]), (2, [4096, 4128])):
        with Reader(File(pair, version=version).write(tmp_path)) as reader:
            assert [e.offset for e in reader.tensors.values()] == offsets
            assert reader.read("b").tobytes() == b"efghij"


# ------------------------------------------------------------------ reading payloads


@pytest.fixture
def path(tmp_path: Path) -> Path:
    payload = bytes(range(256)) * 16
    return File((Tensor("a", 1, (2048,), 0, payload), Tensor("b"))).write(tmp_path)


def test_read_into_takes_any_range_of_a_payload(path: Path) -> None:
    with Reader(path) as reader:
        entry = reader.entry("a")
        for start, length in ((0, 4096), (0, 0), (4096, 0), (4095, 1), (255, 258)):
            out = np.full(length, 7, dtype=np.uint8)
            reader.read_into(entry, out, start)
            assert out.tobytes() == (bytes(range(256)) * 16)[start : start + length]


@pytest.mark.parametrize(("start", "length"), [(-1, 2), (4096, 1), (0, 4097), (4000, 97)])
def test_read_into_never_leaves_its_payload(path: Path, start: int, length: int) -> None:
    with Reader(path) as reader:
        entry = reader.entry("a")
        out = np.zeros(length, dtype=np.uint8)
        check_refused(
            PayloadBoundsError,
            lambda: reader.read_into(entry, out, start),
            path=path,
            tensor="a",
            says=["at most 4096 bytes"],
        )
        assert not out.any()


def test_read_into_fills_a_matrix(path: Path) -> None:
    with Reader(path) as reader:
        out = np.zeros((16, 256), dtype=np.uint8)
        reader.read_into(reader.entry("a"), out)
        assert (out == np.arange(256)).all()


def test_short_reads_are_continued(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv

    def grudging(fd: int, views: list[memoryview], offset: int) -> int:
        return real(fd, [views[0][:7]], offset)

    monkeypatch.setattr(os, "preadv", grudging)
    with Reader(path) as reader:
        assert reader.read("a").tobytes() == bytes(range(256)) * 16
        out = np.zeros((16, 256), dtype=np.uint8)
        reader.read_into(reader.entry("a"), out)
        assert (out == np.arange(256)).all()


def test_file_truncated_after_open(path: Path) -> None:
    with Reader(path) as reader:
        os.truncate(path, 5000)
        check_refused(
            TruncatedError,
            lambda: reader.read("a"),
            path=path,
            says=["4096 bytes at offset 4096", "found 904"],
        )


@pytest.mark.parametrize("name", ["model.a", "A", "a ", ""])
def test_names_are_exact(name: str, path: Path) -> None:
    with Reader(path) as reader:
        error = check_refused(UnknownTensorError, lambda: reader.entry(name), path=path)
    assert isinstance(error, KeyError)


def test_reading_a_closed_file_is_an_error(path: Path) -> None:
    reader = Reader(path)
    reader.close()
    reader.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        reader.read("a")


def test_a_refused_file_leaks_no_descriptor(tmp_path: Path) -> None:
    path = tmp_path / "bad.hfq"
    path.write_bytes(b"HFQX" + bytes(100))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with pytest.raises(MagicError):
            Reader(path)
    assert len(os.listdir("/proc/self/fd")) <= before


# ------------------------------------------------------------------ what is opened


def test_folder_and_fifo_are_refused_without_waiting(tmp_path: Path) -> None:
    check_refused(MagicError, lambda: Reader(tmp_path), path=tmp_path, says=["a folder"])
    fifo = tmp_path / "fifo.hfq"
    os.mkfifo(fifo)
    check_refused(MagicError, lambda: Reader(fifo), path=fifo, says=["a named pipe"])


def test_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Reader(tmp_path / "none.hfq")


def test_symlink_is_followed(path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.hfq"
    link.symlink_to(path.name)
    with Reader(link) as reader:
        assert len(reader.tensors) == 2
        reader.check_unchanged()


# ------------------------------------------------------------------ changed while open


def test_unchanged_file(path: Path) -> None:
    with Reader(path) as reader:
        reader.check_unchanged()


def test_appended_file(path: Path) -> None:
    with Reader(path) as reader:
        with path.open("ab") as file:
            file.write(b"x")
        check_refused(ChangedError, reader.check_unchanged, path=path)


def test_rewritten_file_of_equal_length(path: Path) -> None:
    data = path.read_bytes()
    with Reader(path) as reader:
        path.write_bytes(data)
        os.utime(path, ns=(1, 1))
        check_refused(ChangedError, reader.check_unchanged, path=path)


def test_file_replaced_by_a_rename(path: Path, tmp_path: Path) -> None:
    with Reader(path) as reader:
        stamp = path.stat().st_mtime_ns
        other = tmp_path / "other"
        other.write_bytes(path.read_bytes())
        os.utime(other, ns=(stamp, stamp))
        other.replace(path)
        check_refused(ChangedError, reader.check_unchanged, path=path)


def test_file_removed_while_open(path: Path) -> None:
    with Reader(path) as reader:
        path.unlink()
        check_refused(ChangedError, reader.check_unchanged, path=path, says=["no longer there"])


# ------------------------------------------------------------------ forged counts and lengths


@pytest.mark.parametrize(
    "attack",
    [
        File(count=2**32 - 1, index_count=2**32 - 1),
        File(data_offset=2**64 - 1, padding=b""),
        File(data_offset=2**40, padding=b""),
        File(metadata_offset=2**63),
        File([Tensor(name_length=65535)]),
        File([Tensor(n_dims=255)]),
        File([Tensor(nbytes=2**64 - 1)]),
        File([Tensor(nbytes=2**40)]),
        File([Tensor(shape=(2**32 - 1,) * 200, nbytes=2**63)]),
        File([Tensor(offset=2**64 - 1)], version=2),
        File(
            metadata=b'{"tail_metadata":{"offset":4160,"size":268435456}}',
            version=2,
        ),
    ],
)
def test_forged_numbers_allocate_nothing(attack: File, tmp_path: Path) -> None:
    path = attack.write(tmp_path)
    with pytest.raises(ArtifactError):
        Reader(path)  # the first call pays for imports and caches
    tracemalloc.start()
    try:
        with pytest.raises(ArtifactError):
            Reader(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


# ------------------------------------------------------------------ containers inside a file


def test_container_at_an_offset(tmp_path: Path) -> None:
    inner = File((N_WEIGHT, A_WEIGHT)).data()
    path = tmp_path / "bundle"
    path.write_bytes(b"#" * 100 + inner)
    with Reader(path, base=100) as reader:
        assert reader.data_offset == 4196
        assert [e.offset for e in reader.tensors.values()] == [4196, 4204]
        assert reader.read("a.weight").tobytes() == ROWS
        assert reader.payload_end == len(inner) + 100


def test_second_container_behind_the_first(tmp_path: Path) -> None:
    first, second = File(TWO).data(), File((N_WEIGHT,)).data()
    path = tmp_path / "bundle.hfq"
    path.write_bytes(first + second)
    with Reader(path) as reader:
        assert reader.embedded_at == len(first)
        assert reader.warnings == [
            f"another HFQ container begins at byte {len(first)} ({len(second)} bytes)"
        ]
        base = reader.embedded_at
    with Reader(path, base=base) as reader:
        assert reader.embedded_at is None
        assert reader.warnings == []
        assert reader.read("n.weight").tobytes() == N_WEIGHT.payload


# ------------------------------------------------------------------ files that ds4q wrote

SEALED = (Tensor("a.weight"), Tensor("b.scale", 22, (3,), 0, bytes(12)))


def test_sealed_file_opens(tmp_path: Path) -> None:
    path = tmp_path / "x.hfq"
    path.write_bytes(sealed(SEALED))
    with Reader(path) as reader:
        assert reader.warnings == reader.strict_warnings == []
        assert list(reader.tensors) == ["a.weight", "b.scale"]


def test_every_flipped_bit_of_header_metadata_and_index_is_refused(tmp_path: Path) -> None:
    data = sealed(SEALED)
    path = tmp_path / "x.hfq"
    path.write_bytes(data)
    with Reader(path) as reader:
        end = 32 + len(reader.metadata_raw) + len(reader.index_raw)
    assert 300 < end < 700
    accepted = []
    with path.open("r+b", buffering=0) as file:
        for at in range(end):
            for bit in range(8):
                os.pwrite(file.fileno(), bytes([data[at] ^ 1 << bit]), at)
                with contextlib.suppress(ArtifactError):
                    Reader(path).close()
                    accepted.append((at, bit))
            os.pwrite(file.fileno(), data[at : at + 1], at)
    assert accepted == []


def test_flipped_padding_is_a_strict_warning(tmp_path: Path) -> None:
    data = bytearray(sealed(SEALED))
    data[4095] = 1
    path = tmp_path / "x.hfq"
    path.write_bytes(data)
    with Reader(path) as reader:
        assert reader.strict_warnings == ["the padding between index and payload is not zero"]


@pytest.mark.parametrize("key", ["metadata_xxh3", "index_xxh3"])
def test_digest_that_is_missing_or_wrong(key: str, tmp_path: Path) -> None:
    data = sealed(SEALED)
    kind = MetadataError if key == "metadata_xxh3" else ArtifactError
    for old, new in ((b'"%s"', b'"%s"'[::-1]), (b'"%s":"', b'"%s":"')):
        name = key.encode()
        if old != new:
            damaged = data.replace(b'"' + name + b'"', b'"' + name[::-1] + b'"')
        else:
            at = data.index(b'"' + name + b'":"') + len(name) + 4
            damaged = data[:at] + b"0" * 32 + data[at + 32 :]
        assert damaged != data
        path = tmp_path / "x.hfq"
        path.write_bytes(damaged)
        with pytest.raises(kind, match="digest"):
            Reader(path)


def test_resealed_metadata_does_not_cover_for_another_index(tmp_path: Path) -> None:
    data = sealed(SEALED, ours={"index_xxh3": "0" * 32})
    path = tmp_path / "x.hfq"
    path.write_bytes(data)  # build.sealed writes the true digest over it
    Reader(path).close()
    index_at = data.index(b"a.weight")
    path.write_bytes(data[:index_at] + b"A" + data[index_at + 1 :])
    check_refused(
        IndexFieldError, lambda: Reader(path), path=path, says=["ds4q.index_xxh3", "damaged"]
    )


def test_lost_ds4q_object_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "x.hfq"
    path.write_bytes(sealed(SEALED).replace(b'"ds4q":{', b'"ds4p":{'))
    check_refused(MetadataError, lambda: Reader(path), path=path, says=["'ds4q'"])


def test_ds4q_object_of_another_kind(tmp_path: Path) -> None:
    path = File(metadata=b'{"ds4q":[]}').write(tmp_path)
    check_refused(MetadataError, lambda: Reader(path), path=path, says=["not an object"])
