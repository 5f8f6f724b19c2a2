"""``~`` in paths that no shell expanded, and which folder is ds4q's."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ds4q.artifact.places import (
    PlaceError,
    broken_link,
    expanded,
    from_json,
    home_folder,
    reason,
    to_json,
)  # fmt: skip
from tests.checks import check_refused


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("DS4Q_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_a_leading_tilde_is_the_home_folder_and_no_other_one(home: Path) -> None:
    assert expanded("~") == str(home)
    assert expanded("~/a b") == f"{home}/a b"
    for path in ("a/~", "./~/a", "a~", "~no-such-user-here/a", "/x", "", "-"):
        assert expanded(path) == path


def test_a_home_that_is_not_known_is_an_error(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as for a user without an entry
    check_refused(PlaceError, lambda: expanded("~/m"), path="~/m", says=["set HOME"])
    check_refused(PlaceError, home_folder)


def test_ds4q_home_comes_first_then_xdg_then_the_cache_folder(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert home_folder() == home / ".cache" / "ds4q"
    for cache in ("", "relative", "./x"):
        monkeypatch.setenv("XDG_CACHE_HOME", cache)
        assert home_folder() == home / ".cache" / "ds4q"
    for cache in (str(home / "big"), "~/big"):
        monkeypatch.setenv("XDG_CACHE_HOME", cache)
        assert home_folder() == home / "big" / "ds4q"
    monkeypatch.setenv("DS4Q_HOME", "~/mine")
    assert home_folder() == home / "mine"


@pytest.mark.parametrize("name", ["registry.json", "models"])
def test_what_an_earlier_version_kept_stays_in_use(
    name: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "big"))
    before = home / ".cache" / "ds4q"
    before.mkdir(parents=True)
    (before / "kernels").mkdir()
    assert home_folder() == home / "big" / "ds4q"  # caches are made again
    (before / name).mkdir()
    assert home_folder() == before
    (home / "big" / "ds4q").mkdir(parents=True)
    assert home_folder() == home / "big" / "ds4q"


def test_a_link_that_leads_nowhere_is_a_broken_link(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("nowhere")
    assert broken_link(link) == "broken link to nowhere"
    assert reason(FileNotFoundError(errno.ENOENT, "No such", str(link))) == "broken link to nowhere"
    absent = FileNotFoundError(errno.ENOENT, "No such", str(tmp_path / "absent"))
    assert reason(absent) == "No such"
    (tmp_path / "nowhere").touch()
    assert broken_link(link) is None
    assert broken_link(tmp_path / "absent") is None


@given(st.one_of(st.binary(max_size=40).map(os.fsdecode), st.text(max_size=40)))
@example("$'\\xff'")
@example("a'\\\udcff$'\udc80\\xff")
@example("\ud800")
def test_every_text_survives_json(text: str) -> None:
    carried = json.dumps(to_json(text), ensure_ascii=False).encode("utf-8")
    assert from_json(json.loads(carried)) == text


def test_what_json_can_carry_stays_as_it_is() -> None:
    for text in ("a b.hfq", "é", "C:\\x\\xff", "$'a'", "it's"):
        assert to_json(text) == from_json(text) == text
    assert to_json("fl\udcff'.hfq") == "$'fl\\xff\\'.hfq'"
