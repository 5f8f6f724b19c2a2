"""Removing a tag removes its files and no other: neighbours, shared files, links, files by name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ds4q.artifact.locks import LockedError
from ds4q.artifact.writer import PartialFile
from ds4q.registry.entries import Registry
from ds4q.registry.errors import UnknownTagError, UnsafeNameError
from ds4q.registry.remove import RemovalError, plan_removal, remove
from ds4q.registry.store import Store
from tests.checks import check_refused
from tests.registry import artifacts
from tests.registry.shelves import filled, registered, registry_of, sidecar

# As published: one family, the older release's name is the beginning of the newer one's.
PREVIEW, FLASH = "deepseek-v4-flash.mq2lloyd", "deepseek-v4-flash-0731.mq2lloyd"
MQ2R = "deepseek-v4-flash-0731.mq2r"
FILES = {
    name: name.encode()
    for name in (
        PREVIEW,
        "deepseek-v4-flash-mtp.mq2lloyd",
        "deepseek-v4-flash-dspark.mq2lloyd",
        FLASH,
        "deepseek-v4-flash-0731-dspark.mq2lloyd",
        MQ2R,
        "deepseek-v4-flash-0731-dspark.mq2r",
    )
}


def part(name: str) -> dict[str, object]:
    return sidecar(name, FILES[name])


@pytest.fixture
def registry() -> Registry:
    return registry_of(
        {
            "deepseek-v4-flash-preview": registered(
                PREVIEW,
                FILES[PREVIEW],
                mtp=part("deepseek-v4-flash-mtp.mq2lloyd"),
                dspark=part("deepseek-v4-flash-dspark.mq2lloyd"),
            ),
            "deepseek-v4-flash": registered(
                FLASH, FILES[FLASH], dspark=part("deepseek-v4-flash-0731-dspark.mq2lloyd")
            ),
            "deepseek-v4-flash:mq2r": registered(
                MQ2R, FILES[MQ2R], dspark=part("deepseek-v4-flash-0731-dspark.mq2r")
            ),
        },
        {"deepseek4": "deepseek-v4-flash"},
    )


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return filled(tmp_path / "models", FILES)


def left(store: Store) -> set[str]:
    return {path.name for path in store.folder.iterdir() if not path.name.startswith(".")}


def gone(registry: Registry, store: Store, *names: str) -> list[str]:
    """Names of what goes, in order, after removing it."""
    removal = plan_removal(registry, store, names)
    before = left(store)
    remove(store, removal)
    found = [name for name, _ in removal.files]
    assert before - left(store) == set(found)
    return found


@pytest.mark.parametrize("name", ["deepseek-v4-flash-preview", PREVIEW])
def test_the_older_release_takes_nothing_of_the_newer(
    registry: Registry, store: Store, name: str
) -> None:
    assert gone(registry, store, name) == [
        "deepseek-v4-flash-dspark.mq2lloyd",
        "deepseek-v4-flash-mtp.mq2lloyd",
        PREVIEW,
    ]


@pytest.mark.parametrize("name", ["deepseek-v4-flash", "deepseek4", FLASH])
def test_one_quantization_takes_nothing_of_another(
    registry: Registry, store: Store, name: str
) -> None:
    assert gone(registry, store, name) == ["deepseek-v4-flash-0731-dspark.mq2lloyd", FLASH]


def test_files_by_the_same_beginning_stay_without_a_registry(store: Store) -> None:
    """The same two slips, for files that no tag registers."""
    nothing = registry_of({"m": registered("m.fp4", b"m")})
    assert gone(nothing, store, PREVIEW) == [
        "deepseek-v4-flash-mtp.mq2lloyd",
        "deepseek-v4-flash-dspark.mq2lloyd",
        PREVIEW,
    ]
    assert gone(nothing, store, FLASH) == ["deepseek-v4-flash-0731-dspark.mq2lloyd", FLASH]
    assert left(store) == {MQ2R, "deepseek-v4-flash-0731-dspark.mq2r"}


def test_what_was_found_by_name_is_said(registry: Registry, store: Store) -> None:
    filled(store.folder, {"mine.fp4": b"x", "mine.fp4.receipt": b"x", "mine-dspark.fp4": b"x"})
    removal = plan_removal(registry, store, ["mine.fp4"])
    assert removal.by_name
    assert [name for name, _ in removal.files] == [
        "mine-dspark.fp4",
        "mine.fp4.receipt",
        "mine.fp4",
    ]
    assert not plan_removal(registry, store, ["deepseek-v4-flash"]).by_name


def test_a_companion_of_an_artifact_that_stays_stays(registry: Registry, tmp_path: Path) -> None:
    files = {"b.hfq": b"x", "b.fp4": b"x", "b.fp4.receipt": b"x", "b.mtp": b"x", "c": b"HFQM"}
    store = filled(tmp_path / "m", files | {"c.mtp": b"x"})
    removal = plan_removal(registry, store, ["b.fp4"])
    assert [name for name, _ in removal.files] == ["b.fp4.receipt", "b.fp4"]
    assert removal.kept == (("b.mtp", "b.hfq"),)
    assert gone(registry, store, "b.fp4", "b.mtp") == ["b.mtp", "b.fp4.receipt", "b.fp4"], "asked"
    filled(store.folder, files)
    assert gone(registry, store, "b.fp4", "b.hfq") == ["b.mtp", "b.fp4.receipt", "b.fp4", "b.hfq"]
    assert left(store) == {"c", "c.mtp"}


def test_a_companion_of_a_registered_artifact_that_stays_stays(tmp_path: Path) -> None:
    store = filled(tmp_path / "m", {"a.fp4": b"aa", "a.hfq": b"x", "a.mtp": b"x"})
    assert plan_removal(shared(), store, ["a.hfq"]).kept == (("a.mtp", "a.fp4"),)
    assert gone(shared(), store, "a.hfq") == ["a.hfq"]


def test_what_is_no_artifact_has_no_companions(registry: Registry, tmp_path: Path) -> None:
    files = {"flash.txt": b"notes", "flash.mtp": b"x", "flash.txt.receipt": b"x", "m": b"HFQM"}
    store = filled(tmp_path / "m", files | {"m.receipt": b"x"})
    assert gone(registry, store, "flash.txt") == ["flash.txt"]
    assert gone(registry, store, "m") == ["m.receipt", "m"], "by its first bytes"


@pytest.mark.parametrize("length", [245, 250, 255])
def test_a_companion_whose_name_cannot_be_is_not_there(
    registry: Registry, tmp_path: Path, length: int
) -> None:
    name = "x" * (length - 4) + ".hfq"
    store = filled(tmp_path / "m", {name: b"x"})
    assert gone(registry, store, name) == [name]


def shared() -> Registry:
    draft = sidecar("d.fp4", b"draft")
    return registry_of(
        {
            "m:a": registered("a.fp4", b"aa", dspark=draft),
            "m:b": registered("b.fp4", b"bb", dspark=draft),
        }
    )


def test_a_file_that_another_installed_tag_names_stays(tmp_path: Path) -> None:
    store = filled(tmp_path / "m", {"a.fp4": b"aa", "b.fp4": b"bb", "d.fp4": b"draft"})
    removal = plan_removal(shared(), store, ["m:a"])
    assert (removal.files, removal.kept) == ((("a.fp4", 2),), (("d.fp4", "m:b"),))
    assert gone(shared(), store, "m:a") == ["a.fp4"]
    assert gone(shared(), store, "m:b") == ["d.fp4", "b.fp4"]


def test_a_tag_that_is_not_installed_keeps_nothing(tmp_path: Path) -> None:
    store = filled(tmp_path / "m", {"a.fp4": b"aa", "d.fp4": b"draft"})
    assert gone(shared(), store, "m:a") == ["d.fp4", "a.fp4"]


def test_tags_that_go_together_do_not_keep_each_others_files(tmp_path: Path) -> None:
    store = filled(tmp_path / "m", {"a.fp4": b"aa", "b.fp4": b"bb", "d.fp4": b"draft"})
    assert gone(shared(), store, "m:a", "m:b", "m:a") == ["d.fp4", "a.fp4", "b.fp4"]


def test_a_sidecar_by_its_own_name_goes_alone_or_stays(tmp_path: Path) -> None:
    store = filled(tmp_path / "m", {"a.fp4": b"aa", "d.fp4": b"draft"})
    removal = plan_removal(shared(), store, ["d.fp4"])
    assert (removal.files, removal.kept) == ((), (("d.fp4", "m:a"),))
    store.path("a.fp4").unlink()
    assert gone(shared(), store, "d.fp4") == ["d.fp4"]


def test_no_receipt_of_ours_is_left_behind(tmp_path: Path) -> None:
    """An entry of an earlier version does not name the receipt of its draft."""
    store = Store(tmp_path / "m")
    store.folder.mkdir()
    models = {}
    for name in ("a.fp4", "a-dspark.fp4"):
        artifacts.write(store.path(name), tensors=1, rows=1)
        models[name] = store.path(name).read_bytes()
    draft = sidecar("a-dspark.fp4", models["a-dspark.fp4"])
    registry = registry_of({"m:a": registered("a.fp4", models["a.fp4"], dspark=draft)})
    assert gone(registry, store, "m:a") == [
        "a-dspark.fp4.receipt", "a-dspark.fp4", "a.fp4.receipt", "a.fp4",
    ]  # fmt: skip
    assert left(store) == set()


def twins() -> Registry:
    return registry_of({tag: registered("a.fp4", b"aa") for tag in ("m:a", "m:b", "m:c")})


def test_tags_of_one_file_can_be_removed_one_after_the_other(tmp_path: Path) -> None:
    store = filled(tmp_path / "m", {"a.fp4": b"aa"})
    assert gone(twins(), store, "m:a") == []
    assert gone(twins(), store, "m:a") == [], "again"
    removal = plan_removal(twins(), store, ["m:b"])
    assert (removal.kept, removal.given_up) == ((("a.fp4", "m:c"),), (("a.fp4", ("m:b",)),))
    remove(store, removal)
    assert gone(twins(), store, "m:c") == ["a.fp4"]
    assert [path.name for path in (store.folder / ".given-up").iterdir()] == []


def test_a_tag_that_is_wanted_again_keeps_its_file(tmp_path: Path) -> None:
    store = filled(tmp_path / "m", {"a.fp4": b"aa"})
    assert gone(twins(), store, "m:a", "m:c") == []
    store.take_back("a.fp4", "m:a")
    assert gone(twins(), store, "m:b") == []
    store.path("a.fp4").write_bytes(b"another")  # what was given up is no longer here
    assert gone(twins(), store, "m:a") == []


def test_a_receipt_goes_with_its_trunk_and_a_foreign_one_is_named(tmp_path: Path) -> None:
    receipt, draft = sidecar("a.fp4.receipt", b"r"), sidecar("a-dspark.fp4", b"d")
    registry = registry_of({"m:a": registered("a.fp4", b"aa", receipt=receipt, dspark=draft)})
    files = {"a.fp4": b"aa", "a.fp4.receipt": b"r", "a-dspark.fp4": b"d"}
    store = filled(tmp_path / "m", files | {"a-dspark.fp4.receipt": b"x"})
    assert plan_removal(registry, store, ["m:a"]).left == ("a-dspark.fp4.receipt",)
    assert gone(registry, store, "m:a") == ["a.fp4.receipt", "a-dspark.fp4", "a.fp4"]
    assert left(store) == {"a-dspark.fp4.receipt"}


def test_notes_go_with_their_files(tmp_path: Path) -> None:
    store = filled(tmp_path / "m", {"a.fp4": b"aa"})
    store.digest("a.fp4")
    gone(shared(), store, "m:a")
    assert list((store.folder / ".verified").iterdir()) == []


@pytest.mark.parametrize("kind", ["link", "dangling", "folder", "pipe"])
def test_whatever_is_no_regular_file_stops_all(tmp_path: Path, kind: str) -> None:
    store = filled(tmp_path / "m", {"a.fp4": b"aa"})
    precious = tmp_path / "precious"
    precious.write_bytes(b"draft")
    path = store.path("d.fp4")
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(precious if kind == "link" else "nowhere")
    error = check_refused(
        RemovalError, lambda: plan_removal(shared(), store, ["m:a"]), path=path, says=["by hand"]
    )
    assert ("link" in str(error)) == (kind in ("link", "dangling"))
    assert ("a broken link to nowhere" in str(error)) == (kind == "dangling")
    assert store.path("a.fp4").exists()
    assert precious.read_bytes() == b"draft"


def test_a_linked_models_folder_is_the_folder_it_leads_to(tmp_path: Path) -> None:
    filled(tmp_path / "real", {"a.fp4": b"aa"})
    (tmp_path / "m").symlink_to("real")
    assert gone(shared(), Store(tmp_path / "m"), "m:a") == ["a.fp4"]
    assert list((tmp_path / "real").iterdir()) == []


def test_a_file_that_changed_since_it_was_listed_stays(tmp_path: Path) -> None:
    store = filled(tmp_path / "m", {"a.fp4": b"aa", "d.fp4": b"draft"})
    removal = plan_removal(shared(), store, ["m:a"])
    store.path("a.fp4").write_bytes(b"something else")
    check_refused(RemovalError, lambda: remove(store, removal), path=store.path("a.fp4"))
    assert left(store) == {"a.fp4"}
    store.path("a.fp4").unlink()
    check_refused(RemovalError, lambda: remove(store, removal))


@pytest.mark.parametrize("way", ["exchanged", "written"])
def test_another_file_of_the_same_length_stays(tmp_path: Path, way: str) -> None:
    store = filled(tmp_path / "m", {"a.fp4": b"aa"})
    removal = plan_removal(shared(), store, ["m:a"])
    path = store.path("a.fp4")
    before = path.stat()
    if way == "exchanged":
        path.with_name("new").write_bytes(b"bb")
        path.with_name("new").replace(path)
    else:
        path.write_bytes(b"bb")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + (way == "written")))
    check_refused(RemovalError, lambda: remove(store, removal), path=path)
    assert path.read_bytes() == b"bb"


JOURNAL = (
    b'{"format": "ds4q.blocks.v1", "block_bytes": 4194304, "url": "http://host/x", '
    b'"size_bytes": 100, "validator": "", "sha256": ""}\n'
)
"""Of an unfinished download of 100 bytes."""


def test_an_abandoned_download_goes_by_its_name_unless_it_is_in_use(tmp_path: Path) -> None:
    files = {"a.fp4.partial": b"beginning", "a.fp4.partial.blocks": JOURNAL, "a.fp4": b"aa"}
    store = filled(tmp_path / "m", files)
    holder = PartialFile(store.path("a.fp4"), 0, recognize=lambda head: head == b"beginning")
    with pytest.raises(LockedError):
        plan_removal(shared(), store, ["a.fp4.partial"])
    with pytest.raises(LockedError):
        plan_removal(shared(), store, ["m:a"])
    holder.close()
    assert gone(shared(), store, "a.fp4.partial") == ["a.fp4.partial.blocks", "a.fp4.partial"]


def test_an_abandoned_download_goes_with_its_tag(tmp_path: Path) -> None:
    begun = [f"{name}.partial{end}" for name in ("d", "a.fp4") for end in (".blocks", "")]
    files = {name: JOURNAL if name.endswith(".blocks") else b"beginning" for name in begun}
    store = filled(tmp_path / "m", files)
    document = registry_of({"m:a": registered("a.fp4", b"aa", dspark=sidecar("d", b"d"))})
    removal = plan_removal(document, store, ["m:a"])
    assert removal.files == tuple((name, len(files[name])) for name in begun)
    assert gone(document, store, "m:a") == begun
    assert left(store) == set()


def test_an_unfinished_job_of_the_same_name_stays(tmp_path: Path) -> None:
    """Only a download keeps a journal; what a quantization has done so far is no part of a tag."""
    store = filled(tmp_path / "m", {"a.fp4.partial": b"beginning", "a.fp4": b"aa"})
    assert gone(shared(), store, "m:a") == ["a.fp4"]


@pytest.mark.parametrize("journal", [b"my notes", b"", JOURNAL[:-3]])
def test_what_is_not_a_download_by_its_beginning_stays(tmp_path: Path, journal: bytes) -> None:
    files = {"a.fp4.partial": b"mine", "a.fp4.partial.blocks": journal, "a.fp4": b"aa"}
    store = filled(tmp_path / "m", files)
    assert gone(shared(), store, "m:a") == ["a.fp4"]
    assert gone(shared(), store, "a.fp4.partial") == ["a.fp4.partial"]  # the user names it
    assert (store.folder / "a.fp4.partial.blocks").read_bytes() == journal


def test_nor_is_a_file_longer_than_the_download(tmp_path: Path) -> None:
    files = {"a.fp4.partial": bytes(101), "a.fp4.partial.blocks": JOURNAL, "a.fp4": b"aa"}
    assert gone(shared(), filled(tmp_path / "m", files), "m:a") == ["a.fp4"]


def test_a_download_that_another_installed_tag_needs_stays(tmp_path: Path) -> None:
    files = {"d.partial": b"d", "d.partial.blocks": JOURNAL, "a.fp4": b"aa", "b.fp4": b"bb"}
    store = filled(tmp_path / "m", files)
    document = registry_of(
        {
            f"m:{name}": registered(f"{name}.fp4", 2 * name.encode(), dspark=sidecar("d", b"d"))
            for name in ("a", "b")
        }
    )
    assert gone(document, store, "m:a") == ["a.fp4"]
    assert gone(document, store, "m:b") == ["d.partial.blocks", "d.partial", "b.fp4"]


@pytest.mark.parametrize("name", ["m:c", "../a.fp4", "/etc/hostname", "a"])
def test_names_are_meant_as_they_are(tmp_path: Path, name: str) -> None:
    store = filled(tmp_path / "m", {"a.fp4": b"aa"})
    with pytest.raises((UnknownTagError, UnsafeNameError)):
        plan_removal(shared(), store, [name])
