"""Which entries a file on disk is, and what they say of how it is run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ds4q.registry import usage
from ds4q.registry.entries import local_registry_path, read_document
from ds4q.registry.sources import URL_VARIABLE
from ds4q.registry.usage import entries_of, kv_modes, registry_naming
from tests.registry.documents import document, entry, raw

SIZE = 4096


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.hfq"
    path.write_bytes(bytes(SIZE))
    return path


def tags(file: Path, **entries: dict[str, object]) -> list[str]:
    models = {f"deepseek-v4-{name}": item for name, item in entries.items()}
    registry = read_document(raw(document(models)), "r.json")
    return [found.tag for found in entries_of(registry, file)]


def test_a_file_is_a_registered_one_by_name_and_length(file: Path) -> None:
    here = {"file": "mine.hfq", "size_gb": 0.001}
    assert tags(
        file,
        a=entry(**here, size_bytes=SIZE),
        b=entry(**here, size_bytes=SIZE + 1),
        c=entry(**here, size_bytes=None),
        d=entry(file="mine.hfq2"),
    ) == ["deepseek-v4-a", "deepseek-v4-c"]


def test_modes_are_told_with_the_tags_that_name_them(file: Path) -> None:
    same = {"file": "mine.hfq", "size_bytes": SIZE}
    models = {
        "deepseek-v4-a": entry(**same, default_kv_mode="f16"),
        "deepseek-v4-b": entry(**same),
        "deepseek-v4-c": entry(**same, default_kv_mode="q8"),
        "deepseek-v4-d": entry(**same, default_kv_mode="f16"),
    }
    registry = read_document(raw(document(models)), "r.json")
    assert kv_modes(entries_of(registry, file)) == {
        "f16": ["deepseek-v4-a", "deepseek-v4-d"],
        "q8": ["deepseek-v4-c"],
    }


def test_no_document_is_checked_for_a_name_that_none_holds(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage, "load_registry", lambda **_: pytest.fail("loaded"))
    assert registry_naming(file) is None


def test_the_users_own_document_counts(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS4Q_HOME", str(tmp_path / "home"))
    local_registry_path().parent.mkdir()
    models = {"deepseek-v4-mine": entry(file="mine.hfq", size_bytes=SIZE)}
    local_registry_path().write_text(json.dumps(document(models)))
    registry = registry_naming(file)
    assert registry is not None
    assert [found.tag for found in entries_of(registry, file)] == ["deepseek-v4-mine"]


@pytest.mark.parametrize("name", ["mine.hfq", 'm"ine.hfq', "müne.hfq"])
def test_where_a_search_cannot_tell_the_registry_is_loaded(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "mine.hfq":
        other = tmp_path / "other.json"
        other.write_text(json.dumps(document()))
        monkeypatch.setenv(URL_VARIABLE, str(other))
    assert registry_naming(tmp_path / name) is not None
