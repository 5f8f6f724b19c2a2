"""Files in a checkpoint's folder that are not shards, and shards that are odd: one ruling each.

The rulings are those of ``artifact/FORMAT.md``, section 8.1. Leftovers of other programs are
ignored by their names; what has the name of a shard and is not one is refused by that name.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from ds4q import api
from ds4q.artifact.errors import Ds4qError
from ds4q.quantize.checkpoint import Checkpoint
from ds4q.quantize.errors import (
    FileKindError,
    IndexMismatchError,
    MissingFileError,
    SourceError,
    UnfinishedFileError,
)
from ds4q.quantize.index import INDEX, UNFINISHED
from tests.checks import check_refused
from tests.quantize import models

SHARD = "model-weights.safetensors"
OTHER = "model-scales.safetensors"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n"
APPLE_DOUBLE = b"\0\5\x16\7\0\2\0\0Mac OS X        " + bytes(4000)
Change = Callable[[Path], object]


@pytest.fixture
def folder(source: Path, tmp_path: Path) -> Path:
    """The small checkpoint without its index: every shard in the folder counts."""
    folder = Path(shutil.copytree(source, tmp_path / "source"))
    (folder / INDEX).unlink()
    return folder


def holding(name: str, data: bytes) -> Change:
    def change(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)

    return change


def copied(name: str) -> Change:
    return lambda folder: shutil.copy(folder / SHARD, folder / name)


IGNORED: dict[str, Change] = {
    "AppleDouble": holding(f"._{SHARD}", APPLE_DOUBLE),
    "AppleDouble-of-a-series": holding("._model-00001-of-00002.safetensors", APPLE_DOUBLE),
    "hidden-copy": copied(f".{SHARD}"),
    "editor-lock": lambda folder: (folder / f".#{SHARD}").symlink_to("me@host.123:456"),
    "vim": holding(".model.safetensors.swp", b"b0VIM 9.0"),
    "rsync": copied(f".{SHARD}.Ab12Cd"),
    "backup": copied("model.safetensors~"),
    "hf-incomplete": holding("model-00001.safetensors.incomplete", b"x"),
    "hf-cache": holding(f".cache/huggingface/download/{SHARD}.incomplete", b"x"),
    "browser-part": holding(f"{SHARD}.part", b"x"),
    "wget-again": copied("model.safetensors.1"),
    "browser-again": copied("model.safetensors (1)"),
    "aria2-of-an-absent-file": holding("model.safetensors.aria2", b"x"),
    "windows-stream": holding(f"{SHARD}:Zone.Identifier", b"[ZoneTransfer]"),
}

REFUSED: dict[str, tuple[Change, str]] = {
    "copy": (
        copied("model copy.safetensors"),
        f"{SHARD}: .*: tensor name appears twice: found .* in model copy.safetensors; "
        ".*move one of the two files away",
    ),
    "browser-copy": (copied("model (1).safetensors"), "appears twice.* in model \\(1\\)"),
    "hard-link": (lambda f: os.link(f / SHARD, f / "x.safetensors"), "x.safetensors.*twice"),
    "folder": (
        lambda folder: (folder / "x.safetensors").mkdir(),
        "x.safetensors: not a regular file: found a folder; .*move this away",
    ),
    "pipe": (
        lambda folder: os.mkfifo(folder / "x.safetensors"),
        "x.safetensors: not a regular file: found a named pipe; .*move this away",
    ),
    "empty": (
        holding("x.safetensors", b""),
        "x.safetensors: no room .*found a file of 0 bytes; .*move it away",
    ),
    "web-page": (
        holding("x.safetensors", b"<!DOCTYPE html><html>Access denied</html>"),
        "x.safetensors: bad safetensors header length.*download it again",
    ),
    "lfs-pointer": (holding("x.safetensors", POINTER), "x.safetensors: .*git-lfs.*git lfs pull"),
    "broken-link": (
        lambda folder: (folder / "x.safetensors").symlink_to("gone"),
        "x.safetensors: broken link to gone; download the file",
    ),
    "link-to-itself": (
        lambda folder: (folder / "x.safetensors").symlink_to("x.safetensors"),
        "x.safetensors: open failed: Too many levels of symbolic links; .*move it away",
    ),
}


@pytest.mark.parametrize("name", IGNORED)
def test_leftovers_of_other_programs_are_ignored(
    folder: Path, expected: dict[str, str], tmp_path: Path, name: str
) -> None:
    IGNORED[name](folder)
    out = tmp_path / "out"
    out.mkdir()
    models.run(folder, out / "x.hfq")
    assert models.digests(out) == expected
    assert api.verify(out / "x.hfq", source=folder).ok


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_called_a_shard_and_is_not_is_refused_by_name(
    folder: Path, tmp_path: Path, name: str
) -> None:
    change, words = REFUSED[name]
    models.run(folder, tmp_path / "x.hfq")
    change(folder)
    (tmp_path / "out").mkdir()
    with pytest.raises(SourceError) as caught:
        models.run(folder, tmp_path / "out" / "x.hfq")
    text = str(caught.value)
    assert re.search(words, text)
    assert text.isprintable()
    assert list((tmp_path / "out").iterdir()) == []
    failed = [
        check.name for check in api.verify(tmp_path / "x.hfq", source=folder).checks if not check.ok
    ]
    assert failed == ["source"]


# ---------------------------------------------------------------- unfinished downloads


@pytest.mark.parametrize("suffix", UNFINISHED)
@pytest.mark.parametrize("indexed", [True, False])
def test_a_shard_that_is_still_downloaded_is_refused(
    source: Path, folder: Path, suffix: str, indexed: bool
) -> None:
    """Such a file has its length and perhaps its header, and zeros where data will be."""
    if indexed:
        shutil.copy(source / INDEX, folder / INDEX)
    (folder / f"{SHARD}{suffix}").touch()
    for path in (folder, folder / SHARD):
        check_refused(
            UnfinishedFileError,
            partial(Checkpoint.open, path, allow_partial=True),
            path=folder / SHARD,
            says=[f"{SHARD}{suffix}", "remove"],
        )


def test_a_missing_shard_is_told_with_its_unfinished_download(source: Path, folder: Path) -> None:
    def opened(error: type[Ds4qError], *says: str) -> None:
        check_refused(error, lambda: Checkpoint.open(folder, allow_partial=True), says=says)

    for path in list(folder.glob("*.safetensors")):
        path.rename(path.with_name(path.name + ".incomplete"))
    opened(MissingFileError, f"no .safetensors file in the folder; there is {OTHER}.incomplete and")
    shutil.copy(source / INDEX, folder / INDEX)
    opened(IndexMismatchError, f"there is {OTHER}.incomplete")
    (folder / INDEX).unlink()
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"")
    (folder / "model-00002-of-00002.safetensors.part").write_bytes(b"")
    with pytest.raises(MissingFileError, match=r"1 absent; there is model-00002\S*\.part"):
        Checkpoint.open(folder)


def test_a_file_that_is_no_shard_but_stands_for_one_is_named_by_its_kind(folder: Path) -> None:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    check_refused(
        FileKindError,
        lambda: Checkpoint.open(folder, allow_partial=True),
        path=folder / "config.json",
        says=["found a named pipe"],
    )


# ---------------------------------------------------------------- odd headers


def rewritten(change: Callable[[dict[str, object]], dict[str, object]], padding: int = 0) -> Change:
    """Write the header of a shard anew over the same data."""

    def work(folder: Path) -> None:
        raw = (folder / SHARD).read_bytes()
        end = 8 + int.from_bytes(raw[:8], "little")
        text = json.dumps(change(json.loads(raw[8:end]))).encode() + b" " * padding
        (folder / SHARD).write_bytes(len(text).to_bytes(8, "little") + text + raw[end:])

    return work


def entry(dtype: str, shape: list[int], start: int = 0, stop: int = 0) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


LEGAL: dict[str, Change] = {
    "keys-in-another-order": rewritten(lambda header: dict(reversed(header.items()))),
    "fields-in-another-order": rewritten(
        lambda header: {
            name: dict(reversed(fields.items())) if isinstance(fields, dict) else fields
            for name, fields in header.items()
        }
    ),
    "padding": rewritten(lambda header: header, padding=4097),
    "metadata-first": rewritten(lambda header: {"__metadata__": {"format": "pt"}} | header),
    "metadata-last": rewritten(lambda header: header | {"__metadata__": {"a": ""}}),
    "no-tensors": holding("empty.safetensors", (2).to_bytes(8, "little") + b"{}"),
    "unknown-integers": rewritten(lambda header: header | {"zzz.ids": entry("I64", [0, 3])}),
}

ILLEGAL: dict[str, tuple[Change, str]] = {
    "dtype-in-lower-case": (
        rewritten(lambda header: header | {"zzz": entry("bf16", [0])}),
        f"{SHARD}: zzz: unsupported dtype: found 'bf16'",
    ),
    "unknown-tensor": (
        rewritten(lambda header: header | {"zzz": entry("BF16", [0])}),
        f"{SHARD}: zzz: unexpected tensor",
    ),
    "hole": (
        lambda folder: models.write_raw(
            folder / "x.safetensors", {"zzz": entry("U8", [4], 2, 6)}, bytes(6)
        ),
        "x.safetensors: zzz: bytes that belong to no tensor",
    ),
    "bytes-behind": (
        lambda folder: models.write_raw(folder / "x.safetensors", {}, b"more"),
        "x.safetensors: bytes after the last tensor",
    ),
    "scalar": (
        lambda folder: models.write_raw(
            folder / "x.safetensors", {"zzz": entry("F32", [], 0, 4)}, bytes(4)
        ),
        "x.safetensors: zzz: unexpected tensor",
    ),
}


@pytest.mark.parametrize("name", LEGAL)
def test_legal_oddities_give_the_same_weights(
    folder: Path, source: Path, tmp_path: Path, name: str
) -> None:
    LEGAL[name](folder)
    models.run(folder, tmp_path / "x.hfq")
    assert api.verify(tmp_path / "x.hfq", source=source).ok


@pytest.mark.parametrize("name", ILLEGAL)
def test_illegal_oddities_are_refused_by_name(folder: Path, tmp_path: Path, name: str) -> None:
    change, words = ILLEGAL[name]
    change(folder)
    with pytest.raises(SourceError, match=words):
        models.run(folder, tmp_path / "x.hfq")
    assert not (tmp_path / "x.hfq").exists()
