"""An export is whole or not at all: places, full disks, stops, damage; nothing is replaced."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ds4q import api
from ds4q.artifact import stops
from ds4q.artifact.errors import Ds4qError, TruncatedError
from ds4q.artifact.files import AppearedError
from ds4q.artifact.hfq import Reader
from ds4q.artifact.locks import WriteError
from ds4q.artifact.receipt import receipt_path
from ds4q.quantize.export.plan import ExportError
from ds4q.quantize.job import SpaceError
from ds4q.quantize.outputs import OutputExistsError, OutputPlaceError, UnfinishedError
from tests.artifact.build import File, Tensor
from tests.checks import check_refused
from tests.quantize.builders import TINY, config_of

FORMATS = ["safetensors", "gguf"]


def export(file: Path, out: Path, to: Any = "safetensors", **options: Any) -> Any:
    return api.export(file, out, to=to, only_experts=True, **options)


# ---------------------------------------------------------------- where it may go


@pytest.mark.parametrize("to", FORMATS)
def test_what_stands_there_is_never_replaced(small_artifact: Path, tmp_path: Path, to: str) -> None:
    (tmp_path / "file").write_bytes(b"precious")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "dangling").symlink_to("nowhere")
    before = sorted(tmp_path.iterdir())
    for name in ("file", "folder", "link", "dangling"):
        out = tmp_path / name
        check_refused(
            OutputExistsError,
            lambda out=out: export(small_artifact, out, to),  # type: ignore[misc]
            path=out,
            says=["remove it first"],
        )
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "file").read_bytes() == b"precious"


def test_the_artifact_itself_is_not_replaced(small_artifact: Path) -> None:
    check_refused(OutputExistsError, lambda: export(small_artifact, small_artifact, "gguf"))


@pytest.mark.parametrize("name", ["", ".", "..", "there/.."])
def test_an_output_needs_a_name(
    small_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path)
    check_refused(OutputPlaceError, lambda: export(small_artifact, Path(name)), says=["not a name"])


def test_an_output_needs_its_folder(small_artifact: Path, tmp_path: Path) -> None:
    out = tmp_path / "none" / "x"
    says = ["does not exist"]
    check_refused(OutputPlaceError, lambda: export(small_artifact, out), path=out.parent, says=says)


@pytest.mark.parametrize("to", FORMATS)
def test_an_unfinished_export_is_not_touched(small_artifact: Path, tmp_path: Path, to: str) -> None:
    theirs = tmp_path / "x.partial"
    theirs.mkdir()
    (theirs / "x").write_bytes(b"another export")
    check_refused(
        UnfinishedError,
        lambda: export(small_artifact, tmp_path / "x", to),
        path=theirs,
        says=["remove it and try again"],
    )
    assert (theirs / "x").read_bytes() == b"another export"
    assert list(tmp_path.iterdir()) == [theirs]


# ---------------------------------------------------------------- disks, stops


def failing(patch: pytest.MonkeyPatch, name: str, number: int, code: int) -> None:
    """Have the call of ``os.<name>`` of that number fail, and all later ones."""
    real, calls = getattr(os, name), iter(range(1 << 30))

    def call(*args: Any, **options: Any) -> Any:
        if next(calls) >= number:
            raise OSError(code, os.strerror(code))
        return real(*args, **options)

    if name == "rename":
        patch.setattr("ds4q.quantize.export.staging.publish", call)
    else:
        patch.setattr(os, name, call)


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize(
    ("call", "number"),
    [("pwrite", 0), ("pwrite", 5), ("ftruncate", 0), ("fsync", 0), ("rename", 0)],
)
def test_a_full_disk_leaves_nothing(
    small_artifact: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    to: str,
    call: str,
    number: int,
) -> None:
    failing(monkeypatch, call, number, errno.ENOSPC)
    says = ["No space left on device", "the export needs", "bytes; nothing was left behind"]
    check_refused(WriteError, lambda: export(small_artifact, tmp_path / "x", to), says=says)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_may_not_be_written_to(
    small_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, "mkdir", 0, errno.EACCES)
    says = ["Permission denied"]
    check_refused(WriteError, lambda: export(small_artifact, tmp_path / "x"), says=says)


def test_free_space_is_looked_at_first(
    small_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = list(os.statvfs(tmp_path))
    values[1], values[4] = 4096, 1  # one block is free
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(values))
    says = ["No space left", "found 4,096 bytes"]
    check_refused(SpaceError, lambda: export(small_artifact, tmp_path / "x"), says=says)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("to", FORMATS)
def test_a_stop_leaves_nothing(small_artifact: Path, tmp_path: Path, to: str) -> None:
    @contextmanager
    def stopping(label: str, total: int) -> Iterator[Callable[[int], None]]:
        def advance(amount: int) -> None:
            raise KeyboardInterrupt

        yield advance

    with pytest.raises(KeyboardInterrupt):
        export(small_artifact, tmp_path / "x", to, progress=stopping)
    assert list(tmp_path.iterdir()) == []


def test_a_stop_while_files_are_made_leaves_nothing(
    small_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.ftruncate

    def ftruncate(fd: int, nbytes: int) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        real(fd, nbytes)

    monkeypatch.setattr(os, "ftruncate", ftruncate)
    with stops.caught(), pytest.raises(stops.Terminated):
        export(small_artifact, tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("to", FORMATS)
def test_a_name_that_is_taken_meanwhile_is_left_to_its_owner(
    small_artifact: Path, tmp_path: Path, to: str
) -> None:
    out = tmp_path / "x"

    @contextmanager
    def meanwhile(label: str, total: int) -> Iterator[Callable[[int], None]]:
        out.write_bytes(b"somebody else's")
        yield lambda amount: None

    check_refused(
        AppearedError, lambda: export(small_artifact, out, to, progress=meanwhile), path=out
    )
    assert list(tmp_path.iterdir()) == [out]
    assert out.read_bytes() == b"somebody else's"


def test_a_file_of_the_user_in_the_unfinished_folder_stays(
    small_artifact: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "x.partial"

    @contextmanager
    def meanwhile(label: str, total: int) -> Iterator[Callable[[int], None]]:
        (folder / "notes").write_bytes(b"mine")
        raise KeyboardInterrupt
        yield lambda amount: None

    with pytest.raises(KeyboardInterrupt):
        export(small_artifact, tmp_path / "x", progress=meanwhile)
    assert [path.name for path in folder.iterdir()] == ["notes"]


def test_progress_reaches_its_end(small_artifact: Path, tmp_path: Path) -> None:
    heard: list[int] = []

    @contextmanager
    def bar(label: str, total: int) -> Iterator[Callable[[int], None]]:
        yield heard.append
        assert sum(heard) == total > 0

    export(small_artifact, tmp_path / "x", progress=bar)
    assert heard


# ---------------------------------------------------------------- damage

EXPERT = "layers.1.ffn.experts.2.w3.weight"


def damaged(artifact: Path, folder: Path, at: int, mask: int, *, receipt: bool) -> Path:
    """A copy with one byte of ``EXPERT`` changed."""
    copy = folder / "damaged.hfq"
    raw = bytearray(artifact.read_bytes())
    with Reader(artifact) as reader:
        raw[reader.entry(EXPERT).offset + at] ^= mask
    copy.write_bytes(raw)
    if receipt:
        receipt_path(copy).write_bytes(receipt_path(artifact).read_bytes())
    return copy


@pytest.mark.parametrize("to", FORMATS)
def test_damage_that_a_receipt_shows_is_refused(
    small_artifact: Path, tmp_path: Path, to: str
) -> None:
    file = damaged(small_artifact, tmp_path, 20, 1, receipt=True)
    out = tmp_path / "x"
    error = check_refused(
        ExportError,
        lambda: export(file, out, to),
        path=file,
        says=[EXPERT, "payload differs from its receipt", "ds4q verify"],
    )
    assert "\n" not in str(error)
    assert not out.exists()
    assert not out.with_name("x.partial").exists()


def test_without_a_receipt_only_illegal_bytes_can_be_refused(
    small_artifact: Path, tmp_path: Path
) -> None:
    legal = damaged(small_artifact, tmp_path, 20, 1, receipt=False)
    done = export(legal, tmp_path / "x")
    assert done.warnings == ("no receipt: the payload could not be compared with its digests",)
    with Reader(small_artifact) as reader:
        scale = int(reader.read(EXPERT)[16])
    nan = damaged(small_artifact, tmp_path, 16, 0xFF ^ scale, receipt=False)
    for to in FORMATS:
        check_refused(
            ExportError,
            lambda to=to: export(nan, tmp_path / "y", to),  # type: ignore[misc]
            says=[EXPERT, "NaN scale byte in row 0, block 0"],
        )


def test_a_receipt_of_another_file_is_refused(small_artifact: Path, tmp_path: Path) -> None:
    file = tmp_path / "x.hfq"
    file.write_bytes(small_artifact.read_bytes() + b"more")
    receipt_path(file).write_bytes(receipt_path(small_artifact).read_bytes())
    error = check_refused(ExportError, lambda: export(file, tmp_path / "x"), path=file)
    assert "4 bytes follow the last payload" in str(error)


def test_a_cut_file_is_refused(small_artifact: Path, tmp_path: Path) -> None:
    file = tmp_path / "x.hfq"
    file.write_bytes(small_artifact.read_bytes()[:-1])
    check_refused(TruncatedError, lambda: export(file, tmp_path / "x"), path=file)


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (
            Tensor("head.weight", 13, (512, 256), 256, bytes(512 * 136)),
            "no codec for tensor type 13",
        ),
        (Tensor("../../pwn", 1, (4,)), "unexpected tensor"),
        (Tensor("/etc/passwd", 1, (4,)), "unexpected tensor"),
        (Tensor("head.weight", 1, (4, 4), 0, bytes(32)), "shape is not what the config implies"),
    ],
    ids=["upstream type", "name that leads out", "absolute name", "shape"],
)
def test_what_verify_would_refuse_is_not_exported(
    tmp_path: Path, to: Any, tensor: Tensor, says: str
) -> None:
    metadata = json.dumps({"config": config_of(TINY)}).encode()
    file, out = tmp_path / "in" / "x.hfq", tmp_path / "in" / "out"
    file.parent.mkdir()
    file.write_bytes(File([tensor], metadata=metadata).data())
    with pytest.raises(Ds4qError, match=says):
        api.export(file, out, to=to)
    assert list(tmp_path.rglob("*")) == [file.parent, file]
