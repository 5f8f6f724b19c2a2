"""The folder of models: no name leaves it, what was verified stays so only while it is the same."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from ds4q.artifact.errors import ChangedError
from ds4q.artifact.files import NotRegularError
from ds4q.registry.entries import Sidecar
from ds4q.registry.errors import UnsafeNameError
from ds4q.registry.store import (
    VERIFIED,
    Store,
    compare_sha256,
    compare_size,
    digest_of,
    models_folder,
)
from tests.checks import check_refused
from tests.registry.shelves import filled

DATA = bytes(range(256)) * 8
SHA256 = hashlib.sha256(DATA).hexdigest()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return filled(tmp_path / "models", {"a.fp4": DATA})


def test_models_are_kept_in_the_home_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DS4Q_HOME", str(tmp_path / "home"))
    assert models_folder() == tmp_path / "home" / "models"
    monkeypatch.delenv("DS4Q_HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert models_folder() == tmp_path / ".cache" / "ds4q" / "models"


@pytest.mark.parametrize(
    "name",
    ["../a.fp4", "/etc/hostname", "sub/../../x", "a\0b", "..\\x", ".verified", "", "..", "."],
)
def test_a_name_never_leaves_the_folder(store: Store, name: str) -> None:
    for call in (store.path, store.size, store.verified, store.digest, store.forget):
        check_refused(UnsafeNameError, lambda call=call: call(name), says=["unsafe name"])  # type: ignore[misc]
    check_refused(UnsafeNameError, lambda: store.note_verified(name, SHA256))


def test_a_linked_folder_is_followed_once(tmp_path: Path) -> None:
    filled(tmp_path / "real", {"a.fp4": DATA})
    filled(tmp_path / "other", {"a.fp4": b"other"})
    link = tmp_path / "models"
    link.symlink_to("real")
    store = Store(link)
    link.unlink()
    link.symlink_to("other")
    assert store.path("a.fp4") == tmp_path / "real" / "a.fp4"
    assert store.digest("a.fp4") == SHA256


def test_a_folder_that_links_to_itself_is_an_error_of_the_system(tmp_path: Path) -> None:
    (tmp_path / "models").symlink_to("models")
    with pytest.raises(OSError, match="symbolic link"):
        Store(tmp_path / "models").size("a.fp4")


def test_sizes_are_those_of_regular_files(store: Store) -> None:
    (store.folder / "d.fp4").mkdir()
    (store.folder / "gone.fp4").symlink_to("nowhere")
    assert store.size("a.fp4") == len(DATA)
    assert [store.size(name) for name in ("b.fp4", "d.fp4", "gone.fp4")] == [None, None, None]


def test_a_note_holds_while_the_file_is_the_same(store: Store) -> None:
    assert store.verified("a.fp4") is None
    store.note_verified("a.fp4", SHA256)
    assert store.verified("a.fp4") == SHA256
    assert Store(store.folder).verified("a.fp4") == SHA256
    store.forget("a.fp4")
    assert store.verified("a.fp4") is None


def test_a_note_ends_with_a_write_that_sets_the_time_back(store: Store) -> None:
    path = store.path("a.fp4")
    store.note_verified("a.fp4", SHA256)
    before = path.stat()
    path.write_bytes(DATA[::-1])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert store.verified("a.fp4") is None


def test_a_note_ends_with_the_file_that_takes_its_place(store: Store, tmp_path: Path) -> None:
    path = store.path("a.fp4")
    store.note_verified("a.fp4", SHA256)
    other = tmp_path / "other"
    other.write_bytes(DATA)
    os.replace(other, path)
    assert store.verified("a.fp4") is None
    path.unlink()
    assert store.verified("a.fp4") is None


@pytest.mark.parametrize("text", ["", "[]", "{}", "not json", '{"sha256": 5}', "\xff"])
def test_a_note_that_is_damaged_is_none(store: Store, text: str) -> None:
    store.note_verified("a.fp4", SHA256)
    (store.folder / VERIFIED / "a.fp4").write_bytes(text.encode("latin-1"))
    assert store.verified("a.fp4") is None


def test_a_digest_must_be_text(store: Store) -> None:
    store.note_verified("a.fp4", SHA256)
    note = store.folder / VERIFIED / "a.fp4"
    note.write_text(note.read_text().replace(f'"{SHA256}"', "5"))
    assert store.verified("a.fp4") is None


def test_a_folder_that_takes_no_notes_is_read_again(store: Store) -> None:
    (store.folder / VERIFIED).write_bytes(b"in the way")
    assert store.digest("a.fp4") == SHA256
    assert store.verified("a.fp4") is None
    assert sorted(p.name for p in store.folder.iterdir()) == [VERIFIED, "a.fp4"]


def test_a_file_that_is_no_note_is_kept(store: Store) -> None:
    note = store.folder / VERIFIED / "a.fp4"
    note.parent.mkdir()
    os.mkfifo(note)
    assert store.digest("a.fp4") == SHA256
    note.unlink()
    note.write_text("mine")
    store.note_verified("a.fp4", SHA256)
    store.forget("a.fp4")
    assert note.read_text() == "mine"
    os.truncate(note, 3 << 30)
    assert store.verified("a.fp4") is None


def test_a_digest_is_noted_and_told_as_it_is_read(store: Store) -> None:
    heard: list[int] = []
    assert store.digest("a.fp4", advance=heard.append) == SHA256
    assert sum(heard) == len(DATA)
    assert store.verified("a.fp4") == SHA256


def test_a_file_that_changes_while_it_is_read_is_refused(store: Store) -> None:
    path = store.path("a.fp4")

    def meanwhile(nbytes: int) -> None:
        with path.open("ab") as file:
            file.write(b"more")

    check_refused(ChangedError, lambda: digest_of(path, advance=meanwhile), path=path)
    path.write_bytes(bytes(3 << 20))
    check_refused(
        ChangedError, lambda: digest_of(path, advance=lambda n: os.truncate(path, 1)), path=path
    )
    check_refused(ChangedError, lambda: store.digest("a.fp4", advance=meanwhile))
    assert store.verified("a.fp4") is None


@pytest.mark.parametrize("kind", ["link", "pipe", "long"])
def test_a_note_is_read_and_written_in_its_folder_only(
    store: Store, tmp_path: Path, kind: str
) -> None:
    notes = store.folder / VERIFIED
    if kind == "link":
        (tmp_path / "elsewhere").mkdir()
        notes.symlink_to(tmp_path / "elsewhere")
    else:
        notes.mkdir()
        if kind == "pipe":
            os.mkfifo(notes / "a.fp4")
        else:
            (notes / "a.fp4").touch()
            os.truncate(notes / "a.fp4", 3 << 30)
    assert store.verified("a.fp4") is None
    assert store.digest("a.fp4") == SHA256
    assert store.verified("a.fp4") is None
    store.forget("a.fp4")
    assert kind == "link" or [path.name for path in notes.iterdir()] == ["a.fp4"]
    if kind == "link":
        assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_named_pipe_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.fp4")
    check_refused(NotRegularError, lambda: digest_of(tmp_path / "a.fp4"), path=tmp_path / "a.fp4")


def test_lengths_are_told_with_both_values() -> None:
    what = Sidecar("dspark", "d.fp4", SHA256, 1000)
    assert list(compare_size(what, 1000)) == []
    (short,) = compare_size(what, 999)
    assert (short.message, short.expected, short.found) == (
        "d.fp4 is incomplete: 999 of 1000 bytes",
        1000,
        999,
    )
    (long,) = compare_size(what, 1001)
    assert long.message == "d.fp4 is longer than its registry entry says"
    assert (long.expected, long.found) == (1000, 1001)
    assert list(compare_size(Sidecar("dspark", "d.fp4", None, None), 5)) == []


def test_digests_are_told_with_both_values() -> None:
    what = Sidecar("dspark", "d.fp4", SHA256, 1000)
    assert list(compare_sha256(what, SHA256)) == []
    (other,) = compare_sha256(what, "0" * 64)
    assert other.message == "SHA-256 of d.fp4 differs from its registry entry"
    assert (other.expected, other.found) == (SHA256, "0" * 64)
    assert list(compare_sha256(Sidecar("dspark", "d.fp4", None, None), SHA256)) == []
