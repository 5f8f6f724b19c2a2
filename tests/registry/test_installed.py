"""What of a registry is in the folder: states, drafts by exact name, artifacts without a tag."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ds4q.registry.installed import companions, model_of, models, registered_files, strays
from tests.registry.shelves import filled, registered, registry_of, sidecar

DATA = b"trunk " * 20
DRAFT = b"draft"
ENTRY = registered("flash.fp4", DATA, dspark=sidecar("flash-dspark.fp4", DRAFT))


def states(folder: Path, files: dict[str, bytes], *, noted: str | None = None) -> list[str]:
    """States of trunk and draft where these files are there."""
    registry, store = registry_of({"m:fp4": ENTRY}), filled(folder, files)
    if noted is not None:
        store.note_verified("flash.fp4", noted)
    model = model_of(registry, store, registry.entries["m:fp4"])
    return [held.state for held in model.files]


def test_nothing_is_hashed_to_tell_where_files_stand(tmp_path: Path) -> None:
    right = ENTRY["sha256"]
    assert states(tmp_path / "0", {}) == ["absent", "absent"]
    assert states(tmp_path / "1", {"flash.fp4.partial": b"x"}) == ["partial", "absent"]
    assert states(tmp_path / "2", {"flash.fp4": DATA[1:]}) == ["wrong size", "absent"]
    lookalike = {"flash.fp4": DATA[::-1], "flash-dspark.fp4": DRAFT}
    assert states(tmp_path / "3", lookalike) == ["not hashed", "not hashed"]
    assert states(tmp_path / "4", {"flash.fp4": DATA}, noted=right) == ["verified", "absent"]
    assert states(tmp_path / "5", {"flash.fp4": DATA}, noted="0" * 64) == ["wrong hash", "absent"]


def test_what_has_no_published_digest_is_unverified(tmp_path: Path) -> None:
    unknown = registered("flash.fp4", DATA, sha256=None, size_bytes=None, unverified=True)
    registry = registry_of({"m:fp4": unknown})
    (model,) = models(registry, filled(tmp_path / "m", {"flash.fp4": DATA}))
    assert [held.state for held in model.files] == ["unverified"]


def test_models_have_aliases_and_are_installed_with_their_trunk(tmp_path: Path) -> None:
    entries = {"m:fp4": ENTRY, "m:other": registered("other.fp4", b"other")}
    registry = registry_of(entries, {"b": "m:fp4", "a": "m:fp4"})
    store = filled(tmp_path / "m", {"flash-dspark.fp4": DRAFT, "other.fp4": b"damaged"})
    first, second = models(registry, store)
    assert (first.entry.tag, first.aliases, first.installed) == ("m:fp4", ("a", "b"), False)
    assert (second.entry.tag, second.aliases, second.installed) == ("m:other", (), True)


def test_companions_are_exact_names() -> None:
    assert companions("deepseek-v4-flash.mq2lloyd") == {
        "deepseek-v4-flash-mtp.mq2lloyd": "mtp",
        "deepseek-v4-flash-dspark.mq2lloyd": "dspark",
        "deepseek-v4-flash.mtp": "mtp",
        "deepseek-v4-flash-mtp.mq2lloyd.receipt": "mtp_receipt",
        "deepseek-v4-flash-dspark.mq2lloyd.receipt": "dspark_receipt",
        "deepseek-v4-flash.mtp.receipt": "mtp_receipt",
        "deepseek-v4-flash.mq2lloyd.receipt": "receipt",
    }
    assert companions("noext") == {"noext.receipt": "receipt"}


def test_every_file_knows_the_tags_that_name_it() -> None:
    shared = {"dspark": sidecar("flash-dspark.fp4", DRAFT)}
    entries = {"m:b": registered("b.fp4", b"b", **shared), "m:fp4": ENTRY}
    assert registered_files(registry_of(entries)) == {
        "b.fp4": ["m:b"],
        "flash-dspark.fp4": ["m:b", "m:fp4"],
        "flash.fp4": ["m:fp4"],
    }


@pytest.mark.parametrize("suffix", [".hfq", ".fp4", ".fp4q8", ".fp4p", ".fp4mix", ".mq2rxt"])
def test_artifacts_without_a_tag_are_found_by_suffix(tmp_path: Path, suffix: str) -> None:
    store = filled(tmp_path / "m", {f"mine{suffix}": b"damaged", "notes.txt": b"x"})
    (stray,) = strays(registry_of({"m:fp4": ENTRY}), store)
    assert (stray.file, stray.size_bytes, stray.hfq) == (f"mine{suffix}", 7, False)


def test_artifacts_without_a_tag_are_found_by_their_first_bytes(tmp_path: Path) -> None:
    files = {"mine.bin": b"HFQM and more", "flash.fp4": DATA}
    files |= {"a.hfq.partial": b"HFQM", "a.hfq.partial.blocks": b"HFQM", ".hidden": b"HFQM"}
    store = filled(tmp_path / "m", files)
    os.mkfifo(store.folder / "pipe.fp4")
    (store.folder / "folder.fp4").mkdir()
    (stray,) = strays(registry_of({"m:fp4": ENTRY}), store)
    assert (stray.file, stray.hfq) == ("mine.bin", True)


def test_what_belongs_to_a_stray_is_told_with_it(tmp_path: Path) -> None:
    names = ["x.hfq", "x-dspark.hfq", "x.hfq.receipt", "x-0731.hfq", "x-0731-dspark.hfq"]
    store = filled(tmp_path / "m", {name: b"HFQM" for name in names})
    found = {s.file: s.companions for s in strays(registry_of({"m:fp4": ENTRY}), store)}
    assert found == {
        "x.hfq": ("x-dspark.hfq", "x.hfq.receipt"),
        "x-0731.hfq": ("x-0731-dspark.hfq",),
    }


def test_a_file_that_cannot_be_read_is_listed_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(tmp_path / "m", {"mine.fp4": b"HFQM"})

    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    (stray,) = strays(registry_of({"m:fp4": ENTRY}), store)
    assert (stray.file, stray.hfq) == ("mine.fp4", False)


def test_a_folder_that_is_not_there_holds_nothing(tmp_path: Path) -> None:
    store = filled(tmp_path / "m", {})
    store.folder.rmdir()
    registry = registry_of({"m:fp4": ENTRY})
    assert strays(registry, store) == []
    assert not models(registry, store)[0].installed
