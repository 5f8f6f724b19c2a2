"""A name means a file directly inside a folder, or is refused before anything is opened."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4q.registry import installed
from ds4q.registry.entries import Registry
from ds4q.registry.errors import UnsafeNameError
from ds4q.registry.names import (
    ARTIFACT_SUFFIXES,
    MAX_FILE_BYTES,
    MAX_NAME_BYTES,
    UNFINISHED_SUFFIXES,
    inner_name,
    plain_name,
)
from ds4q.registry.store import Store
from tests.checks import check_refused

UNSAFE = {
    "": "is empty",
    "../x.hfq": "begins with a dot",
    "x/../../y": "holds '..'",
    "a..b": "holds '..'",
    ".hidden": "begins with a dot",
    "..": "begins with a dot",
    "/abs": "holds a separator",
    "sub/x.hfq": "holds a separator",
    "c:\\x": "holds a separator",
    "a\0b": "does not print",
    "a\nb": "does not print",
    "a\ud800": "does not print",
    "\u202egnp.hfq": "does not print",
    " ": "begins or ends with a space",
    " x.hfq": "begins or ends with a space",
    "x.hfq ": "begins or ends with a space",
    "-rf": "begins with '-'",
    "x.": "ends with a dot",
    "CON": "is a device",
    "aux.hfq": "is a device",
    "lpt1.mq2r.receipt": "is a device",
    "*.hfq": "holds '*'",
    "C:x.hfq": "holds ':'",
    "a?b": "holds '?'",
    "x.partial": "unfinished download",
    "x.partial.blocks": "unfinished download",
    "X.PARTIAL": "unfinished download",
    "registry.json": "registry document",
    "Registry.JSON": "registry document",
    "registry.cache.json": "registry document",
    "é" * 128: f"longer than {MAX_NAME_BYTES} bytes",
    "é" * 120 + "x": f"longer than {MAX_FILE_BYTES} bytes",
}


@pytest.mark.parametrize(("name", "says"), UNSAFE.items())
def test_a_name_that_could_leave_its_folder_is_refused(name: str, says: str) -> None:
    check_refused(
        UnsafeNameError,
        lambda: plain_name(name, what="file of x:fp4", path="registry.json"),
        path="registry.json",
        says=["unsafe name", "file of x:fp4", says],
    )


def test_what_lies_in_a_folder_may_be_called_as_no_registered_file_is(tmp_path: Path) -> None:
    names = ["registry.json", "a:b.hfq", " ", *("x" + suffix for suffix in UNFINISHED_SUFFIXES)]
    for name in names:
        assert inner_name(name, what="file") == name
        (tmp_path / name).write_bytes(b"HFQM")
    assert UNFINISHED_SUFFIXES == installed.UNFINISHED
    found = installed.strays(Registry({}, {}, "", "a test"), Store(tmp_path))
    assert [stray.file for stray in found] == [" ", "a:b.hfq", "registry.json"]


@pytest.mark.parametrize(
    "name",
    [
        "deepseek-v4-flash-0731.fp4",
        "a b.hfq",
        "é" * 120,
        "x~",
        "console.hfq",
        "x-",
        "com10",
        "x\udcff.hfq",
    ],
)
def test_a_plain_name_is_given_back(name: str) -> None:
    assert plain_name(name, what="file") == name


def test_the_longest_name_of_a_registered_file_leaves_room_for_its_download() -> None:
    longest = "x" * MAX_FILE_BYTES
    assert plain_name(longest, what="file") == longest
    assert all(inner_name(longest + suffix, what="file") for suffix in UNFINISHED_SUFFIXES)
    with pytest.raises(UnsafeNameError):
        inner_name(f"x{longest}{max(UNFINISHED_SUFFIXES, key=len)}", what="file")


@given(st.text(max_size=300))
def test_what_passes_stays_inside(name: str) -> None:
    folder = Path("/models")
    try:
        joined = folder / plain_name(name, what="file")
    except UnsafeNameError:
        return
    assert joined.parent == folder
    assert joined.resolve() == folder.resolve() / name


def test_every_suffix_of_ours_is_known() -> None:
    assert {".fp4", ".fp4q8", ".fp4p", ".fp4mix", ".mq2r", ".mq2rxt", ".hfq"} <= ARTIFACT_SUFFIXES
    assert all(suffix == suffix.lower() and suffix[0] == "." for suffix in ARTIFACT_SUFFIXES)
