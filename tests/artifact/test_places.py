"""``~`` in paths that no shell expanded, and which folder is ds4q's."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds4q.artifact.places import PlaceError, expanded, home_folder
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
