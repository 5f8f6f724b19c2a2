"""Entries against files: stale sizes and digests, headers, whose draft; documents read strictly."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds4q.artifact.report import Check
from ds4q.registry.add import Wish, add
from ds4q.registry.entries import Entry, load_registry
from ds4q.registry.rules import SIDECAR_KINDS
from ds4q.registry.sources import BUNDLED, keep_copy
from ds4q.registry.store import digest_of
from ds4q.registry.verify import (
    SidecarError,
    check_document,
    check_registry,
    check_sidecars,
    check_trunk,
)
from tests.artifact import build
from tests.quantize.damage import flip
from tests.registry.documents import SHA_A, SHA_B, document, entry, raw
from tests.registry.shelves import described, made, registry_of, sidecar

TAG = "mini:fp4"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with x.hfq, its receipt and its draft, and the registry that knows them."""
    file = made(tmp_path_factory.mktemp("original") / "o")
    add(registry_of({"m": entry()}), file.with_name("registry.json"), file, Wish(TAG))
    return file.parent


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "models"))


@pytest.fixture
def known(folder: Path) -> Entry:
    return load_registry(str(folder / "registry.json")).entries[TAG]


def trunk(known: Entry, path: Path) -> Check:
    check = Check("x", path=str(path))
    check_trunk(known, path, lambda: digest_of(path), check)
    return check


def sidecars(known: Entry, folder: Path, **options: Any) -> Check:
    check = Check("x")
    check_sidecars(known, folder, check, **options)
    return check


def only_failure(check: Check) -> tuple[str, object, object]:
    (failure,) = check.failures
    return failure.message, failure.expected, failure.found


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# ---------------------------------------------------------------- the trunk


def test_what_is_as_registered_passes(known: Entry, folder: Path) -> None:
    check = trunk(known, folder / "x.hfq")
    assert check.ok
    assert check.figures == {
        "file": "x.hfq",
        "bytes": known.size_bytes,
        "sha256": known.sha256,
    }
    assert check.notes == []
    check = sidecars(known, folder)
    assert check.ok
    assert check.figures == {"sidecars": 3}
    assert check.notes == []


def test_a_file_cut_by_a_byte_is_incomplete_and_not_hashed(known: Entry, folder: Path) -> None:
    path = folder / "x.hfq"
    os.truncate(path, path.stat().st_size - 1)
    check = Check("x")
    check_trunk(known, path, lambda: pytest.fail("was hashed"), check)
    size = known.size_bytes
    assert size is not None
    first = check.failures[0]
    assert first.message == f"{TAG}: x.hfq is incomplete: {size - 1} of {size} bytes"
    assert (first.expected, first.found) == (size, size - 1)
    assert "payload runs past the end" in check.failures[1].message
    assert "sha256" not in check.figures


def test_a_stale_size_is_told_before_the_digest(known: Entry, folder: Path) -> None:
    size = known.size_bytes
    assert size is not None
    check = trunk(replace(known, size_bytes=size + 1), folder / "x.hfq")
    message = f"{TAG}: x.hfq is incomplete: {size} of {size + 1} bytes"
    assert only_failure(check) == (message, size + 1, size)
    check = trunk(replace(known, size_bytes=size - 1), folder / "x.hfq")
    assert only_failure(check)[0] == f"{TAG}: x.hfq is longer than its registry entry says"


def test_a_stale_digest_is_told_with_both_values(known: Entry, folder: Path) -> None:
    path = folder / "x.hfq"
    before = contents(folder)
    check = trunk(replace(known, sha256=SHA_A), path)
    message = f"{TAG}: SHA-256 of x.hfq differs from its registry entry"
    assert only_failure(check) == (message, SHA_A, known.sha256)
    assert contents(folder) == before


def test_a_changed_byte_is_found_and_nothing_is_deleted(known: Entry, folder: Path) -> None:
    flip(folder / "x.hfq", (folder / "x.hfq").stat().st_size - 5)
    before = contents(folder)
    message, expected, found = only_failure(trunk(known, folder / "x.hfq"))
    assert message.endswith("differs from its registry entry")
    assert (expected, found) == (known.sha256, digest_of(folder / "x.hfq"))
    assert contents(folder) == before


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"arch_id": 5}, ("arch_id", 5, 9)),
        ({"quant": "fp4q8"}, ("quant", "fp4q8", "fp4")),
        ({"quant_recipe": "fp4-q8"}, ("quant_recipe", "fp4-q8", "fp4")),
    ],
)
def test_what_the_file_says_of_itself_counts(
    known: Entry, folder: Path, changes: dict[str, Any], what: tuple[str, object, object]
) -> None:
    check = trunk(replace(known, **changes), folder / "x.hfq")
    message = f"{TAG}: {what[0]} of the file differs from its registry entry"
    assert only_failure(check) == (message, *what[1:])


def test_an_entry_may_say_less_than_the_file(known: Entry, folder: Path) -> None:
    assert trunk(replace(known, quant_recipe=None), folder / "x.hfq").ok
    check = trunk(replace(known, sha256=None, size_bytes=None), folder / "x.hfq")
    assert check.ok
    assert check.notes == ["x.hfq: no digest was published, unverified"]


def test_a_file_of_another_name_is_noted(known: Entry, folder: Path) -> None:
    os.rename(folder / "x.hfq", folder / "y.hfq")
    check = trunk(known, folder / "y.hfq")
    assert check.ok
    assert check.notes == ["y.hfq is registered as x.hfq"]


def test_a_file_that_is_no_artifact_fails(known: Entry, folder: Path) -> None:
    text = b"not an artifact at all, but long enough to have a header"
    (folder / "x.hfq").write_bytes(text)
    check = trunk(replace(known, **described(text)), folder / "x.hfq")
    assert only_failure(check)[0] == "not an HFQ file"


# ---------------------------------------------------------------- sidecars


def test_what_is_not_there_is_a_note(known: Entry, folder: Path) -> None:
    (folder / "x-dspark.hfq").unlink()
    (folder / "x.hfq.receipt").unlink()
    (folder / "x-dspark.hfq.receipt").unlink()
    check = sidecars(known, folder)
    assert check.ok
    assert check.figures["sidecars"] == 0
    assert sorted(check.notes) == [
        "dspark x-dspark.hfq is not there",
        "dspark_receipt x-dspark.hfq.receipt is not there",
        "receipt x.hfq.receipt is not there",
    ]


def test_a_damaged_sidecar_fails_with_both_values(known: Entry, folder: Path) -> None:
    flip(folder / "x-dspark.hfq", 5000)
    message, expected, found = only_failure(sidecars(known, folder))
    assert message == f"{TAG}: SHA-256 of x-dspark.hfq differs from its registry entry"
    assert expected != found == digest_of(folder / "x-dspark.hfq")
    os.truncate(folder / "x-dspark.hfq", 4000)
    assert "is incomplete: 4000 of" in only_failure(sidecars(known, folder))[0]


def _with(known: Entry, kind: str, path: Path) -> Entry:
    """The entry, naming the file at ``path`` as its only sidecar, with the right bytes."""
    raw = {key: value for key, value in known.raw.items() if key not in SIDECAR_KINDS}
    models = {TAG: {**raw, kind: sidecar(path.name, path.read_bytes())}}
    made_anew = registry_of(models).entries[TAG]
    return replace(made_anew, sidecars=tuple(s for s in made_anew.sidecars if s.kind == kind))


def test_a_registered_draft_for_another_trunk_is_refused(
    known: Entry, folder: Path, tmp_path: Path
) -> None:
    """Its bytes are as registered, and still it is the wrong one."""
    other = made(tmp_path / "other", seed=1).with_name("x-dspark.hfq")
    shutil.copy(other, folder)
    check = sidecars(_with(known, "dspark", folder / "x-dspark.hfq"), folder)
    message, expected, found = only_failure(check)
    assert "draft for another trunk: source_fingerprint differs" in message
    assert expected != found


def test_a_registered_receipt_of_another_file_is_refused(known: Entry, folder: Path) -> None:
    shutil.copy(folder / "x-dspark.hfq.receipt", folder / "x.hfq.receipt")
    check = sidecars(_with(known, "receipt", folder / "x.hfq.receipt"), folder)
    message, expected, found = only_failure(check)
    assert "receipt of another artifact" in message
    assert str(known.sha256) in str(expected)
    assert digest_of(folder / "x-dspark.hfq") in str(found)


def test_a_draft_is_compared_with_its_trunk_wherever_that_is(known: Entry, folder: Path) -> None:
    draft = _with(known, "dspark", folder / "x-dspark.hfq")
    os.rename(folder / "x.hfq", folder / "y.hfq")
    assert sidecars(draft, folder, trunk=folder / "y.hfq").notes == []
    check = sidecars(draft, folder)
    assert check.ok
    assert check.notes == ["x-dspark.hfq: its trunk is not there to compare with"]


def test_a_draft_that_names_no_source_is_known_by_its_bytes(known: Entry, folder: Path) -> None:
    (folder / "d.mq2r").write_bytes(build.File((build.Tensor("mtp.0.weight"),)).data())
    check = sidecars(_with(known, "dspark", folder / "d.mq2r"), folder)
    assert check.ok
    assert check.notes == ["d.mq2r: says of no source, only its bytes are known"]


def test_a_sidecar_without_a_digest_is_unverified(known: Entry, folder: Path) -> None:
    open_entry = replace(
        known, sidecars=tuple(replace(s, sha256=None, size_bytes=None) for s in known.sidecars)
    )
    check = sidecars(open_entry, folder, sha256=lambda path: pytest.fail("was hashed"))
    assert check.ok
    assert [note.partition(":")[2] for note in check.notes] == [
        " no digest was published, unverified"
    ] * 3


def _refuse(adapter: Path, trunk: Path) -> None:
    raise SidecarError("of another model", path=adapter, found=trunk.name)


def test_an_adapter_is_held_against_the_trunk(known: Entry, folder: Path) -> None:
    (folder / "a.bin").write_bytes(b"adapter")
    adapter = _with(known, "adapter", folder / "a.bin")
    assert sidecars(adapter, folder).ok
    check = sidecars(adapter, folder, check_adapter=_refuse)
    message, _, found = only_failure(check)
    assert "of another model" in message
    assert found == "x.hfq"


# ---------------------------------------------------------------- documents

# Each is a slip of the hand in an otherwise good document: what, and what must be said of it.
BROKEN: list[tuple[str, Callable[[dict[str, Any]], object], str]] = [
    ("digest with a prefix", lambda e: e.update(sha256="sha256:" + SHA_A), "sha256: bad value"),
    ("63 digits", lambda e: e.update(sha256=SHA_A[:63]), "sha256: bad value"),
    ("upper case", lambda e: e.update(sha256=SHA_A.upper()), "sha256: bad value"),
    ("size as text", lambda e: e.update(size_bytes="5"), "size_bytes: bad value"),
    ("unknown key", lambda e: e.update(sha265=SHA_A), "sha265: unknown key"),
    ("path", lambda e: e.update(file="../../x.hfq"), "file: "),
    ("absolute sidecar", lambda e: e.update(dspark={"file": "/abs"}), "dspark: file: "),
    ("other family", lambda e: e.update(arch_id=5), "arch_id: "),
    ("no file", lambda e: e.pop("file"), "'file' is a required property"),
]


@pytest.mark.parametrize(("change", "says"), [b[1:] for b in BROKEN], ids=[b[0] for b in BROKEN])
def test_a_strict_reading_names_tag_and_key(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], says: str
) -> None:
    broken = document()
    change(broken["models"]["deepseek-v4-flash"])
    path = tmp_path / "mine.json"
    path.write_bytes(raw(broken))
    check = Check("schema", path=str(path))
    check_document(path, check)
    assert any(f.message.startswith("deepseek-v4-flash: ") for f in check.failures)
    assert any(says in f.message for f in check.failures), check.lines()


def test_a_good_document_passes(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_bytes(raw(document()))
    check = Check("schema", path=str(path))
    registry = check_document(path, check)
    assert check.ok
    assert registry is not None
    assert list(registry.entries) == ["deepseek-v4-flash"]


@pytest.mark.parametrize("text", [b"", b"<html>", b"[]", b"\xff", b'{"a": 1, "a": 2}'])
def test_what_is_no_document_is_told_once(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_bytes(text)
    check = Check("schema", path=str(path))
    assert check_document(path, check) is None
    assert check.count == 1


def test_everything_in_use_is_read_strictly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("DS4Q_HOME", str(home))

    def lines(origin: str | None = None) -> list[str]:
        check = Check("schema")
        check_registry(check, origin)
        return check.lines()

    assert lines() == []
    own: dict[str, Any] = {
        "models": {"m": entry(extra=1, sha256=SHA_B, file="m.fp4")},
        "aliases": {},
    }
    (home / "registry.json").write_text(json.dumps(document() | own))
    assert lines() == [f"{home / 'registry.json'}: m: extra: unknown key"]
    own["aliases"] = {"ds4": "deepseek-v4-flash:mq2r"}  # a tag of the bundled document
    (home / "registry.json").write_text(json.dumps(document() | own))
    assert len(lines()) == 1
    (home / "registry.json").write_text("{")
    assert ["not JSON" in line for line in lines()] == [True]
    (home / "registry.json").unlink()

    named = tmp_path / "named.json"
    named.write_bytes(raw(document({"m": entry(extra=1)})))
    for origin in (str(named), named.as_uri()):
        monkeypatch.setenv("DS4Q_REGISTRY_URL", origin)
        assert lines() == [f"{origin}: m: extra: unknown key"]
    monkeypatch.setenv("DS4Q_REGISTRY_URL", "http://127.0.0.1:1/registry.json")
    assert lines() == []  # no copy yet: the bundled one is in use
    odd = document({"m": entry(sha256=SHA_A.upper())}, {"gone": "n"}, extra=1)
    keep_copy("http://127.0.0.1:1/registry.json", odd)
    found = lines()
    assert lines("http://127.0.0.1:1/registry.json") == found  # nothing was mended on the way
    for what in ("m: sha256: bad value", "extra: unknown key"):
        assert any(f"copy of http://127.0.0.1:1/registry.json: {what}" in line for line in found)
    assert lines(str(named)) == [f"{named}: m: extra: unknown key"]
    assert lines("http://127.0.0.1:2/never.json") == []


def test_the_bundled_document_holds() -> None:
    registry = load_registry(offline=True)
    assert registry.origin.startswith(BUNDLED)
    check = Check("schema")
    check_registry(check)
    assert check.lines() == []
