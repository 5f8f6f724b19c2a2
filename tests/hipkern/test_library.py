"""Which HIP library a process uses, and what it says when it cannot have it.

A process opens one library for good, so each case is a process of its own.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, sys
from ds4q.artifact.errors import Ds4qError
from ds4q.hipkern.library import open_library
try:
    found = open_library()
    print(found.choice, found.path)
    {more}
except Ds4qError as error:
    print(type(error).__name__, error)
"""


def opened(more: str = "", before: str = "", **environ: str) -> str:
    env = {**os.environ, "ROCM_PATH": "/nonexistent", **environ}
    if not env["ROCM_PATH"]:
        del env["ROCM_PATH"]
    done = subprocess.run(
        [sys.executable, "-c", before + PROGRAM.format(more=more)],
        env=env,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def has_system_library() -> bool:
    try:
        ctypes.CDLL("libamdhip64.so")
    except OSError:
        return False
    return True


@pytest.mark.skipif(has_system_library(), reason="the loader finds a HIP library on this machine")
def test_no_library_is_one_line_with_the_paths_tried() -> None:
    said = opened()
    assert said.count("\n") == 0
    assert said.startswith(
        "HipLibraryError HIP is not available: failed to dlopen libamdhip64.so: "
    )
    assert "b'" not in said
    assert "tried /nonexistent/lib/libamdhip64.so, libamdhip64.so;" in said
    assert "DS4Q_HIP=sim" in said


def test_no_binding_says_what_to_install() -> None:
    said = opened(before="import sys; sys.modules['rocm.bindings'] = None\n")
    assert said.startswith("HipLibraryError hip-python is not installed")
    assert said.endswith("pip install 'ds4q[hip]'")


def test_an_unknown_choice_is_refused() -> None:
    said = opened(DS4Q_HIP="rocm")
    assert "DS4Q_HIP names no library: expected unset, sim or cuda, found rocm" in said


def test_the_simulated_library_is_built_into_the_cache() -> None:
    more = "print(os.environ['ROCM_PATH'], found.rtc_version != '', 'numpy' in sys.modules)"
    first, second = opened(more, DS4Q_HIP="sim").splitlines()
    home = os.environ["DS4Q_HOME"]
    assert first.startswith(f"sim {home}{os.sep}sim-")
    assert first.endswith("lib/libamdhip64.so")
    assert second == "/nonexistent True False", "ROCM_PATH is the caller's again"
    more = "print('ROCM_PATH' in os.environ)"
    assert opened(more, DS4Q_HIP="sim", ROCM_PATH="").splitlines()[1] == "False"


def test_a_second_choice_in_one_process_is_refused() -> None:
    more = "os.environ.pop('DS4Q_HIP'); open_library()"
    said = opened(more, DS4Q_HIP="sim").splitlines()[1]
    assert said.startswith("HipLibraryError this process has opened another HIP library: ")
    assert said.endswith("start a new process for another library")


def test_a_library_that_the_binding_prefers_is_not_taken_for_the_chosen_one(
    tmp_path: Path,
) -> None:
    (tmp_path / "rocm_sdk.py").write_text("def find_libraries(name): return ['/sdk/lib.so']\n")
    before = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    said = opened(before=before, DS4Q_HIP="sim")
    assert said.startswith("HipLibraryError /sdk/lib.so: DS4Q_HIP=sim is set, but hip-python")


def test_the_same_library_is_found_through_rocm_path(tmp_path: Path) -> None:
    """How a user would hand it in by other means than the variable."""
    path = opened(DS4Q_HIP="sim").split()[1]
    more = "from ds4q.hipkern.driver import Device; print(Device.open().kind)"
    assert opened(more, ROCM_PATH=str(Path(path).parents[1])).splitlines()[1] == "sim"


def test_a_library_with_no_run_time_compiler_still_opens(tmp_path: Path) -> None:
    path = opened(DS4Q_HIP="sim").split()[1]
    (tmp_path / "lib").mkdir()
    os.symlink(path, tmp_path / "lib" / "libamdhip64.so")
    said = opened("print(found.rtc_problem)", ROCM_PATH=str(tmp_path))
    assert said.splitlines()[1].startswith("failed to dlopen libhiprtc.so: ")


@pytest.mark.parametrize("home", ["file", "file/below", "unwritable"])
def test_a_cache_folder_that_cannot_be_written_is_one_line(tmp_path: Path, home: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "unwritable").mkdir(mode=0o500)
    if home == "unwritable" and os.access(tmp_path / home, os.W_OK):
        pytest.skip("this user may write everywhere")
    said = opened(DS4Q_HIP="sim", DS4Q_HOME=str(tmp_path / home))
    assert said.count("\n") == 0
    assert said.startswith(f"HipError {tmp_path / home}: what was compiled cannot be kept: ")
    assert said.endswith("set DS4Q_HOME to a folder that can be written")


def test_help_and_probe_import_no_binding() -> None:
    program = (
        "import sys, ds4q.cli, ds4q.hipkern.library, ds4q.hipkern.probe\n"
        "print([m for m in ('rocm', 'rocm.bindings', 'hip', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
