"""Building by hiprtc: what an entry of the cache depends on, and what a failure shows."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from ds4q.hipkern import build
from ds4q.hipkern.build import compile_source, options, read_entry, write_entry
from ds4q.hipkern.cache import first_error
from ds4q.hipkern.driver import Device
from ds4q.hipkern.errors import HipError, HipLibraryError, KernelBuildError
from ds4q.hipkern.source import FOLDER, Source, load

TEXT = """\
// put: block 32, LDS 0 bytes
#include "ds4q_dev.h"
#include "value.h"
DS4Q_KERNEL(put, 32, (int* y)) { y[ds4q_thread()] = VALUE; }
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "kernels"
    folder.mkdir()
    (folder / "ds4q_dev.h").write_bytes((FOLDER / "ds4q_dev.h").read_bytes())
    (folder / "value.h").write_text("#pragma once\n#ifndef VALUE\n#define VALUE 1\n#endif\n")
    (folder / "k.hip").write_text(TEXT)
    return folder


@pytest.fixture
def source(folder: Path) -> Source:
    return load("k.hip", folder)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DS4Q_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "kernels" / "sim-sim"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The builds that the compiler was asked for, made up in place of it."""
    asked: list[str] = []

    def stand_in(library: object, source: Source, wanted: object, name: str, log: Path) -> bytes:
        asked.append(name)
        return f"code {len(asked)}".encode()

    monkeypatch.setattr(build, "_compile", stand_in)
    return asked


def test_a_kernel_is_built_once(device: Device, source: Source, home: Path) -> None:
    first = compile_source(device, source, {})
    (entry,) = home.iterdir()
    before = entry.stat().st_mtime_ns
    assert first[:4] == b"\x7fELF"
    assert compile_source(device, source, {}) == first
    assert entry.stat().st_mtime_ns == before


def test_an_entry_depends_on_all_that_goes_into_it(
    device: Device, folder: Path, home: Path, compiled: list[str]
) -> None:
    def code(**defines: int) -> bytes:
        return compile_source(device, load("k.hip", folder), defines)

    seen = [code(), code(VALUE=2), code(VALUE=3)]
    library = device.library
    device.library = replace(library, version=library.version + 1)
    seen.append(code())
    device.library = replace(library, rtc_version="99.0")
    seen.append(code())
    device.library = library
    device.arch = "other"
    seen.append(code())
    device.arch = "sim"
    text = (folder / "k.hip").read_text()
    (folder / "k.hip").write_text(text + "\n")
    seen.append(code())
    (folder / "k.hip").write_text(text)
    header = (folder / "value.h").read_text()
    (folder / "value.h").write_text(header + "\n")
    seen.append(code())
    assert len(set(seen)) == len(seen) == len(compiled)
    (folder / "value.h").write_text(header)
    (folder / "unused.h").write_text("// reached by nothing\n")
    assert code() == seen[0]
    assert code(VALUE=2) == seen[1]
    assert len(compiled) == len(seen)


def test_a_damaged_entry_is_built_again(
    device: Device, source: Source, home: Path, compiled: list[str]
) -> None:
    compile_source(device, source, {})
    (entry,) = home.iterdir()
    good = entry.read_bytes()
    flipped = bytes([*good[:-1], good[-1] ^ 1])
    damaged = [b"", good[:10], good[:24], good[:-1], good + b"x", flipped, b"x" + good[1:]]
    for count, data in enumerate(damaged, 2):
        entry.write_bytes(data)
        assert compile_source(device, source, {}) == f"code {count}".encode()
        assert read_entry(entry) == f"code {count}".encode()
    assert list(home.iterdir()) == [entry], "nothing temporary is left behind"


def test_a_build_error_shows_the_first_line_and_keeps_the_log(
    device: Device, folder: Path, home: Path
) -> None:
    (folder / "value.h").write_text("#define VALUE nothing_of_this_name\n")
    with pytest.raises(KernelBuildError) as caught:
        compile_source(device, load("k.hip", folder), {"LEFT": 3})
    error = caught.value
    assert "k.hip LEFT=3 does not compile: " in str(error)
    assert "error: " in str(error)
    assert "nothing_of_this_name" in str(error)
    log = Path(str(error.path)).read_text()
    assert "-DLEFT=3" in log.splitlines()[1]
    assert "nothing_of_this_name" in log
    assert [path.suffix for path in home.iterdir()] == [".log"]


@pytest.mark.parametrize(
    "way", ["kill -INT $$", "echo fatal: Killed signal terminated program cc1"]
)
def test_a_compiler_that_was_stopped_leaves_no_log(
    device: Device,
    source: Source,
    home: Path,
    tmp_path: Path,
    way: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text(f"#!/bin/sh\n{way}\nexit 1\n")
    compiler.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        with pytest.raises(KernelBuildError, match=r"k\.hip was not compiled: .*try again"):
            compile_source(device, source, {})
    assert not home.exists()
    compile_source(device, source, {})


def test_the_log_of_a_failure_goes_when_the_entry_compiles(
    device: Device, source: Source, home: Path, compiled: list[str]
) -> None:
    compile_source(device, source, {})
    (entry,) = home.iterdir()
    entry.rename(entry.with_suffix(".log"))
    compile_source(device, source, {})
    assert list(home.iterdir()) == [entry]


def test_an_entry_has_the_mode_that_the_umask_allows(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_entry(tmp_path / "k.bin", b"code")
    finally:
        os.umask(before)
    assert (tmp_path / "k.bin").stat().st_mode & 0o777 == 0o640


def test_no_run_time_compiler_is_a_clear_error(device: Device, source: Source, home: Path) -> None:
    device.library = replace(device.library, rtc_problem="libhiprtc.so: cannot open")
    with pytest.raises(HipLibraryError, match=r"k\.hip has to be compiled, but hiprtc is not"):
        compile_source(device, source, {})
    entry = home / "there.bin"
    write_entry(entry, b"code")
    assert read_entry(entry) == b"code"


def test_a_cache_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HipError, match="set DS4Q_HOME to a folder that can be written"):
        write_entry(tmp_path / "file" / "k.bin", b"code")


def test_a_full_disk_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(HipError, match="No space left on device; make room there, or set DS4Q"):
        write_entry(tmp_path / "k.bin", b"code")
    assert not list(tmp_path.iterdir())


def test_options_fix_the_arithmetic() -> None:
    assert options("gfx1151", {"B": 2, "A": 1}) == [
        "--offload-arch=gfx1151", "-std=c++17", "-O3", "-ffp-contract=off", "-DA=1", "-DB=2",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("", ""),
        ("\n  all wrong\n", "all wrong"),
        ("In file\nk.hip:3:1: error: no\nk.hip:4:1: error: not\n", "k.hip:3:1: error: no"),
        ("terror\nk.hip(3): error #20: no", "k.hip(3): error #20: no"),
        ("ld: x: No space left on device\ncollect2: error: ld", "ld: x: No space left on device"),
    ],
)
def test_the_line_that_says_what_is_wrong(log: str, line: str) -> None:
    assert first_error(log) == line
