"""The trace file: what goes in comes out, and no damage goes unnoticed."""

from __future__ import annotations

import json
import random
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash

from ds4q.artifact.hfq import Reader
from ds4q.artifact.locks import WriteError
from ds4q.artifact.metadata import canonical
from ds4q.artifact.newfile import NewFile
from ds4q.artifact.writer import PartialFile
from ds4q.runtime.errors import TraceError
from ds4q.runtime.experts.trace import (
    BandRecord,
    GoneRecord,
    Outcome,
    Recorder,
    WarmRecord,
    artifact_identity,
    read_trace,
)
from tests.runtime.experts import streams

LAYERS, EXPERTS, K = 2, 16, 3
BAND = struct.Struct("<BQIBIHIHHHHHQ")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    ids = streams.skewed(1, LAYERS, 12, EXPERTS, K)
    return streams.record(tmp_path / "run.trace", ids, streams.header(), prompt=4)


def read(path: Path) -> list[object]:
    return [str(record) for record in read_trace(path)]


def band(number: int = 0, phase: int = 1, layer: int = 0, tokens: int = 1, k: int = K,
         ids: tuple[int, ...] = (1, 2, 3), distinct: tuple[int, ...] = (1, 2, 3),
         outcomes: tuple[int, ...] = (1, 1, 1)) -> bytes:  # fmt: skip
    head = BAND.pack(1, number, 0, phase, 0, layer, tokens, k, len(distinct), 0, 0, 0, 30)
    parts = np.array([*ids, *distinct], "<u2").tobytes(), bytes(outcomes)
    return head + b"".join(parts)


def test_what_goes_in_comes_out(tmp_path: Path) -> None:
    made = replace(
        streams.header(), expert_bytes=((7,), tuple(range(1, EXPERTS + 1))), limits={"asked": 5}
    )
    recorder = Recorder(NewFile(tmp_path / "t"), made)
    recorder.warm(1, 15)
    ids = np.array([[3, 1, 2], [2, 3, 9]])
    recorder.dispatch(
        7, 4, "prefill", 90, 1, ids, [3, 1, 2, 9], [0, 1, 2, 4],
        issued=3, used=2, dropped=1, nbytes=99,
    )  # fmt: skip
    recorder.gone(0, 4)
    recorder.close()
    trace = read_trace(tmp_path / "t")
    assert trace.header == made
    assert [trace.header.bytes_of(0, 9), trace.header.bytes_of(1, 9)] == [7, 10]
    warm, found, gone = trace
    assert warm == WarmRecord(1, 15)
    assert gone == GoneRecord(0, 4)
    assert isinstance(found, BandRecord)
    assert found.ids.tolist() == ids.tolist()
    assert found.distinct.tolist() == [3, 1, 2, 9]
    assert found.outcomes.tolist() == [
        Outcome.HIT, Outcome.COMPULSORY, Outcome.MISS, Outcome.PREFETCHED
    ]  # fmt: skip
    assert found[:5] == (7, 4, "prefill", 90, 1)
    assert found[-4:] == (3, 2, 1, 99)


def test_a_trace_has_its_name_once_it_is_whole(tmp_path: Path) -> None:
    recorder = Recorder(NewFile(tmp_path / "t"), streams.header())
    recorder.warm(0, 1)
    recorder.dispatch(0, 0, "decode", 0, 0, [[1, 2, 3]], [1, 2, 3], [0, 1, 1])
    assert not (tmp_path / "t").exists()
    recorder.close()
    recorder.close()
    assert [each.name for each in tmp_path.iterdir()] == ["t"]
    with pytest.raises(TraceError, match="after the trace was closed"):
        recorder.warm(0, 2)


def test_a_run_that_dispatched_nothing_leaves_an_earlier_trace_alone(path: Path) -> None:
    before = path.read_bytes()
    recorder = Recorder(NewFile(path), streams.header())
    recorder.warm(0, 1)
    recorder.gone(0, 1)
    recorder.close()
    assert path.read_bytes() == before
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_a_run_that_failed_leaves_an_earlier_trace_alone(path: Path) -> None:
    before = path.read_bytes()
    recorder = Recorder(NewFile(path), streams.header())
    recorder.dispatch(0, 0, "decode", 0, 0, [[1, 2, 3]], [1, 2, 3], [0, 1, 1])
    recorder.drop()
    recorder.close()
    assert path.read_bytes() == before
    assert [each.name for each in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError])
def test_a_record_that_was_not_written_whole_leaves_an_earlier_trace_alone(
    path: Path, stop: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = path.read_bytes()
    recorder = Recorder(NewFile(path), streams.header())
    recorder.dispatch(0, 0, "decode", 0, 0, [[1, 2, 3]], [1, 2, 3], [0, 1, 1])

    def stopped(self: object, data: bytes, offset: int) -> None:
        raise stop

    ids = np.random.default_rng(1).integers(1, 4, (300_000, 3))
    with monkeypatch.context() as patch:
        patch.setattr(PartialFile, "pwrite", stopped)
        with pytest.raises((stop, WriteError)):
            recorder.dispatch(1, 0, "prefill", 1, 0, ids, [1], [0])
    with pytest.raises(TraceError):
        recorder.warm(0, 1)
    recorder.close()
    assert path.read_bytes() == before
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_the_same_run_writes_the_same_bytes(path: Path, tmp_path: Path) -> None:
    ids = streams.skewed(1, LAYERS, 12, EXPERTS, K)
    again = streams.record(tmp_path / "again", ids, streams.header(), prompt=4)
    assert again.read_bytes() == path.read_bytes()


def test_experts_of_another_rank_are_refused(path: Path) -> None:
    half = replace(streams.header(), owned=(0, 8))
    streams.record(path, np.array([[[1, 2, 3]], [[4, 7, 6]]]), half)
    assert read_trace(path).header.held == 8
    assert len(read(path)) == 2
    streams.record(path, np.array([[[1, 2, 3]], [[4, 8, 6]]]), half)
    with pytest.raises(TraceError, match="expert of another rank out of range"):
        read(path)


def test_any_cut_is_noticed_and_told_where(path: Path) -> None:
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(TraceError) as caught:
            read(path)
        said = str(caught.value)
        assert str(path) in said
        if length > 600:  # behind the header
            assert "cut short, in record" in said
            assert f"at byte {length:,}" in said


def test_bytes_behind_the_end_are_noticed(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(TraceError, match="bytes follow the end"):
        read(path)


def test_any_altered_byte_gives_an_error_or_the_same_records(path: Path) -> None:
    whole, records, rng = path.read_bytes(), read(path), random.Random(4)
    header = read_trace(path).header
    for at in rng.sample(range(len(whole)), 200):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            found = read(path)
        except TraceError:
            continue
        assert found == records
        assert read_trace(path).header == header


def test_any_altered_byte_of_the_header_is_noticed(path: Path) -> None:
    whole = path.read_bytes()
    (length,) = struct.unpack_from("<I", whole, 4)
    for at in range(8 + length):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(TraceError, match=r"damaged header|another version|cut short") as caught:
            read_trace(path)
        assert "__init__" not in str(caught.value)


@pytest.mark.parametrize(
    ("records", "says"),
    [
        (band(ids=(1, 2, 16)), "expert out of range"),
        (band(ids=(1, 2, 65535)), "expert out of range"),
        (band(distinct=(1, 2, 16)), "expert out of range"),
        (band(distinct=(1, 2, 2)), "distinct experts named twice"),
        (band(distinct=(1, 2, 4)), "expert that no token chose"),
        (band(layer=2), "layer out of range, in record 0 at byte .*: found 2"),
        (band(phase=2), "phase out of range"),
        (band(outcomes=(1, 1, 5)), "outcome out of range"),
        (band(k=4, ids=(1, 2, 3, 4)), "experts per token out of range"),
        (band(tokens=0, ids=()), "tokens out of range"),
        (band(tokens=1 << 31, ids=()), "tokens out of range"),
        (struct.pack("<BHH", 2, 0, 16), "expert out of range"),
        (struct.pack("<BHH", 5, 2, 0), "layer out of range"),
        (b"\x63", "unknown kind of record, in record 0 at byte .*: found 99"),
        (band() + streams.end(2), "records are missing, .*: expected 2, found 1"),
        (band(), "the trace is cut short, in record 1"),
        (band() + streams.end(1) + band(), "bytes follow the end"),
    ],
)
def test_impossible_records_are_refused(path: Path, records: bytes, says: str) -> None:
    with pytest.raises(TraceError, match=says):
        read(streams.altered(path, records))


def test_their_legal_twin_is_read(path: Path) -> None:
    assert len(read(streams.altered(path, band() + band(number=1) + streams.end(2)))) == 2


def test_a_trace_of_version_2_is_read(path: Path) -> None:
    """It names no checkpoint."""
    raw = path.read_bytes()
    frame, length = struct.unpack_from("<II", raw)
    header = json.loads(raw[20 : 8 + length - 16])
    assert header.pop("source") == ""
    text = raw[8:18] + struct.pack("<H", 2) + canonical(header)
    front = struct.pack("<II", frame, len(text) + 16) + text
    path.write_bytes(front + xxhash.xxh3_128(front).digest() + raw[8 + length :])
    assert read_trace(path).header == streams.header()


def test_other_files_and_versions_are_named(path: Path, tmp_path: Path) -> None:
    raw = path.read_bytes()
    other = tmp_path / "other"
    other.write_bytes(b"HFQM" + bytes(60))
    with pytest.raises(TraceError, match="not a trace"):
        read_trace(other)
    for version in (1, 4):  # whatever is behind it
        other.write_bytes(raw[:18] + bytes([version, 0]) + raw[20:50])
        with pytest.raises(TraceError, match=f"another version: expected 2 or 3, found {version}"):
            read_trace(other)
    other.write_bytes(raw[:4] + b"\xff\xff\xff\xff" + raw[8:])
    with pytest.raises(TraceError, match="damaged header"):
        read_trace(other)


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        (b'"layers":2', b'"layers":3', "do not fit"),
        (b'"top_k":3', b'"top_k":0', "do not fit"),
        (b'"top_k":3', b'"top_j":3', r"fields of no trace: found \['top_j', 'top_k'\]"),
        (b'"slots":5', b'"slots":""', "bad slots"),
        (b'"expert_bytes":[[10],[10]]', b'"expert_bytes":[[10],[-1]]', "do not fit"),
        (b'"policy":"lru"', b'"policy":[1,2]', "bad policy"),
        (b'"owned":[0,16]', b'"owned":[0,17]', "do not fit"),
        (b'"owned":[0,16]', b'"owned":[16,16]', "do not fit"),
        (b'"owned":[0,16]', b'"owned":[-1,16]', "do not fit"),
        (b'"owned":[0,16]', b'"owned":[0]', "do not fit"),
        (b'"owned":[0,16]', b'"owned":["",16]', "do not fit"),
        (b'{"artifact"', b'["artifact"', "metadata is not JSON"),
    ],
)
def test_headers_that_cannot_be_are_refused(
    path: Path, before: bytes, after: bytes, says: str
) -> None:
    raw = path.read_bytes()
    (length,) = struct.unpack_from("<I", raw, 4)
    text, records = raw[8 : 8 + length - 16], raw[8 + length :]
    assert text.count(before) == 1
    text = text.replace(before, after)
    front = raw[:4] + struct.pack("<I", len(text) + 16) + text
    path.write_bytes(front + xxhash.xxh3_128(front).digest() + records)
    with pytest.raises(TraceError, match=f"damaged header: .*{says}"):
        read_trace(path)


def test_a_few_bytes_that_stand_for_gigabytes_cost_no_memory(path: Path, tmp_path: Path) -> None:
    import tracemalloc

    forged = streams.altered(path, band() + bytes(256 << 20))  # then END records without an end
    assert forged.stat().st_size < 20_000
    tracemalloc.start()
    with pytest.raises(TraceError, match="records are missing"):
        read(forged)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32 << 20


def test_models_of_one_shape_have_identities_of_their_own(tiny_path: Path, tmp_path: Path) -> None:
    with Reader(tiny_path) as reader:
        identity = artifact_identity(reader)
        raw = tiny_path.read_bytes()
    assert len(identity) == 32
    assert raw.count(b'"silu"') == 1
    twin = tmp_path / "twin.hfq"
    twin.write_bytes(raw.replace(b'"silu"', b'"gelu"'))
    with Reader(twin) as reader:
        assert artifact_identity(reader) != identity
