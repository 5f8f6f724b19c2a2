"""What --resume makes of a job whose files, journal, source or options changed since the stop."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

from ds4q import api
from ds4q.artifact.files import ForeignFileError
from ds4q.quantize.journal import _line, read_journal
from tests.quantize import models, traps


def half_done(server: traps.Server, source: Path, out: Path) -> None:
    """A job that was killed when all but the last tensor was in the partial files."""
    assert server.job(source, out, call="pwrite", n=11)["killed"]
    earlier = read_journal(out.with_name("x.hfq.journal"))
    assert earlier is not None
    assert len(earlier.blocks) == 10


@pytest.mark.parametrize("seed", range(4))
def test_a_changed_byte_in_the_partial_file_is_packed_again(
    seed: int,
    server: traps.Server,
    source: Path,
    expected: dict[str, str],
    tmp_path: Path,
) -> None:
    out = tmp_path / "x.hfq"
    half_done(server, source, out)
    rng = random.Random(seed)
    path = tmp_path / "x.hfq.partial"
    data = bytearray(path.read_bytes())
    written = [at for at, byte in enumerate(data) if byte]
    data[rng.choice(written)] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    ended = server.job(source, out, resume=True)
    assert ended["error"] is None
    assert ended["counts"]["pwrite"] == 4  # the changed one, the unwritten one, two fronts
    assert models.digests(tmp_path) == expected


@pytest.mark.parametrize("loss", ["zeros", "short", "gone"])
def test_lost_data_is_packed_again(
    loss: str, server: traps.Server, source: Path, expected: dict[str, str], tmp_path: Path
) -> None:
    """As after a power loss: the journal knows of blocks that the disk never got."""
    out = tmp_path / "x.hfq"
    half_done(server, source, out)
    for path in tmp_path.glob("*.partial"):
        size = path.stat().st_size
        if loss == "gone":
            path.unlink()
        else:
            os.truncate(path, 5000)
            os.truncate(path, size if loss == "zeros" else 5000)
    ended = server.job(source, out, resume=True)
    assert (ended["error"], ended["resumed_bytes"]) == (None, 0)
    assert models.digests(tmp_path) == expected


def test_a_torn_line_costs_only_its_block(
    server: traps.Server, source: Path, expected: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "x.hfq"
    half_done(server, source, out)
    path = tmp_path / "x.hfq.journal"
    path.write_bytes(path.read_bytes()[:-20])
    ended = server.job(source, out, resume=True)
    assert (ended["error"], ended["counts"]["pwrite"]) == (None, 2 + 2)
    assert models.digests(tmp_path) == expected


@pytest.mark.parametrize("garbage", [b"", b"\0" * 4096, b"rubbish\n" * 10])
@pytest.mark.parametrize("name", ["x.hfq.journal", "x.hfq.partial"])
def test_a_garbage_file_is_not_ours(
    name: str,
    garbage: bytes,
    server: traps.Server,
    source: Path,
    expected: dict[str, str],
    tmp_path: Path,
) -> None:
    """Also beside a journal of ours; with the file out of the way the job starts over."""
    out = tmp_path / "x.hfq"
    half_done(server, source, out)
    (tmp_path / name).write_bytes(garbage)
    before = models.digests(tmp_path)
    for options in ({}, {"resume": True}, {"force": True}):
        with pytest.raises(ForeignFileError, match=name):
            models.run(source, out, **options)
    assert models.digests(tmp_path) == before
    (tmp_path / name).unlink()
    ended = server.job(source, out, resume=True)
    assert ended["error"] is None
    assert models.digests(tmp_path) == expected


def test_an_edited_journal_line_is_not_believed(
    server: traps.Server, source: Path, expected: dict[str, str], tmp_path: Path
) -> None:
    """A source digest in it would end up in metadata and receipt."""
    out = tmp_path / "x.hfq"
    half_done(server, source, out)
    path = tmp_path / "x.hfq.journal"
    lines = path.read_bytes().splitlines(keepends=True)
    key = b'"sources":["'
    at = lines[3].index(key) + len(key)
    lines[3] = lines[3][:at] + b"0" * 32 + lines[3][at + 32 :]
    path.write_bytes(b"".join(lines))
    assert server.job(source, out, resume=True)["error"] is None
    assert models.digests(tmp_path) == expected


Line = dict[str, Any]


def lines_of(path: Path) -> list[Line]:
    return [json.loads(line.partition(b" ")[2]) for line in path.read_bytes().splitlines()]


def every(key: str, value: object) -> Callable[[list[Line]], list[Line]]:
    """Another value in every line of a block."""
    return lambda lines: [lines[0], *(line | {key: value} for line in lines[1:])]


def swapped(key: str) -> Callable[[list[Line]], list[Line]]:
    """The values of two neighbouring lines exchanged, all through the journal."""

    def change(lines: list[Line]) -> list[Line]:
        blocks = lines[1:]
        others = blocks[1:] + blocks[:1]
        return [lines[0], *(a | {key: b[key]} for a, b in zip(blocks, others, strict=True))]

    return change


def claims_what_was_not_written(lines: list[Line]) -> list[Line]:
    """The last tensor, whose rows are zeros in the partial file."""
    done = {(line["output"], line["tensor"]) for line in lines[1:]}
    zeros = xxhash.xxh3_128(bytes(lines[-1]["nbytes"])).hexdigest()
    more = [
        lines[-1] | {"output": o, "tensor": t, "packed": zeros}
        for o in range(2)
        for t in range(12)
        if (o, t) not in done
    ]
    return [*lines, *more]


TAMPERED: dict[str, Callable[[list[Line]], list[Line]]] = {
    "sources": every("sources", ["0" * 32, "1" * 32]),
    "no sources": every("sources", []),
    "packed": every("packed", "0" * 32),
    "events": every("events", {"inexact": 7, "max_error": 0.5, "unknown": 1}),
    "nbytes": every("nbytes", 2**62),
    "books": every("books", "0 0 00ff"),
    "block": every("block", 5),
    "sources swapped": swapped("sources"),
    "packed swapped": swapped("packed"),
    "tensors swapped": swapped("tensor"),
    "outputs swapped": swapped("output"),
    "not written": claims_what_was_not_written,
    "published": lambda lines: [*lines, {"publish": True}],
    "shards": lambda lines: [lines[0] | {"shards": {}}, *lines[1:]],
    "twice": lambda lines: [*lines, *lines[1:]],
    "another length": lambda lines: [
        lines[0] | {"identity": lines[0]["identity"] | {"outputs": [["x.hfq", 5]]}},
        *lines[1:],
    ],
    "a string": every("nbytes", "5"),
    "null": every("tensor", None),
}


@pytest.mark.parametrize("how", TAMPERED)
def test_a_tampered_journal_ends_in_the_right_artifact_or_in_a_refusal(
    how: str, server: traps.Server, source: Path, expected: dict[str, str], tmp_path: Path
) -> None:
    """Each line has the digest that belongs to it."""
    out = tmp_path / "x.hfq"
    half_done(server, source, out)
    journal = tmp_path / "x.hfq.journal"
    lines = TAMPERED[how](lines_of(journal))
    journal.write_bytes(b"".join(map(_line, lines)))
    before = models.digests(tmp_path)
    if how in ("another length", "a string", "null"):
        with pytest.raises(api.Ds4qError, match=r"x\.hfq"):
            models.run(source, out, resume=True)
        assert models.digests(tmp_path) == before
    else:
        models.run(source, out, resume=True)
        assert models.digests(tmp_path) == expected


@pytest.mark.parametrize("key", ["books", "packed", "sources", "tensor"])
def test_nor_does_a_journal_with_books_change_them(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = models.save(tmp_path / "s", models.expert_tensors(), config=models.EXPERT_CONFIG)
    for name in ("o", "fresh"):
        (tmp_path / name).mkdir()
    out = tmp_path / "o" / "x.hfq"
    half_done_in_process(source, out, monkeypatch, recipe="mix")
    journal = out.with_name("x.hfq.journal")
    assert all(line["books"] for line in lines_of(journal)[1:])
    journal.write_bytes(b"".join(map(_line, swapped(key)(lines_of(journal)))))
    models.run(source, out, recipe="mix", resume=True)
    models.run(source, tmp_path / "fresh" / "x.hfq", recipe="mix")
    assert models.digests(tmp_path / "o") == models.digests(tmp_path / "fresh")


def test_a_changed_payload_whose_digest_was_corrected_is_packed_again(
    server: traps.Server, source: Path, expected: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "x.hfq"
    half_done(server, source, out)
    journal, path = tmp_path / "x.hfq.journal", tmp_path / "x.hfq.partial"
    lines, data = lines_of(journal), bytearray(path.read_bytes())
    at = next(n for n in range(len(data) - 1, 0, -1) if data[n])
    data[at] ^= 1
    path.write_bytes(data)
    for line in lines[1:]:  # whichever of them it is
        for start in range(at - line["nbytes"] + 1, at + 1):
            line["packed"] = xxhash.xxh3_128(data[start : start + line["nbytes"]]).hexdigest()
            break
    journal.write_bytes(b"".join(map(_line, lines)))
    assert server.job(source, out, resume=True)["error"] is None
    assert models.digests(tmp_path) == expected


def test_a_file_that_was_not_there_when_the_job_began_is_kept(
    server: traps.Server, source: Path, tmp_path: Path
) -> None:
    """That an unfinished job lies here allows nobody to replace a user's file."""
    out = tmp_path / "x.hfq"
    half_done(server, source, out)
    out.write_bytes(b"the user's own")
    with pytest.raises(api.Ds4qError, match="output exists"):
        models.run(source, out, resume=True)
    assert out.read_bytes() == b"the user's own"


def test_touched_shards_are_read_again_and_kept(
    server: traps.Server, source: Path, expected: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "x.hfq"
    half_done(server, source, out)
    for shard in source.glob("*.safetensors"):
        os.utime(shard, (1, 1))
    ended = server.job(source, out, resume=True)
    assert (ended["error"], ended["counts"]["pwrite"]) == (None, 1 + 2)
    assert models.digests(tmp_path) == expected


@pytest.mark.parametrize(
    "name",
    [
        "layers.0.ffn.experts.0.w1.weight",
        "layers.0.ffn.experts.0.w1.scale",
        "layers.0.attn.wq_a.weight",
        "layers.0.attn.wq_a.scale",
        "layers.0.attn_norm.weight",
        "mtp.0.attn.wkv.scale",
    ],
)
@pytest.mark.parametrize("several_blocks", [False, True])
def test_changed_source_data_are_packed_again(
    name: str,
    several_blocks: bool,
    server: traps.Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Weights and scales lie in different shards; only the shard of one of them changes."""
    if several_blocks:
        monkeypatch.setattr("ds4q.quantize.pipeline.BLOCK_BYTES", 1)
    tensors = models.mini_tensors()
    source = models.save(tmp_path / "source", tensors)
    folder = tmp_path / "o"
    folder.mkdir()
    out = folder / "x.hfq"
    half_done_in_process(source, out, monkeypatch)
    data = bytearray(tensors[name].data)
    data[len(data) // 2] ^= 1
    changed = tensors | {name: tensors[name]._replace(data=bytes(data))}
    shard = f"model-{models.by_kind(name)}.safetensors"
    other = models.save(tmp_path / "other", changed)
    (source / shard).write_bytes((other / shard).read_bytes())  # the other shard stays as it was
    models.run(source, out, resume=True)
    (tmp_path / "fresh").mkdir()
    models.run(source, tmp_path / "fresh" / "x.hfq")
    assert models.digests(folder) == models.digests(tmp_path / "fresh")
    for path in (out, folder / "x-dspark.hfq"):
        assert api.verify(path, source=source).ok


def half_done_in_process(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> None:
    """A job that stops (as on Ctrl-C) when everything is packed, before it is sealed."""

    def stop(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("ds4q.quantize.job.seal", stop)
        with pytest.raises(KeyboardInterrupt):
            models.run(source, out, **options)
    assert out.with_name("x.hfq.journal").exists()


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        ({"recipe": "fp4-q8"}, "options.recipe.name"),
        ({"exclude": ["layers.0.attn_norm"]}, "options.exclude"),
        ({"draft": "keep"}, "options.dspark"),
    ],
)
def test_other_options_cannot_go_on(
    change: dict[str, Any], differs: str, server: traps.Server, source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "x.hfq"
    half_done(server, source, out)
    before = models.digests(tmp_path)
    with pytest.raises(api.Ds4qError, match=rf"belongs to another job \({differs}\)"):
        models.run(source, out, resume=True, **change)
    assert models.digests(tmp_path) == before


def test_another_source_cannot_go_on(server: traps.Server, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.hfq"
    half_done(server, source, out)
    other = models.mini(tmp_path / "other", seed=1)  # other gates, so another fingerprint
    with pytest.raises(api.Ds4qError, match=r"another job \(source_fingerprint\)"):
        models.run(other, out, resume=True)


def test_another_version_cannot_go_on(
    server: traps.Server, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "x.hfq"
    half_done(server, source, out)
    monkeypatch.setattr(api, "__version__", "9.9.9")
    with pytest.raises(api.Ds4qError, match=r"another job \(tool_version\).*9\.9\.9"):
        models.run(source, out, resume=True)
