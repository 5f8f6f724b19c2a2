"""Whole jobs: where output may go, what is refused before work, and every failing system call."""

from __future__ import annotations

import os
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ds4q import api
from ds4q.artifact.errors import Ds4qError
from ds4q.artifact.files import AppearedError, ForeignFileError
from ds4q.artifact.locks import LockedError, WriteError
from ds4q.artifact.receipt import read_receipt
from ds4q.artifact.writer import PartialFile
from ds4q.quantize.job import SpaceError
from ds4q.quantize.journal import Journal
from ds4q.quantize.outputs import MARK, OutputExistsError, OutputPlaceError, UnfinishedError
from tests.checks import check_refused
from tests.quantize import models

CALLS = ("pwrite", "write", "fsync", "ftruncate", "replace")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty output folder."""
    (tmp_path / "o").mkdir()
    return tmp_path / "o"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ---------------------------------------------------------------- the summary


def test_summary_has_the_promised_keys(source: Path, folder: Path) -> None:
    document = models.run(source, folder / "x.hfq").document()
    promised = "output bytes tensors sha256 seconds source_bytes types bpw_experts"
    assert set(promised.split()) <= document.keys()
    assert document["output"] == str(folder / "x.hfq")
    assert document["bytes"] == (folder / "x.hfq").stat().st_size
    assert document["source_bytes"] == sum(len(t.data) for t in models.mini_tensors().values())
    assert document["sha256"] == models.digests(folder)["x.hfq"]
    assert document["types"]["HFP4G32"]["tensors"] == 3
    (sidecar,) = document["sidecars"]
    assert sidecar["output"] == str(folder / "x-dspark.hfq")
    assert sidecar["sha256"] == models.digests(folder)["x-dspark.hfq"]
    assert (document["resumed_bytes"], document["already_done"]) == (0, False)


def test_bits_per_weight_count_headers_and_scales(folder: Path, source: Path) -> None:
    document = models.run(source, folder / "x.hfq").document()
    nbytes = 2 * 96 * (16 + 17 * 8) + 4 * (16 + 17 * 2)
    assert document["bpw_experts"] == round(8 * nbytes / (2 * 96 * 256 + 4 * 64), 6)
    only = models.run(source, folder / "y.hfq", include=["layers.0.attn"]).document()
    assert only["bpw_experts"] is None


def test_partial_is_recorded_in_metadata_and_receipt(source: Path, folder: Path) -> None:
    summary = models.run(source, folder / "x.hfq")
    assert summary.document()["partial"] is True
    for path in folder.glob("*.hfq"):
        assert read_receipt(Path(f"{path}.receipt")).partial is True
        report = api.verify(path)
        inventory = next(check for check in report.checks if check.name == "inventory")
        assert inventory.figures["partial"] is True


def test_without_allow_partial_a_part_is_refused(source: Path, folder: Path) -> None:
    with pytest.raises(Ds4qError, match="missing"):
        models.run(source, folder / "x.hfq", allow_partial=False)
    assert names(folder) == []


# ---------------------------------------------------------------- where output may go


def test_output_folder_must_exist(source: Path, folder: Path) -> None:
    check_refused(
        OutputPlaceError,
        lambda: models.run(source, folder / "no" / "x.hfq"),
        path=folder / "no",
        says=["output folder does not exist"],
    )
    assert names(folder) == []


@pytest.mark.parametrize("below", [".", "sub/deeper"])
@pytest.mark.parametrize("linked", [False, True])
def test_output_inside_the_source_is_refused(below: str, linked: bool, tmp_path: Path) -> None:
    source = models.mini(tmp_path / "s")
    (source / "sub" / "deeper").mkdir(parents=True)
    before = models.digests_below(source)
    if linked:
        (tmp_path / "link").symlink_to(source, target_is_directory=True)
    out = (tmp_path / "link" if linked else source) / below / "x.hfq"
    check_refused(
        OutputPlaceError, lambda: models.run(source, out, force=True), says=["inside the source"]
    )
    assert models.digests_below(source) == before


@pytest.mark.parametrize(
    "which", ["x.hfq", "x.hfq.receipt", "x-dspark.hfq", "x-dspark.hfq.receipt"]
)
def test_a_folder_at_a_final_name_is_refused_even_with_force(
    which: str, source: Path, folder: Path
) -> None:
    (folder / which).mkdir()
    for force in (False, True):
        check_refused(
            OutputPlaceError if which == "x.hfq" else ForeignFileError,
            partial(models.run, source, folder / "x.hfq", force=force),
            path=folder / which,
            says=["found a folder"],
        )
    assert names(folder) == [which]


def test_a_device_is_refused_and_stays_one(source: Path) -> None:
    for force in (False, True):
        check_refused(
            OutputPlaceError,
            partial(models.run, source, Path("/dev/full"), force=force),
            path="/dev/full",
        )
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)
    assert not Path("/dev/full.partial").exists()
    assert not Path("/dev/full.journal").exists()


def test_existing_output_is_refused_without_force(
    source: Path, folder: Path, expected: dict[str, str]
) -> None:
    (folder / "x.hfq").write_text("somebody's")
    for resume in (False, True):
        check_refused(
            OutputExistsError,
            partial(models.run, source, folder / "x.hfq", resume=resume),
            path=folder / "x.hfq",
            says=["--force"],
        )
    assert names(folder) == ["x.hfq"]
    assert (folder / "x.hfq").read_text() == "somebody's"
    models.run(source, folder / "x.hfq", force=True)
    assert models.digests(folder) == expected


DERIVED = ["x.hfq.receipt", "x-dspark.hfq", "x-dspark.hfq.receipt"]
DERIVED += [f"{name}.partial" for name in ("x.hfq", *DERIVED)] + ["x.hfq.journal"]


@pytest.mark.parametrize("which", DERIVED)
def test_a_file_of_the_user_at_a_derived_name_is_kept_whatever_the_options(
    which: str, source: Path, folder: Path, tmp_path: Path
) -> None:
    """Text, an empty file, a 3 GiB hole, a pipe, a link, and a hard link to an input."""

    def hole(path: Path) -> None:
        path.touch()
        os.truncate(path, 3 << 30)

    kinds: list[Callable[[Path], object]] = [
        lambda path: path.write_text("my diary"),
        Path.touch,
        hole,
        os.mkfifo,
        lambda path: path.symlink_to(source / "config.json"),
        lambda path: os.link(source / "config.json", path),
    ]
    inputs = models.digests(source)
    for make in kinds:
        make(folder / which)
        before = os.lstat(folder / which)
        for options in ({}, {"resume": True}, {"force": True}, {"dry_run": True}):
            check_refused(
                ForeignFileError,
                partial(models.run, source, folder / "x.hfq", **options),
                path=folder / which,
                says=["did not write", "move it away"],
            )
        after = os.lstat(folder / which)
        assert (after.st_ino, after.st_size, after.st_mtime_ns) == (
            before.st_ino,
            before.st_size,
            before.st_mtime_ns,
        )
        assert names(folder) == [which]
        (folder / which).unlink()
    assert models.digests(source) == inputs


@pytest.mark.parametrize("which", ["x.hfq", "x.hfq.receipt"])
@pytest.mark.parametrize("force", [False, True])
def test_a_file_that_appears_meanwhile_is_kept(
    which: str, force: bool, source: Path, folder: Path, expected: dict[str, str]
) -> None:
    """The work is kept, too: once the file is out of the way, --resume publishes it."""
    appeared = threading.Event()

    def progress(label: str, total: int) -> Any:
        def advance(nbytes: int) -> None:
            if not appeared.is_set():
                appeared.set()
                (folder / which).write_text("copied here meanwhile")

        return nullcontext(advance)

    def job(**options: Any) -> None:
        models.run(source, folder / "x.hfq", progress=progress, force=force, **options)

    if force and which == "x.hfq":  # the user allowed that this name is replaced
        job()
    else:
        kind = ForeignFileError if force else AppearedError
        check_refused(kind, job, path=folder / which)
        assert (folder / which).read_text() == "copied here meanwhile"
        assert not (folder / "x-dspark.hfq").exists()
        (folder / which).unlink()
        models.run(source, folder / "x.hfq", resume=True)
    assert models.digests(folder) == expected


def test_a_name_must_leave_room_for_all_its_siblings(source: Path, folder: Path) -> None:
    """The longest is that of the draft's unfinished receipt."""
    longest = "-dspark.hfq.receipt.partial"
    name = "x" * (255 - len(longest))
    check_refused(
        OutputPlaceError,
        lambda: models.run(source, folder / f"{name}y.hfq"),
        says=["too long", "at most 255 bytes", "found 256 bytes", "1 bytes shorter"],
    )
    assert names(folder) == []
    models.run(source, folder / f"{name}.hfq")
    assert f"{name}-dspark.hfq.receipt" in names(folder)


def test_output_beside_a_single_file_source(tmp_path: Path) -> None:
    models.save(tmp_path, models.mini_tensors(), shard_of=lambda name: "all")
    before = models.digests(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    source = tmp_path / "model-all.safetensors"
    models.run(source, tmp_path / "x.hfq")
    assert api.verify(tmp_path / "x.hfq", require_receipt=True).ok
    for name in ("model-all.safetensors", "config.json"):
        check_refused(
            OutputPlaceError,
            partial(models.run, source, tmp_path / name, force=True),
            says=["an input of this job"],
        )
        assert models.digests(tmp_path)[name] == before[name]


@pytest.mark.parametrize("dangling", [False, True])
@pytest.mark.parametrize(
    "which", ["x.hfq", "x.hfq.receipt", "x.hfq.partial", "x.hfq.receipt.partial"]
)
def test_a_link_is_neither_followed_nor_replaced(
    which: str, dangling: bool, source: Path, folder: Path, tmp_path: Path
) -> None:
    """Bytes would go where the user did not see them go."""
    precious = tmp_path / "precious"
    if not dangling:
        precious.write_text("untouched")
    (folder / which).symlink_to(precious)
    for force in (False, True):
        check_refused(
            OutputPlaceError if which == "x.hfq" else ForeignFileError,
            partial(models.run, source, folder / "x.hfq", force=force),
            path=folder / which,
            says=["found a symbolic link"],
        )
    assert names(folder) == [which]
    assert precious.exists() != dangling
    assert dangling or precious.read_text() == "untouched"


def test_a_job_that_lies_unfinished_says_how_much_is_done(source: Path, folder: Path) -> None:
    def stop(*arguments: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ds4q.quantize.job.seal", stop)
        with pytest.raises(KeyboardInterrupt):
            models.run(source, folder / "x.hfq")
    before = models.digests(folder)
    total = models.run(source, folder / "y.hfq", dry_run=True)
    done = total.plan.payload_bytes
    check_refused(
        UnfinishedError,
        lambda: models.run(source, folder / "x.hfq"),
        path=folder / "x.hfq.partial",
        says=[f"{done:,} of {total.plan.file_bytes:,} bytes done", "--resume", "--force"],
    )
    assert models.digests(folder) == before


def test_starting_over_forgets_the_unfinished_job(
    source: Path, folder: Path, expected: dict[str, str]
) -> None:
    (folder / "x.hfq.partial").write_bytes(MARK + b"\xff" * 500_000)
    (folder / "x-dspark.hfq.partial").write_bytes(MARK + b"\xff" * 10)
    models.run(source, folder / "y.hfq")
    receipt = (folder / "y.hfq.receipt").read_bytes()
    for path in folder.glob("y*"):
        path.unlink()
    (folder / "x.hfq.receipt.partial").write_bytes(receipt)
    (folder / "x.hfq.journal").write_text('0123456789abcdef {"format":"ds4q.journal.v1", torn')
    models.run(source, folder / "x.hfq", force=True)
    assert models.digests(folder) == expected


def test_starting_over_with_other_outputs_leaves_no_partial_file(
    source: Path, folder: Path
) -> None:
    """The abandoned job wanted a sidecar, the new one does not."""

    def stop(*arguments: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "publish", stop)  # all receipts are written
        with pytest.raises(KeyboardInterrupt):
            models.run(source, folder / "x.hfq")
    assert "x-dspark.hfq.receipt.partial" in names(folder)
    assert "x-dspark.hfq.partial" in names(folder)
    models.run(source, folder / "x.hfq", draft="keep", force=True)
    assert names(folder) == ["x.hfq", "x.hfq.receipt"]


# ---------------------------------------------------------------- space, locks, rights


def test_too_little_space_is_refused_before_work(
    source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    promised = models.run(source, folder / "x.hfq", dry_run=True).plan.file_bytes

    class Disk:
        f_blocks = f_frsize = 1
        f_bavail = promised

    monkeypatch.setattr(os, "statvfs", lambda path: Disk())
    error = check_refused(
        SpaceError,
        lambda: models.run(source, folder / "x.hfq"),
        path=folder,
        says=["No space left", f"found {promised:,} bytes", "bytes; free some space"],
    )
    assert int(str(error.expected).split()[0].replace(",", "")) >= promised
    assert names(folder) == []
    monkeypatch.setattr(Disk, "f_bavail", promised + 100_000)
    models.run(source, folder / "x.hfq")


def test_a_second_job_on_the_same_output_is_refused(
    source: Path, folder: Path, expected: dict[str, str]
) -> None:
    """Neither starting over nor going on may disturb the job that holds the files."""
    packing, go_on = threading.Event(), threading.Event()

    def progress(label: str, total: int) -> Any:
        from contextlib import nullcontext

        def advance(nbytes: int) -> None:
            packing.set()
            assert go_on.wait(300)

        return nullcontext(advance)

    first = threading.Thread(
        target=models.run, args=(source, folder / "x.hfq"), kwargs={"progress": progress}
    )
    first.start()
    try:
        assert packing.wait(300)
        with pytest.raises(UnfinishedError):
            models.run(source, folder / "x.hfq")
        for options in ({"force": True}, {"resume": True}):
            check_refused(
                LockedError,
                partial(models.run, source, folder / "x.hfq", **options),
                path=folder / "x.hfq.partial",
                says=["another ds4q process"],
            )
    finally:
        go_on.set()
        first.join()
    assert models.digests(folder) == expected


def test_a_lock_on_the_sidecar_alone_leaves_it_alone(source: Path, folder: Path) -> None:
    """Another job may write x-dspark.hfq as its own trunk."""
    other = PartialFile(folder / "x-dspark.hfq", 70, mark=MARK)
    other.allocate()
    with pytest.raises(LockedError):
        models.run(source, folder / "x.hfq", force=True)
    assert (folder / "x-dspark.hfq.partial").stat().st_size == 70
    assert not (folder / "x.hfq.journal").exists()
    other.close()


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Root ignores modes, so for root the folder becomes a read-only mount, where it can."""
    if os.geteuid():
        folder.chmod(0o555)
    elif not models.mount("--bind", "-o", "ro", folder, folder):
        pytest.skip("cannot mount a read-only folder here")
    try:
        yield
    finally:
        if os.geteuid():
            folder.chmod(0o755)
        else:
            subprocess.run(["umount", str(folder)], check=True)


def test_a_read_only_folder_is_refused(source: Path, folder: Path) -> None:
    with read_only(folder):
        with pytest.raises(WriteError, match=r"Read-only file system|Permission denied") as caught:
            models.run(source, folder / "x.hfq")
        assert str(folder) in str(caught.value)
        assert models.run(source, folder / "x.hfq", dry_run=True).plan.outputs
        assert names(folder) == []
