"""A system that starts no further thread: one line and exit status 1, whoever asks for it."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ds4q.artifact.errors import ThreadRefusedError
from ds4q.artifact.receipt import receipt_path
from ds4q.runtime.errors import EngineError

ROOT = Path(__file__).parents[2]
FILE = "ds4-tiny.hfq"
ANOTHER_USER = 54321
PR_CAPBSET_DROP, CAP_SYS_ADMIN, CAP_SYS_RESOURCE = 24, 21, 24
START = "import threading; threading.Thread(target=int).start()"


def _one_process() -> None:
    """Limit the process to be to one thread; the limit is for users other than root."""
    if os.getuid() == 0:
        libc = ctypes.CDLL(None)
        for capability in (CAP_SYS_ADMIN, CAP_SYS_RESOURCE):
            libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
        os.setresuid(ANOTHER_USER, 0, 0)
    resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))


def limited(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *words],
        preexec_fn=_one_process,
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
    )


@pytest.fixture
def folder(tmp_path: Path, tiny_artifact: Path) -> Path:
    """A model, a checkpoint and a text, for every user by names without folders."""
    tmp_path.chmod(0o777)
    for each in (tiny_artifact, receipt_path(tiny_artifact)):
        (tmp_path / each.name).hardlink_to(each)
    shutil.copytree(ROOT / "tests" / "data" / "ds4-tiny", tmp_path / "source")
    (tmp_path / "text").write_text("What is to be said at length.\n" * 20)
    if limited(tmp_path, "-c", START).returncode == 0:
        pytest.skip("the limit on processes does not hold here")
    return tmp_path


@pytest.mark.parametrize(
    "arguments",
    [
        ["verify", FILE],
        ["verify", FILE, "--threads", "1"],
        ["quantize", "source", "-o", "out.hfq"],
        ["run", FILE, "-p", "hi", "--max-tokens", "1"],
        ["run", FILE, "-p", "hi", "--max-tokens", "1", "--expert-cache", "2MB"],
        ["serve", FILE, "--port", "0", "--quiet"],
        ["calibrate", FILE, "--text", "text", "-o", "out.imatrix"],
    ],
    ids=" ".join,
)
def test_a_refused_thread_is_named_with_what_to_do(arguments: list[str], folder: Path) -> None:
    done = limited(folder, "-m", "ds4q", *arguments)
    assert done.stderr == f"ds4q: error: {ThreadRefusedError()}\n"
    assert (done.returncode, done.stdout) == (1, "")
    assert not (folder / "out.hfq").exists()  # of quantize, what --resume goes on with is kept
    assert not (folder / "out.imatrix").exists()


def test_what_needs_no_thread_goes_on(folder: Path) -> None:
    done = limited(folder, "-m", "ds4q", "inspect", FILE)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_model_that_is_refused_a_thread_says_so() -> None:
    refused = RuntimeError("can't start new thread")
    error = EngineError.of(refused, "the model cannot be loaded")
    assert type(error) is ThreadRefusedError
    assert error.__cause__ is refused
    assert type(EngineError.of(RuntimeError("odd"))) is EngineError
