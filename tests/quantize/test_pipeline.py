"""Packing: digests, blocks, threads, the order of writes and syncs, and the read back."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from ds4q import api
from ds4q.artifact.hfq import Reader
from ds4q.artifact.locks import WriteError
from ds4q.artifact.receipt import Receipt, read_receipt, receipt_path
from ds4q.artifact.writer import PartialFile
from ds4q.quantize import convert, pipeline
from ds4q.quantize.audit import audit
from ds4q.quantize.checkpoint import Checkpoint
from ds4q.quantize.errors import SourceError, SourceValueError
from ds4q.quantize.pipeline import Packed, source_digest
from ds4q.quantize.plan import Options, make_plan
from ds4q.quantize.recipe import RECIPES
from tests.checks import check_refused
from tests.quantize import models, traps
from tests.quantize.builders import RANDOM, listing_of


def receipts(folder: Path) -> list[Receipt]:
    return [read_receipt(receipt_path(path)) for path in sorted(folder.glob("*.hfq"))]


# ---------------------------------------------------------------- digests


def xxh3(data: bytes) -> str:
    return xxhash.xxh3_128(data).hexdigest()


def test_every_digest_of_a_receipt_is_that_of_its_bytes(source: Path, tmp_path: Path) -> None:
    models.run(source, tmp_path / "x.hfq")
    tensors = models.mini_tensors()
    seen = set()
    for path in tmp_path.glob("*.hfq"):
        receipt = read_receipt(receipt_path(path))
        with Reader(path) as reader:
            assert [t.name for t in receipt.tensors] == list(reader.tensors)
            for record in receipt.tensors:
                payload = reader.read(record.name)
                assert (record.xxh3, record.nbytes) == (xxh3(payload.tobytes()), payload.nbytes)
                for part in record.sources:
                    held = tensors[part.name]
                    assert part.xxh3 == xxh3(held.data), part.name
                    assert (part.dtype, part.shape) == (held.dtype, held.shape)
                    seen.add(part.name)
        assert receipt.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
        assert receipt.file_bytes == path.stat().st_size
    assert seen == tensors.keys()


def test_source_digest_is_the_documented_hash(source: Path, tmp_path: Path) -> None:
    models.run(source, tmp_path / "x.hfq")
    rows = [
        [name, t.dtype, list(t.shape), xxh3(t.data)]
        for name, t in sorted(models.mini_tensors().items())
    ]
    text = json.dumps(rows, separators=(",", ":")).encode()
    wanted = hashlib.sha256(text).hexdigest()
    assert {receipt.source_digest for receipt in receipts(tmp_path)} == {wanted}
    for path in tmp_path.glob("*.hfq"):
        with Reader(path) as reader:
            assert reader.metadata["ds4q"]["source_digest"] == wanted


def test_source_digest_covers_name_dtype_shape_and_bytes(source: Path) -> None:
    with Checkpoint.open(source, allow_partial=True) as checkpoint:
        digests = dict.fromkeys(checkpoint.tensors, "0" * 32)
        before = source_digest(checkpoint, digests)
        assert source_digest(checkpoint, dict(reversed(digests.items()))) == before
        name = min(digests)
        assert source_digest(checkpoint, digests | {name: "1" * 32}) != before
        del digests[name]
        assert source_digest(checkpoint, digests) != before


# ---------------------------------------------------------------- blocks, chunks, threads


@pytest.mark.parametrize("threads", [1, 2, 8])
@pytest.mark.parametrize(("block_bytes", "chunk_bytes"), [(1, 1), (1, 1 << 20), (16 << 20, 1)])
def test_bytes_and_receipts_do_not_depend_on_how_the_work_is_cut(
    threads: int,
    block_bytes: int,
    chunk_bytes: int,
    source: Path,
    expected: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """96 and 200 rows in blocks of 32: tensors of several blocks, blocks of several chunks."""
    monkeypatch.setattr(pipeline, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(pipeline, "CHUNK_BYTES", chunk_bytes)
    models.run(source, tmp_path / "x.hfq", threads=threads)
    assert models.digests(tmp_path) == expected


@pytest.mark.parametrize("shape", [(4, 8), (16, 36), (100, 72), (96, 40), (33, 96)])
@pytest.mark.parametrize("recipe", ["fp4", "fp4-q8"])
def test_groups_of_32_may_run_across_rows(
    shape: tuple[int, int], recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Q8F16 packs row-major data: rows of 36 columns are no whole number of bytes."""
    rng = np.random.default_rng(2)
    tensors = models.mini_tensors()
    tensors["layers.0.ffn.gate.weight"] = models.bf16(rng.standard_normal(shape))
    config = {"model_type": "deepseek_v4"}
    source = models.save(tmp_path / "s", tensors, config=config)
    found = []
    for block_bytes, chunk_bytes in ((16 << 20, 1 << 20), (1, 1)):
        monkeypatch.setattr(pipeline, "BLOCK_BYTES", block_bytes)
        monkeypatch.setattr(pipeline, "CHUNK_BYTES", chunk_bytes)
        monkeypatch.setattr("ds4q.artifact.walk.CHUNK_BYTES", chunk_bytes)
        models.run(source, tmp_path / "x.hfq", recipe=recipe, force=True)
        report = api.verify(tmp_path / "x.hfq", source=source)
        assert report.failure_lines() == []
        found.append(models.digests(tmp_path, "x.hfq"))
    assert found[0] == found[1]


def test_a_tensor_that_is_no_whole_groups_is_refused_by_the_plan(tmp_path: Path) -> None:
    tensors = models.mini_tensors()
    tensors["layers.0.ffn.gate.weight"] = models.bf16(np.ones((5, 8)))
    source = models.save(tmp_path / "s", tensors, config={"model_type": "deepseek_v4"})
    (tmp_path / "o").mkdir()
    with pytest.raises(api.Ds4qError, match=r"layers\.0\.ffn\.gate\.weight: Q8F16 cannot hold"):
        models.run(source, tmp_path / "o" / "x.hfq", recipe="fp4-q8")
    assert list((tmp_path / "o").iterdir()) == []


def test_events_of_several_blocks_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = models.mini(tmp_path / "s")
    found = []
    for block_bytes in (1, 16 << 20):
        monkeypatch.setattr(pipeline, "BLOCK_BYTES", block_bytes)
        done = models.run(source, tmp_path / "x.hfq", recipe="fp4-q8", force=True)
        found.append(done.document()["events"])
    assert found[0] == found[1]
    assert found[0]["inexact"] > 1000


def test_progress_adds_up_to_the_payload(source: Path, tmp_path: Path) -> None:
    from contextlib import contextmanager

    heard: list[int] = []
    totals: list[int] = []

    @contextmanager
    def progress(label: str, total: int) -> Any:
        totals.append(total)
        yield heard.append

    models.run(source, tmp_path / "x.hfq", progress=progress, threads=3)
    assert totals == [sum(heard)]
    with Reader(tmp_path / "x.hfq") as trunk, Reader(tmp_path / "x-dspark.hfq") as draft:
        payload = sum(e.nbytes for r in (trunk, draft) for e in r.tensors.values())
    assert totals == [payload]


# ---------------------------------------------------------------- errors


def with_nan_scale(folder: Path, *names: str) -> Path:
    tensors = models.mini_tensors()
    for name in names:
        held = tensors[name]
        tensors[name] = held._replace(data=held.data[:-1] + b"\xff")
    return models.save(folder, tensors)


@pytest.mark.parametrize("threads", [1, 8])
def test_an_error_names_shard_and_tensor(threads: int, tmp_path: Path) -> None:
    name = "layers.0.ffn.experts.10.w1"
    source = with_nan_scale(tmp_path / "s", f"{name}.scale")
    (tmp_path / "o").mkdir()
    check_refused(
        SourceValueError,
        lambda: models.run(source, tmp_path / "o" / "x.hfq", threads=threads),
        path=source / "model-weights.safetensors",
        tensor=f"{name}.weight",
        says=["NaN scale byte", "row 95, block 7"],
    )
    assert list((tmp_path / "o").iterdir()) == []


def test_the_first_error_stops_all_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole ds4-random, and the first tensor read is bad: hardly anything else is packed."""
    packed: list[object] = []
    real = convert.pack

    def pack(rows: Any, *more: Any, **options: Any) -> Any:
        packed.append(rows)
        if len(packed) == 3:
            raise SourceError("bad")
        return real(rows, *more, **options)

    monkeypatch.setattr("ds4q.quantize.pipeline.pack", pack)
    with pytest.raises(SourceError, match="bad"):
        models.run(RANDOM, tmp_path / "x.hfq", allow_partial=False, threads=4)
    assert len(listing_of(RANDOM)) > 500
    assert len(packed) <= 3 + 4  # each worker may finish the run of rows that it is at
    assert list(tmp_path.iterdir()) == []


def test_an_internal_error_keeps_the_work(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pack(*arguments: Any, **options: Any) -> Any:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("ds4q.quantize.pipeline.pack", pack)
    with pytest.raises(ZeroDivisionError):
        models.run(source, tmp_path / "x.hfq", threads=2)
    assert (tmp_path / "x.hfq.journal").exists()


# ---------------------------------------------------------------- sealing


def test_names_come_after_sync_and_read_back(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rename before the last write of every file was synced and the file was read to its end."""
    events: list[tuple[str, object]] = []
    lock = threading.Lock()

    def recorded(name: str, module: Any, attribute: str) -> None:
        real = getattr(module, attribute)

        def wrapper(*arguments: Any, **options: Any) -> Any:
            with lock:
                first = arguments[0]
                where = os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else first
                where = arguments[1] if name == "link" else where
                events.append((name, Path(os.fspath(where)).name))
                if isinstance(first, int):  # a file that began without a name
                    events.append((name, os.fstat(first).st_ino))
            return real(*arguments, **options)

        monkeypatch.setattr(module, attribute, wrapper)

    for name in ("pwrite", "fsync", "link", "replace", "preadv", "unlink", "write"):
        ((module, attribute),) = traps.places(name)
        recorded(name, module, attribute)
    models.run(source, tmp_path / "x.hfq", threads=2)
    monkeypatch.undo()
    last = {event: number for number, event in enumerate(events)}
    renames = [number for number, (call, _) in enumerate(events) if call == "replace"]
    for file in ((tmp_path / name).stat().st_ino for name in ("x.hfq", "x-dspark.hfq")):
        assert last["pwrite", file] < last["fsync", file] < renames[0]
        assert last["pwrite", file] < last["preadv", file] < renames[0]
    for name in ("x.hfq.receipt.partial", "x-dspark.hfq.receipt.partial"):
        assert last["link", name] < renames[0]  # synced before it got this name
    assert last["write", "x.hfq.journal"] < last["fsync", "x.hfq.journal"] < renames[0]
    assert [events[n][1] for n in renames] == [
        "x-dspark.hfq.receipt.partial",
        "x-dspark.hfq.partial",
        "x.hfq.receipt.partial",
        "x.hfq.partial",
    ]
    assert renames[-1] < last["fsync", tmp_path.name]
    assert renames[-1] < last["unlink", "x.hfq.journal"] < last["fsync", tmp_path.name]


@pytest.mark.parametrize("name", ["layers.0.attn.wq_a.weight", "layers.0.hc_attn_base"])
def test_a_disk_that_gives_back_other_bytes_is_noticed(
    name: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is read back before it gets its name; nothing is left of a bad one."""
    real = pipeline.seal

    def seal(file: PartialFile, output: Any, *more: Any) -> Any:
        for tensor in output.tensors:
            if tensor.entry.name == name:
                where = tensor.entry.offset + tensor.entry.nbytes - 1
                byte = os.pread(file.fd, 1, where)
                os.pwrite(file.fd, bytes([byte[0] ^ 1]), where)
        return real(file, output, *more)

    monkeypatch.setattr("ds4q.quantize.job.seal", seal)
    check_refused(
        WriteError,
        lambda: models.run(source, tmp_path / "x.hfq"),
        path=tmp_path / "x.hfq.partial",
        tensor=name,
        says=["read back differs", "disk and memory"],
    )
    assert list(tmp_path.iterdir()) == []


def test_a_partial_file_that_was_cut_is_noticed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = pipeline.seal

    def seal(file: PartialFile, *more: Any) -> Any:
        os.ftruncate(file.fd, 100)
        return real(file, *more)

    monkeypatch.setattr("ds4q.quantize.job.seal", seal)
    with pytest.raises(api.Ds4qError, match=r"read back|shorter than planned"):
        models.run(source, tmp_path / "x.hfq")
    assert list(tmp_path.iterdir()) == []


def test_a_read_back_that_ends_early_is_noticed(source: Path, tmp_path: Path) -> None:
    with Checkpoint.open(source, allow_partial=True) as checkpoint:
        audited = audit(checkpoint, allow_partial=True)
        out = tmp_path / "x.hfq"
        plan = make_plan(checkpoint, audited, out, Options(RECIPES["fp4"]), "0")
    output = plan.outputs[0]
    file = PartialFile(out, output.layout.data_offset + 1)  # ends within the first tensor
    file.allocate()
    packed = [Packed("0" * 32, (), convert.Events(), 0)] * len(output.tensors)
    check_refused(
        WriteError,
        lambda: pipeline.seal(file, output, plan, packed, "0" * 64),
        path=tmp_path / "x.hfq.partial",
        tensor=output.tensors[0].entry.name,
        says=["too short"],
    )
    file.discard()


# ---------------------------------------------------------------- syncing on the way


def test_data_are_pushed_to_the_disk_while_packing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "SYNC_SECONDS", 0.01)
    synced = threading.Event()
    real_sync, real_pack = PartialFile.sync, convert.pack

    def sync(self: PartialFile) -> None:
        real_sync(self)
        synced.set()

    packs = 0

    def pack(*arguments: Any, **options: Any) -> Any:
        nonlocal packs
        packs += 1
        if packs == 3:  # with two blocks written, wait for the other thread to sync them
            assert synced.wait(300)
        return real_pack(*arguments, **options)

    monkeypatch.setattr(PartialFile, "sync", sync)
    monkeypatch.setattr("ds4q.quantize.pipeline.pack", pack)
    models.run(models.mini(tmp_path / "s"), tmp_path / "x.hfq")
    assert synced.is_set()


def test_a_failed_sync_on_the_way_fails_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel tells of a lost write once: the call that hears it must not be forgotten."""
    monkeypatch.setattr(pipeline, "SYNC_SECONDS", 0.01)
    failed = threading.Event()
    real_sync, real_pack = PartialFile.sync, convert.pack

    def sync(self: PartialFile) -> None:
        if not failed.is_set():
            failed.set()
            raise OSError(5, "Input/output error")
        real_sync(self)

    def pack(*arguments: Any, **options: Any) -> Any:
        if (tmp_path / "o" / "x.hfq.journal").stat().st_size > 600:
            assert failed.wait(300)
        return real_pack(*arguments, **options)

    monkeypatch.setattr(PartialFile, "sync", sync)
    monkeypatch.setattr("ds4q.quantize.pipeline.pack", pack)
    (tmp_path / "o").mkdir()
    source = models.mini(tmp_path / "s")
    with pytest.raises(WriteError, match="Input/output error"):
        models.run(source, tmp_path / "o" / "x.hfq")
    assert list((tmp_path / "o").iterdir()) == []
