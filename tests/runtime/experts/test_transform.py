"""A rank's share of an expert: every byte once, whole blocks or none, the same tokens together."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ds4q.artifact.formats import codec_for
from ds4q.artifact.formats.hfp4g32 import repack
from ds4q.artifact.hfq import Reader, TensorEntry
from ds4q.artifact.types import (
    BF16,
    HFP4G32,
    Q8F16,
    ROCMFP2,
    ROCMFP4,
    ROCMFP8,
    TYPES,
    TensorType,
    type_of,
)
from ds4q.runtime.backend.cpu import CpuBackend
from ds4q.runtime.backend.weights import Expert
from ds4q.runtime.config import parse_config
from ds4q.runtime.engine import Engine
from ds4q.runtime.errors import FillTransformError
from ds4q.runtime.experts.catalogue import Catalogue, Key, Record
from ds4q.runtime.experts.ownership import ExpertOwnership
from ds4q.runtime.experts.paged import PagedExperts
from ds4q.runtime.experts.pager import Pager
from ds4q.runtime.experts.reading import ExpertReader, Fill, Purpose
from ds4q.runtime.experts.slots import HostSlots
from ds4q.runtime.experts.store import Band, Phase
from ds4q.runtime.experts.transform import Parts, WidthSlice
from ds4q.runtime.experts.transport import HostTransport
from ds4q.runtime.source import ArtifactSource, Tensors
from tests.checks import check_refused

U8 = npt.NDArray[np.uint8]
D, WIDTH = 256, 512
RUNNABLE = (HFP4G32, Q8F16, BF16, ROCMFP4, ROCMFP8, ROCMFP2)


def expert(
    kind: TensorType, width: int = WIDTH, d: int = D, down: TensorType | None = None
) -> Record:
    """An expert's record; gate and up of one type, down of its own."""
    at, made = 4096, []
    for role, t, shape in (
        ("w1", kind, (width, d)),
        ("w3", kind, (width, d)),
        ("w2", down or kind, (d, width)),
    ):
        entry = TensorEntry(role, t.id, shape, t.group_size, t.payload_bytes(shape), at)
        made.append(entry)
        at += entry.nbytes
    return Record(Key(1, 2), *made)


def empty(record: Record) -> Parts:
    gate, up, down = (np.full(entry.nbytes, 0xEE, np.uint8) for entry in record.entries)
    return gate, up, down


def rows(entry: TensorEntry, data: U8) -> U8:
    return data.reshape(entry.shape[0], type_of(entry.type_id).row_bytes(entry.shape[1]))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("kind", RUNNABLE, ids=lambda kind: kind.name)
def test_ranks_cover_an_expert_exactly_once(kind: TensorType, ranks: int) -> None:
    """Every byte knows where it comes from; row headers alone belong to every rank."""
    whole = expert(kind)
    places = [np.arange(entry.nbytes) for entry in whole.entries]
    found: list[list[npt.NDArray[np.int64]]] = [[], [], []]
    for rank in range(ranks):
        share = WidthSlice(rank, ranks)
        packed = share.packed(whole)
        assert packed.nbytes == sum(entry.nbytes for entry in packed.entries)
        came = [np.zeros(entry.nbytes, np.int64) for entry in packed.entries]
        for shift in (0, 8, 16):
            planes = [(place >> shift & 255).astype(np.uint8) for place in places]
            part = empty(packed)
            share.apply(whole, (planes[0], planes[1], planes[2]), part)
            for where, plane in zip(came, part, strict=True):
                where += plane.astype(np.int64) << shift
        for role, (entry, where) in enumerate(zip(packed.entries, came, strict=True)):
            head = kind.row_header_bytes if role == 2 else 0
            body = where.reshape(entry.shape[0], -1)[:, head:]
            found[role].append(body.ravel())
    for role, (entry, place) in enumerate(zip(whole.entries, places, strict=True)):
        head = kind.row_header_bytes if role == 2 else 0
        expected = place.reshape(entry.shape[0], -1)[:, head:].ravel()
        assert np.array_equal(np.sort(np.concatenate(found[role])), expected), role


def test_shares_decode_to_rows_and_columns_of_the_whole() -> None:
    """Gate and up by rows, down by columns: headers of the shorter rows are as they must be."""
    rng = np.random.default_rng(2)
    whole = expert(HFP4G32)
    data = []
    for entry in whole.entries:
        m, k = entry.shape
        codes = rng.integers(0, 256, (m, k // 2), dtype=np.uint8)
        packed = repack(codes, rng.integers(120, 130, (m, k // 32), dtype=np.uint8))
        packed[:, :2] = np.frombuffer(
            rng.uniform(0.5, 2, m).astype("<f2").tobytes(), np.uint8
        ).reshape(m, 2)
        data.append(packed.ravel())
    codec = codec_for(HFP4G32.id)
    decoded = [
        codec.decode(part, entry.shape) for part, entry in zip(data, whole.entries, strict=True)
    ]
    got: list[list[npt.NDArray[np.float32]]] = [[], [], []]
    for rank in range(4):
        share = WidthSlice(rank, 4)
        packed_record, part = share.packed(whole), empty(share.packed(whole))
        share.apply(whole, (data[0], data[1], data[2]), part)
        for role, entry in enumerate(packed_record.entries):
            codec.validate(part[role], entry.shape, path=None, tensor=entry.name)
            got[role].append(codec.decode(part[role], entry.shape))
    for role, axis in enumerate((0, 0, 1)):
        assert np.array_equal(np.concatenate(got[role], axis=axis), decoded[role]), role


def test_gate_and_down_may_differ_in_type() -> None:
    packed = WidthSlice(1, 2).packed(expert(ROCMFP4, down=Q8F16))
    assert [type_of(entry.type_id) for entry in packed.entries] == [ROCMFP4, ROCMFP4, Q8F16]
    assert [entry.shape for entry in packed.entries] == [(WIDTH // 2, D)] * 2 + [(D, WIDTH // 2)]
    assert [entry.nbytes for entry in packed.entries] == [
        ROCMFP4.payload_bytes((WIDTH // 2, D)),
        ROCMFP4.payload_bytes((WIDTH // 2, D)),
        Q8F16.payload_bytes((D, WIDTH // 2)),
    ]


@pytest.mark.parametrize(
    ("record", "ranks", "says"),
    [
        (expert(HFP4G32), 3, ["expert 2 of layer 1", "a multiple of 3", "512"]),
        (expert(HFP4G32), 32, ["w2", "a multiple of 32", "found 16"]),
        (expert(ROCMFP2), 8, ["w2", "a multiple of 128", "found 64"]),
        (expert(ROCMFP4, down=ROCMFP2), 8, ["w2", "a multiple of 128"]),
        (expert(Q8F16, width=96), 2, ["w2", "a multiple of 32", "found 48"]),
        # 48 columns are no whole blocks: blocks cross rows, and half of them is no half of a row.
        (expert(Q8F16, d=48), 2, ["w1", "a multiple of 32", "found 48"]),
        (expert(TYPES[35], width=1024), 2, ["w1", "not cut into columns"]),
        (expert(TYPES[32], width=1024), 2, ["w1", "not cut into columns"]),
    ],
    ids=[
        "ranks",
        "blocks",
        "row multiple",
        "down alone",
        "half blocks",
        "rows",
        "padded",
        "headed",
    ],
)
def test_what_does_not_divide_is_refused(record: Record, ranks: int, says: list[str]) -> None:
    for rank in (0, ranks - 1):
        share = WidthSlice(rank, ranks)
        check_refused(FillTransformError, partial(share.packed, record), says=says)


@pytest.mark.parametrize(("rank", "ranks"), [(-1, 2), (2, 2), (0, 0), (0, -1)])
def test_there_is_no_such_rank(rank: int, ranks: int) -> None:
    check_refused(FillTransformError, lambda: WidthSlice(rank, ranks), says=["no such rank"])


# ----------------------------------------------------------------------------- the real fill path


@pytest.fixture
def tiny(tiny_path: Path) -> Iterator[Reader]:
    with Reader(tiny_path) as reader:
        yield reader


def catalogue_of(reader: Reader, transform: WidthSlice | None) -> Catalogue:
    config = parse_config(reader.metadata["config"], path=reader.path)
    return Catalogue(config, Tensors(reader), path=reader.path, transform=transform)


def test_a_model_that_does_not_divide_is_refused_at_load(tiny: Reader) -> None:
    check_refused(FillTransformError, lambda: catalogue_of(tiny, WidthSlice(0, 3)))


@pytest.mark.parametrize("cold", [True, False], ids=["cold", "cached"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_slots_hold_the_share_and_reads_the_whole(
    tiny: Reader, ranks: int, cold: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ExpertReader, "_cached", lambda self, record: not cold)
    plain = catalogue_of(tiny, None)
    assert plain.packed is plain.records
    written = 0
    for rank in range(ranks):
        share = WidthSlice(rank, ranks)
        catalogue = catalogue_of(tiny, share)
        assert catalogue.records == plain.records  # the file does not depend on ranks
        slots = HostSlots(catalogue.geometry, [2] * len(catalogue.geometry))
        transport = HostTransport(catalogue, ExpertReader(tiny, catalogue), slots, threads=2)
        for expert_id in range(catalogue.experts):
            fills = [
                Fill(Key(layer, expert_id), layer % 2, Purpose.DEMAND)
                for layer in range(len(catalogue.records))
            ]
            fill_all(transport, fills)
            for fill in fills:
                record, packed = (
                    c[fill.key.layer][expert_id] for c in (catalogue.records, catalogue.packed)
                )
                gate, up, down = (tiny.read(entry.name) for entry in record.entries)
                expected = empty(packed)
                share.apply(record, (gate, up, down), expected)
                for found, wanted in zip(slots.views(packed, fill.slot), expected, strict=True):
                    assert np.array_equal(found, wanted)
        counts = transport.counters()
        transport.close()
        assert counts["fills_transformed"] == counts["reads"] == len(list(catalogue))
        assert counts["bytes_read"] == plain.file_bytes
        assert counts["bytes_written"] == sum(p.nbytes for layer in catalogue.packed for p in layer)
        assert (counts["bytes_written"] < counts["bytes_read"]) == (ranks > 1)
        assert (catalogue.slot_bytes < plain.slot_bytes) == (ranks > 1)
        written += counts["bytes_written"]
    headers = sum(16 * record.down.shape[0] for record in plain) * (ranks - 1)
    assert written == plain.file_bytes + headers


def test_without_a_transform_there_is_one_step(tiny: Reader) -> None:
    catalogue = catalogue_of(tiny, None)
    slots = HostSlots(catalogue.geometry, [1] * len(catalogue.geometry))
    transport = HostTransport(catalogue, ExpertReader(tiny, catalogue, bounces=1), slots, threads=1)
    fill_all(transport, [Fill(Key(0, 3), 0, Purpose.DEMAND)])
    counts = transport.counters()
    transport.close()
    assert counts["fills_transformed"] == counts["transform_us"] == 0
    assert counts["bytes_written"] == counts["bytes_read"] == catalogue[Key(0, 3)].nbytes


def fill_all(transport: HostTransport, fills: list[Fill]) -> None:
    """Fill and wait; no fill may fail."""
    errors: list[BaseException | None] = []
    ended = threading.Semaphore(0)

    def done(fill: Fill, error: BaseException | None) -> None:
        errors.append(error)
        ended.release()

    transport.start(fills, done)
    for _ in fills:
        assert ended.acquire(timeout=300)
    assert errors == [None] * len(fills)


# ----------------------------------------------------------------------------- two ranks, one model


class Halves(dict[int, Expert]):
    """Experts of rank 0, and beside them the other ranks' shares of the same."""

    def __init__(self, parts: Sequence[Mapping[int, Expert]]) -> None:
        super().__init__(parts[0])
        self.parts = parts


class Ranks:
    """A store of several ranks in one process: each pages its share of every expert."""

    def __init__(self, reader: Reader, ranks: int, slots: int) -> None:
        self.ranks = []
        for rank in range(ranks):
            catalogue = catalogue_of(reader, WidthSlice(rank, ranks))
            held = HostSlots(catalogue.geometry, [slots] * len(catalogue.geometry))
            transport = HostTransport(catalogue, ExpertReader(reader, catalogue), held, threads=2)
            pager = Pager(catalogue, slots, transport, policy="lru")
            everyone = ExpertOwnership.all(catalogue.experts)
            tensors = Tensors(reader)
            tensors.bind(entry for record in catalogue for entry in record.entries)
            self.ranks.append(
                PagedExperts(pager, transport, held, catalogue, tensors, everyone, band=slots)
            )

    def begin(self, *args: Any) -> None:
        for rank in self.ranks:
            rank.begin(*args)

    def bands(self, layer: int, ids: Any, phase: Phase) -> Generator[Band, None, None]:
        for bands in zip(*(rank.bands(layer, ids, phase) for rank in self.ranks), strict=True):
            yield Band(Halves([band.experts for band in bands]), bands[0].where)

    def close(self) -> None:
        for rank in self.ranks:
            rank.pager.close()


def reduce_ranks(monkeypatch: pytest.MonkeyPatch, parts: slice) -> None:
    """Add the ranks' rows in rank order, as a reduction between them would."""
    real = CpuBackend.experts

    def experts(
        self: CpuBackend,
        x: Any,
        ids: Any,
        held: Any,
        limit: float,
        where: Any = None,
        out: Any = None,
    ) -> Any:
        if not isinstance(held, Halves):
            return real(self, x, ids, held, limit, where=where, out=out)
        mine = slice(None) if where is None else where
        total = np.zeros((*ids.shape, x.shape[1]), np.float32) if out is None else out
        for number, part in enumerate(held.parts[parts]):
            rows = real(self, x, ids, part, limit, where=where)
            total[mine] = rows[mine] if number == 0 else total[mine] + rows[mine]
        return total

    monkeypatch.setattr(CpuBackend, "experts", experts)


def logits_of(engine: Engine, ids: Sequence[int]) -> npt.NDArray[np.float32]:
    return engine.forward(engine.new_state(), ids, "all")


def greedy(engine: Engine, prompt: Sequence[int], n: int) -> list[int]:
    state, ids = engine.new_state(), list(prompt)
    step: Sequence[int] = prompt
    for _ in range(n):
        step = [int(engine.forward(state, step)[-1].argmax())]
        ids += step
    return ids


def two_ranks(reader: Reader, slots: int) -> tuple[Engine, Ranks]:
    config = parse_config(reader.metadata["config"], path=reader.path)
    source, ranks = ArtifactSource(reader), Ranks(reader, 2, slots)
    engine = Engine(config, source, ranks, threads=2)
    source.fill(None)
    return engine, ranks


@pytest.mark.parametrize("slots", [4, 16], ids=["thrashing", "fitting"])
def test_two_ranks_choose_the_same_tokens(
    tiny: Reader, tiny_engine: Engine, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [list(b"def copy(x):\n    return"), list(b"the quick brown fox " * 8)]
    reduce_ranks(monkeypatch, slice(None))
    engine, ranks = two_ranks(tiny, slots)
    for prompt in prompts:
        assert greedy(engine, prompt, 24) == greedy(tiny_engine, prompt, 24)
    whole, parts = (logits_of(e, prompts[0]) for e in (tiny_engine, engine))
    assert np.abs(whole - parts).max() < 1e-3
    for rank in ranks.ranks:
        counts = rank.counters()
        assert (sum(counts[p]["evictions"] for p in ("prefill", "decode")) > 0) == (slots < 16)
    ranks.close()


@pytest.mark.parametrize("alone", [0, 1])
def test_one_rank_alone_is_not_the_model(
    tiny: Reader, tiny_engine: Engine, alone: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the test above would say if a rank held nothing of use, or held everything."""
    prompt = list(b"the quick brown fox ")
    reduce_ranks(monkeypatch, slice(alone, alone + 1))
    engine, ranks = two_ranks(tiny, 16)
    assert np.abs(logits_of(tiny_engine, prompt) - logits_of(engine, prompt)).max() > 0.1
    ranks.close()
