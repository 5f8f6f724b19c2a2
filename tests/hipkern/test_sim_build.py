"""The build of the simulated device: once, by which compiler, and with the same bits by another."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from ds4q.hipkern import sim
from ds4q.hipkern.errors import HipLibraryError
from ds4q.hipkern.sim import build, compiler_command
from tests.hipkern.sim_rig import Rig, i32

ROOT = Path(__file__).parents[2]


def fake_compiler(folder: Path, body: str) -> Path:
    """A compiler that writes a line of its log for each run, then does ``body``."""
    path = folder / "fakecxx"
    path.write_text(f'#!/bin/sh\necho run >> "{folder}/log"\n{body}\n')
    path.chmod(0o755)
    return path


TOUCH = 'while [ "$1" != -o ]; do shift; done; sleep 0.1; : > "$2"'


def test_processes_that_build_at_once_build_once(tmp_path: Path) -> None:
    compiler, cache = fake_compiler(tmp_path, TOUCH), tmp_path / "cache"
    script = (
        "import sys; from pathlib import Path; from ds4q.hipkern.sim import build\n"
        "print(build(Path(sys.argv[1]), sys.argv[2]))"
    )
    command = [sys.executable, "-c", script, str(cache), str(compiler)]
    pipe = subprocess.PIPE
    children = [subprocess.Popen(command, stdout=pipe, text=True, cwd=ROOT) for _ in range(3)]
    homes = {child.communicate()[0].strip() for child in children}
    assert homes == {str(build(cache, str(compiler)))}
    library = Path(homes.pop()) / "lib"
    assert sorted(x.name for x in library.iterdir()) == ["libamdhip64.so", "libhiprtc.so"]
    units_and_libraries = len(sim.UNITS) + len(sim.LIBRARIES)
    assert (tmp_path / "log").read_text().split() == ["run"] * units_and_libraries
    assert not list(cache.glob("*.part"))


@pytest.mark.parametrize("library", sim.LIBRARIES)
def test_a_damaged_library_is_built_again(tmp_path: Path, library: str) -> None:
    compiler = str(fake_compiler(tmp_path, TOUCH.replace(":", "echo built")))
    home = build(tmp_path / "cache", compiler)
    path = home / "lib" / library
    path.write_text("buil")
    assert build(tmp_path / "cache", compiler) == home
    assert path.read_text() == "built\n"
    path.unlink()
    build(tmp_path / "cache", compiler)
    assert path.read_text() == "built\n"


def test_a_build_that_is_interrupted_leaves_no_compiler_running(tmp_path: Path) -> None:
    body = f'sleep 60 & echo $! >> "{tmp_path}/children"; wait'  # as g++ waits for cc1plus
    compiler = fake_compiler(tmp_path, body)
    script = (
        "import sys; from pathlib import Path; from ds4q.hipkern.sim import build\n"
        "build(Path(sys.argv[1]), sys.argv[2])"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "cache"), str(compiler)]
    run = subprocess.Popen(command, stderr=subprocess.PIPE, cwd=ROOT)
    children: list[str] = []
    while len(children) < len(sim.UNITS):
        time.sleep(0.05)
        assert run.poll() is None
        if (tmp_path / "children").exists():
            children = (tmp_path / "children").read_text().split()
    run.send_signal(signal.SIGINT)
    assert b"KeyboardInterrupt" in run.communicate()[1]
    for child in children:
        for _ in range(6000):  # 5 minutes: only broken code waits so long
            if not is_running(child):
                break
            time.sleep(0.05)
        assert not is_running(child)


def is_running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_build_is_kept_by_compiler_and_flags(tmp_path: Path) -> None:
    compiler = str(fake_compiler(tmp_path, TOUCH))
    first = build(tmp_path / "cache", compiler)
    assert build(tmp_path / "cache", compiler) == first
    assert build(tmp_path / "cache", compiler, ["-DDS4Q_SIM_UCONTEXT"]) != first


def test_a_compiler_that_fails_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    compiler = fake_compiler(tmp_path, "echo fiber.cpp:3: error: no such thing; exit 1")
    with pytest.raises(
        HipLibraryError, match=r"did not compile.*fiber\.cpp:3: error: no such"
    ) as e:
        build(tmp_path / "cache", str(compiler))
    assert "fiber.cpp:3: error: no such thing" in Path(str(e.value.path)).read_text()
    assert sorted(x.suffix for x in (tmp_path / "cache").iterdir()) == [".lock", ".log"]
    fake_compiler(tmp_path, TOUCH)
    build(tmp_path / "cache", str(compiler))
    assert sorted(x.suffix for x in (tmp_path / "cache").iterdir()) == ["", ".lock"]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("echo ld: x.o: No space left on device; exit 1", "No space left on device; make room in"),
        ("kill -TERM $$", "which was stopped: found Terminated; run the command again"),
    ],
)
def test_what_is_not_the_source_s_fault_says_what_to_do(
    tmp_path: Path, body: str, says: str
) -> None:
    with pytest.raises(HipLibraryError, match=says):
        build(tmp_path / "cache", str(fake_compiler(tmp_path, body)))
    assert [x.suffix for x in (tmp_path / "cache").iterdir()] == [".lock"]


def test_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HipLibraryError, match="nothing-like-it is not here"):
        build(tmp_path, "nothing-like-it")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "ziglang", None)
    with pytest.raises(HipLibraryError, match=r"no g\+\+ and no ziglang.*pip install ziglang"):
        build(tmp_path)


def test_zig_stands_in_where_gcc_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ziglang")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compiler_command()[1:4] == ["-m", "ziglang", "c++"]


PROGRAM = """
import hashlib, sys
import numpy as np
from tests.hipkern.test_sim_build import bits
from tests.hipkern.sim_rig import Rig
print(bits(Rig()))
"""

READS_BEYOND = """
from tests.hipkern.sim_rig import Rig, i32
rig = Rig()
source = '''#include "ds4q_dev.h"
DS4Q_KERNEL(last, 32, (float* x, int n)) {
  x[0] = x[n - 1];
}
'''
module = rig.call("hipModuleLoadData", rig.compile(source, "-fsanitize=address", "-g"))
function = rig.call("hipModuleGetFunction", module, b"last")
x = rig.call("hipMalloc", 256)
for n in (64, 65):
    rig.call("hipModuleLaunchKernel", function, 1, 1, 1, 32, 1, 1, 0, None, None, (x, i32(n)))
    rig.call("hipDeviceSynchronize")
    print(n, "elements", flush=True)
"""


def bits(rig: Rig) -> str:
    """A hash of what two kernels give, and of what a third one fails with."""
    x = np.random.default_rng(5).standard_normal((9, 1000)).astype(np.float32)
    at, out = rig.device(x), rig.call("hipMalloc", 256)
    seen = hashlib.sha256()
    assert rig.launch(None, "sums", 9, 96, at, out, i32(1000)) == 0
    seen.update(rig.read(out, 9).tobytes())
    assert rig.launch(None, "deep", 1, 64, out, i32(7)) == 0
    seen.update(rig.read(out, 64).tobytes())
    assert rig.launch(None, "early", 1, 64, i32(3)) == 0
    seen.update(str(rig.code("hipDeviceSynchronize")).encode())
    return seen.hexdigest()


@pytest.mark.slow
@pytest.mark.parametrize("form", ["ucontext", "zig", "address"])
def test_other_builds_give_the_same_bits(rig: Rig, tmp_path: Path, form: str) -> None:
    """ucontext in place of the written switch, zig in place of g++, and under AddressSanitizer."""
    env = {name: value for name, value in os.environ.items() if name != "DS4Q_HIP"}
    if form == "zig":
        pytest.importorskip("ziglang")
        home = build(tmp_path, "zig")
    elif form == "ucontext":
        home = build(tmp_path, "g++", ["-DDS4Q_SIM_UCONTEXT"])
    else:
        home = build(tmp_path, "g++", ["-fsanitize=address", "-g"])
        command = ["g++", "-print-file-name=libasan.so"]
        found = subprocess.run(command, capture_output=True, text=True, check=True)
        env["LD_PRELOAD"] = found.stdout.strip()
        env["ASAN_OPTIONS"] = "detect_leaks=0"  # Python's own
    env["ROCM_PATH"] = str(home)
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == bits(rig)
    if form == "address":  # kernels that are built with it too cannot read beyond an allocation
        command = [sys.executable, "-c", READS_BEYOND]
        done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=ROOT)
        assert "use-after-poison" in done.stderr
        assert "READ of size 4" in done.stderr
        assert done.stdout == "64 elements\n"
