"""Pulling a tag: its files in order, what is there already, repair, the hub, refusals."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from ds4q.artifact.receipt import read_receipt, receipt_path
from ds4q.registry import transfer
from ds4q.registry.entries import Entry, load_registry
from ds4q.registry.errors import (
    DigestError,
    ExistsError,
    HubError,
    LocalOnlyError,
    OtherFileError,
    PullError,
    RefusedError,
    SpaceError,
    UnsafeNameError,
    UnverifiedError,
)
from ds4q.registry.pull import damaged_ranges, pull
from ds4q.registry.store import Store
from tests.checks import check_refused
from tests.registry import artifacts
from tests.registry.hubs import COMMIT, REPO, hub_page
from tests.registry.server import Fault, Request, Server, serving

NAME = "flash.fp4"
DRAFT = "flash-dspark.fp4"
ADAPTER = "flash-adapter-r128.bin"
ROWS = 16  # a tensor of 256 KiB


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trunk of 12 MiB with its receipt, a draft and an adapter."""
    folder = tmp_path_factory.mktemp("served")
    artifacts.write(folder / NAME, 48, ROWS)
    (folder / DRAFT).write_bytes(b"draft" * 1000)
    (folder / ADAPTER).write_bytes(b"adapter" * 100)
    return folder


@pytest.fixture
def server(served: Path) -> Iterator[Server]:
    with serving(served) as running:
        yield running


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "PAUSE_S", 0.001)


@pytest.fixture
def models(tmp_path: Path) -> Path:
    return tmp_path / "home" / "models"


def entry_of(repo: str, served: Path, tmp_path: Path, **changes: Any) -> Entry:
    """The entry of what is served, out of a registry document."""
    changes = {
        "dspark": artifacts.registered(served / DRAFT),
        "adapter": artifacts.registered(served / ADAPTER),
    } | changes
    document = tmp_path / "registry.json"
    document.write_text(json.dumps(artifacts.document(repo, served / NAME, **changes)))
    return load_registry(str(document)).entries[artifacts.TAG]


@pytest.fixture
def entry(server: Server, served: Path, tmp_path: Path) -> Entry:
    return entry_of(server.url("").rstrip("/"), served, tmp_path)


def files_of(server: Server) -> list[str]:
    """What the server was asked for, in order, once each."""
    return list(dict.fromkeys(urlsplit(r.path).path.lstrip("/") for r in server.requests))


def test_receipt_trunk_and_draft_come_in_this_order(
    entry: Entry, server: Server, served: Path, models: Path
) -> None:
    pulled = pull(entry, models)
    assert files_of(server) == [NAME + ".receipt", NAME, DRAFT]
    assert [(f.kind, f.state) for f in pulled.files] == [
        ("receipt", "fetched"),
        ("trunk", "fetched"),
        ("dspark", "fetched"),
    ]
    for file in pulled.files:
        data = (served / file.file).read_bytes()
        assert Path(file.path).read_bytes() == data
        assert file.path == str(models / file.file)
        assert (file.size_bytes, file.unverified) == (len(data), False)
        assert file.sha256 == hashlib.sha256(data).hexdigest()
        assert Store(models).verified(file.file) == file.sha256
    assert pulled.commit is None
    assert json.loads(json.dumps(pulled.document()))["files"][1]["file"] == NAME


def test_what_is_there_is_not_fetched_again(entry: Entry, server: Server, models: Path) -> None:
    pull(entry, models)
    server.requests.clear()
    assert {f.state for f in pull(entry, models).files} == {"present"}
    assert server.requests == []


def test_a_file_that_was_put_there_is_read_not_believed(
    entry: Entry, server: Server, served: Path, models: Path
) -> None:
    models.mkdir(parents=True)
    data = bytearray((served / NAME).read_bytes())
    data[-1] ^= 1
    (models / NAME).write_bytes(data)
    error = check_refused(OtherFileError, lambda: pull(entry, models), path=models / NAME)
    assert error.expected == entry.sha256
    assert error.found == hashlib.sha256(data).hexdigest()
    assert (models / NAME).read_bytes() == data
    assert server.requests == []
    (models / NAME).write_bytes(data[:-1])
    error = check_refused(OtherFileError, lambda: pull(entry, models), path=models / NAME)
    assert (error.expected, error.found) == (len(data), len(data) - 1)
    (models / NAME).write_bytes((served / NAME).read_bytes())
    assert [f.state for f in pull(entry, models).files] == ["fetched", "present", "fetched"]


def test_a_noted_file_that_changed_is_read_again(entry: Entry, models: Path) -> None:
    pull(entry, models)
    with (models / NAME).open("r+b") as file:
        file.write(b"HFQX")
    check_refused(OtherFileError, lambda: pull(entry, models), path=models / NAME)


def test_force_replaces_what_is_not_the_registered_file_and_nothing_else(
    entry: Entry, server: Server, served: Path, models: Path
) -> None:
    models.mkdir(parents=True)
    (models / NAME).write_bytes(b"another")
    (models / DRAFT).write_bytes((served / DRAFT).read_bytes())
    states = {f.kind: f.state for f in pull(entry, models, force=True).files}
    assert states == {"receipt": "fetched", "trunk": "fetched", "dspark": "present"}
    assert (models / NAME).read_bytes() == (served / NAME).read_bytes()
    assert DRAFT not in files_of(server)
    with (models / NAME).open("r+b") as file:
        file.write(b"HFQX")
    server.requests.clear()
    pull(entry, models, force=True)
    assert files_of(server) == [NAME]
    assert (models / NAME).read_bytes() == (served / NAME).read_bytes()


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("file", [NAME, DRAFT])
def test_a_folder_in_the_way_is_told_before_a_byte_is_fetched(
    file: str, force: bool, entry: Entry, server: Server, models: Path
) -> None:
    (models / file).mkdir(parents=True)
    error = check_refused(
        ExistsError, lambda: pull(entry, models, force=force), path=models / file, says=["a folder"]
    )
    assert "move it away" in str(error)
    assert "--force" not in str(error)
    assert server.requests == []


def test_a_link_to_nothing_is_replaced_only_when_asked(
    entry: Entry, server: Server, models: Path
) -> None:
    models.mkdir(parents=True)
    (models / DRAFT).symlink_to("nowhere")
    check_refused(ExistsError, lambda: pull(entry, models), path=models / DRAFT, says=["--force"])
    assert server.requests == []
    pull(entry, models, force=True)
    assert not (models / DRAFT).is_symlink()


def test_the_trunk_alone_comes_with_its_receipt(entry: Entry, server: Server, models: Path) -> None:
    pull(entry, models, trunk_only=True)
    assert files_of(server) == [NAME + ".receipt", NAME]


def test_the_adapter_comes_when_it_is_asked_for(entry: Entry, server: Server, models: Path) -> None:
    pull(entry, models, adapter=True)
    assert set(files_of(server)) == {NAME + ".receipt", NAME, DRAFT, ADAPTER}


def test_a_sidecar_that_fails_is_a_failure(entry: Entry, server: Server, models: Path) -> None:
    server.fault = lambda request: Fault(status=404 if DRAFT in request.path else 0)
    error = check_refused(PullError, lambda: pull(entry, models, adapter=True), path=entry.tag)
    assert DRAFT in str(error)
    assert str(error).endswith("; check the address and your access; or do without by --trunk-only")
    assert str(error).count("check the address") == 1
    assert sorted(p.name for p in models.iterdir() if p.is_file()) == [
        ADAPTER,
        NAME,
        NAME + ".receipt",
    ]
    server.fault = lambda request: Fault()
    states = {f.kind: f.state for f in pull(entry, models).files}
    assert states == {"receipt": "present", "trunk": "present", "dspark": "fetched"}


def test_a_sidecar_that_another_file_stands_for_is_a_failure_too(
    entry: Entry, server: Server, models: Path
) -> None:
    models.mkdir(parents=True)
    (models / DRAFT).write_bytes(b"mine")
    check_refused(OtherFileError, lambda: pull(entry, models), path=models / DRAFT)
    assert (models / DRAFT).read_bytes() == b"mine"
    assert {f.kind for f in pull(entry, models, trunk_only=True).files} == {"receipt", "trunk"}


def test_a_receipt_that_the_server_lacks_leaves_the_rest_pulled(
    entry: Entry, server: Server, models: Path
) -> None:
    receipt = NAME + ".receipt"
    server.fault = lambda request: Fault(status=404 if request.path.endswith("receipt") else 0)
    error = check_refused(PullError, lambda: pull(entry, models), says=["HTTP 404", receipt])
    assert "--trunk-only" not in str(error)  # it would ask for the receipt, too
    assert {NAME, DRAFT} <= {path.name for path in models.iterdir()}
    server.fault = lambda request: Fault()
    assert {f.state for f in pull(entry, models).files} == {"present", "fetched"}


def test_a_trunk_that_the_server_lacks_ends_a_pull(
    entry: Entry, server: Server, models: Path
) -> None:
    server.fault = lambda request: Fault(status=404)
    error = check_refused(RefusedError, lambda: pull(entry, models))
    assert error.path == server.url(NAME)


def test_a_draft_comes_with_its_receipt_and_is_mended_by_it(
    server: Server, served: Path, models: Path, tmp_path: Path
) -> None:
    draft = served / "t-dspark.fp4"
    artifacts.write(draft, tensors=3, rows=400, seed=2)
    receipt = draft.with_name(draft.name + ".receipt")
    sidecars = {
        "dspark": artifacts.registered(draft),
        "dspark_receipt": artifacts.registered(receipt),
    }
    entry = entry_of(server.url("").rstrip("/"), served, tmp_path, **sidecars)
    damage = iter([Fault(flip_at=5_000_000)])
    server.fault = lambda request: (
        next(damage, Fault()) if request.path == f"/{draft.name}" else Fault()
    )
    lines: list[str] = []
    done = pull(entry, models, tell=lines.append)
    assert [f.kind for f in done.files] == ["receipt", "trunk", "dspark_receipt", "dspark"]
    assert (models / draft.name).read_bytes() == draft.read_bytes()
    assert (models / receipt.name).read_bytes() == receipt.read_bytes()
    assert any("damaged blocks" in line for line in lines)
    draft.unlink()
    receipt.unlink()


def test_wrong_bytes_of_a_trunk_are_found_by_its_receipt(
    entry: Entry, server: Server, served: Path, models: Path
) -> None:
    damage = iter([Fault(flip_at=5), Fault(), Fault(flip_at=5_000_000)])

    def fault(request: Request) -> Fault:
        return next(damage, Fault()) if request.path == f"/{NAME}" else Fault()

    server.fault = fault
    lines: list[str] = []
    pull(entry, models, tell=lines.append)
    assert (models / NAME).read_bytes() == (served / NAME).read_bytes()
    assert any("damaged blocks" in line for line in lines)


def test_damage_is_found_wherever_it_is(served: Path, tmp_path: Path) -> None:
    receipt = read_receipt(receipt_path(served / NAME))
    whole = (served / NAME).read_bytes()
    path = tmp_path / NAME
    front = receipt.file_bytes - sum(record.nbytes for record in receipt.tensors)
    size = receipt.tensors[0].nbytes

    def damaged(*at: int) -> list[tuple[int, int]]:
        data = bytearray(whole)
        for each in at:
            data[each] ^= 1
        path.write_bytes(data)
        return damaged_ranges(path, receipt)

    assert damaged(0) == damaged(5) == damaged(30) == damaged(100) == [(0, front)]
    assert damaged(front - 1) == [(0, front)]  # padding, which no digest covers
    assert damaged(front) == damaged(front + size - 1) == [(front, size)]
    assert damaged(front + size, len(whole) - 1) == [
        (front + size, size),
        (len(whole) - size, size),
    ]


def test_a_stale_digest_is_told_with_both_values(
    entry: Entry, server: Server, models: Path
) -> None:
    stale = replace(entry, sha256="0" * 64)
    error = check_refused(DigestError, lambda: pull(stale, models), path=models / NAME)
    assert (error.expected, error.found) == ("0" * 64, entry.sha256)
    assert not (models / NAME).exists()


# --- before anything is done ------------------------------------------------------------------


def test_a_local_entry_has_nowhere_to_be_pulled_from(
    served: Path, models: Path, tmp_path: Path
) -> None:
    local = entry_of("", served, tmp_path)
    check_refused(LocalOnlyError, lambda: pull(local, models), path=local.tag, says=[str(models)])
    models.mkdir(parents=True)
    for name in (NAME, NAME + ".receipt", DRAFT):
        (models / name).write_bytes((served / name).read_bytes())
    assert {f.state for f in pull(local, models).files} == {"present"}


def test_a_file_without_a_digest_needs_a_word(
    served: Path, server: Server, models: Path, tmp_path: Path
) -> None:
    bare = {"file": DRAFT, "unverified": True}
    entry = entry_of(server.url("").rstrip("/"), served, tmp_path, dspark=bare)
    check_refused(UnverifiedError, lambda: pull(entry, models), says=[DRAFT, "--allow-unverified"])
    assert server.requests == []
    assert {f.kind for f in pull(entry, models, trunk_only=True).files} == {"receipt", "trunk"}
    files = {f.kind: f for f in pull(entry, models, allow_unverified=True).files}
    assert files["dspark"].unverified
    assert files["dspark"].sha256 == hashlib.sha256((served / DRAFT).read_bytes()).hexdigest()
    assert not files["trunk"].unverified


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", ".hidden", "a\\b", "a\0b", ""])
def test_no_name_leaves_the_folder(name: str, entry: Entry, server: Server, models: Path) -> None:
    for wrong in (
        replace(entry, file=name),
        replace(entry, sidecars=(replace(entry.sidecars[-1], kind="dspark", file=name),)),
    ):
        check_refused(UnsafeNameError, partial(pull, wrong, models))
    assert server.requests == []
    assert not models.exists()


def test_a_dry_run_asks_nobody(entry: Entry, server: Server, served: Path, models: Path) -> None:
    models.mkdir(parents=True)
    (models / DRAFT).write_bytes((served / DRAFT).read_bytes())
    pulled = pull(entry, models, dry_run=True)
    assert [(f.kind, f.state) for f in pulled.files] == [
        ("receipt", "would fetch"),
        ("trunk", "would fetch"),
        ("dspark", "present"),
    ]
    assert pulled.files[1].size_bytes == entry.size_bytes
    assert server.requests == []
    assert sorted(p.name for p in models.iterdir() if p.is_file()) == [DRAFT]


def test_room_for_all_files_is_checked_first(
    entry: Entry, server: Server, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Room:
        f_blocks, f_bavail, f_frsize = 1, (entry.size_bytes or 0) // 512, 512

    monkeypatch.setattr("os.statvfs", lambda path: Room)
    check_refused(SpaceError, lambda: pull(entry, models), path=models)
    assert server.requests == []


def test_a_folder_that_is_a_link_is_followed(
    entry: Entry, served: Path, models: Path, tmp_path: Path
) -> None:
    (tmp_path / "disk").mkdir()
    models.parent.mkdir()
    models.symlink_to(tmp_path / "disk")
    pull(entry, models)
    assert (tmp_path / "disk" / NAME).read_bytes() == (served / NAME).read_bytes()
    assert models.is_symlink()


def test_a_folder_that_cannot_be_one(entry: Entry, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError, match=r"Not a directory|File exists"):
        pull(entry, tmp_path / "file" / "models")


# --- where from -------------------------------------------------------------------------------


def test_a_folder_of_this_machine(served: Path, models: Path, tmp_path: Path) -> None:
    pull(entry_of(served.as_uri(), served, tmp_path), models)
    assert (models / NAME).read_bytes() == (served / NAME).read_bytes()


@pytest.fixture
def hub(
    server: Server, served: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Server]:
    """A hub that leads to ``server`` for the bytes, as the real one leads to its storage."""
    (tmp_path / "empty").mkdir()
    with serving(tmp_path / "empty") as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url("").rstrip("/"))
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        known = {}
        for path in served.iterdir():
            is_lfs = path.suffix != ".receipt"
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            known[path.name] = (path.stat().st_size, digest if is_lfs else None)
        running.pages[f"/api/models/{REPO}"] = hub_page(known)
        stem = f"/{REPO}/resolve/{COMMIT}/"

        def lead(request: Request) -> Fault:
            if not request.path.startswith(stem):
                return Fault(status=404)
            return Fault(location=server.url(request.path.removeprefix(stem) + "?signed=1"))

        running.fault = lead
        yield running


def test_the_hub_leads_to_the_bytes_and_its_token_stays_there(
    hub: Server, server: Server, served: Path, models: Path, tmp_path: Path
) -> None:
    lines: list[str] = []
    pulled = pull(entry_of(REPO, served, tmp_path), models, tell=lines.append)
    assert pulled.commit == COMMIT
    assert any(COMMIT in line for line in lines)
    assert (models / NAME).read_bytes() == (served / NAME).read_bytes()
    asked = [r for r in hub.requests if "/resolve/" in r.path]
    assert {r.headers.get("authorization") for r in asked} == {"Bearer hf_secret"}
    assert all("authorization" not in r.headers for r in server.requests)
    assert not any("hf_secret" in line for line in lines)


def test_another_file_on_the_hub_is_told_before_it_is_fetched(
    hub: Server, server: Server, served: Path, models: Path, tmp_path: Path
) -> None:
    entry = entry_of(REPO, served, tmp_path)
    for stale, values in (
        (replace(entry, sha256="0" * 64), ("0" * 64, entry.sha256)),
        (replace(entry, size_bytes=5), (5, entry.size_bytes)),
    ):
        error = check_refused(HubError, partial(pull, stale, models), path=REPO)
        assert (error.expected, error.found) == values
    draft = artifacts.registered(served / DRAFT) | {"sha256": "0" * 64}
    stale = entry_of(REPO, served, tmp_path, dspark=draft)
    check_refused(HubError, lambda: pull(stale, models), path=REPO, says=["nothing was fetched"])
    assert server.requests == []
    assert not models.exists()


def test_the_hubs_own_digest_stands_in_where_none_is_registered(
    hub: Server, server: Server, served: Path, models: Path, tmp_path: Path
) -> None:
    entry = entry_of(REPO, served, tmp_path, dspark={"file": DRAFT, "unverified": True})
    server.fault = lambda request: Fault(flip_at=3 if DRAFT in request.path else None)
    error = check_refused(PullError, lambda: pull(entry, models, allow_unverified=True))
    assert "SHA-256" in str(error)
    assert not (models / DRAFT).exists()


def test_a_file_that_the_hub_lacks(hub: Server, served: Path, models: Path, tmp_path: Path) -> None:
    draft = artifacts.registered(served / DRAFT) | {"file": "other-dspark.fp4"}
    entry = entry_of(REPO, served, tmp_path, dspark=draft)
    error = check_refused(PullError, lambda: pull(entry, models))
    assert "other-dspark.fp4 is not in this repo" in str(error)
