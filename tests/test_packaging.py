"""The wheel holds the rooms whole, the links are links, and a checkout without them says so."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("artifact", "hipkern", "quantize", "registry", "runtime")
SHIPPED = {".py", ".hip", ".h", ".cpp", ".json", ".html", ".css", ".js", ".svg", ".j2"}
SHIPPED_NAMES = {"FORMAT.md", "py.typed"}
BUILD_LEFTOVERS = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.nbi", "*.nbc")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a wheel is built from: building writes into the tree."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("ds4q", *ROOMS):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=BUILD_LEFTOVERS)
    for name in ("pyproject.toml", "README.md", "LICENSE", "Makefile"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def wheel(checkout: Path) -> zipfile.ZipFile:
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "out"]
    done = subprocess.run(build, cwd=checkout, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (checkout / "out").glob("*.whl")
    with zipfile.ZipFile(path) as opened:
        return opened


def expected_files() -> set[str]:
    files = {path for room in ROOMS for path in (ROOT / room).rglob("*")}
    files |= {*(ROOT / "ds4q").glob("*"), *(ROOT / "ds4q" / "cli").rglob("*")}
    shipped = set()
    for path in files:
        if path.is_file() and (path.suffix in SHIPPED or path.name in SHIPPED_NAMES):
            name = path.relative_to(ROOT).as_posix()
            shipped.add(name if name.startswith("ds4q/") else f"ds4q/{name}")
    return shipped


def test_the_wheel_holds_every_file_of_the_rooms_and_no_other(wheel: zipfile.ZipFile) -> None:
    held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert held == expected_files()


def test_an_unpacked_wheel_works_without_links(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    with zipfile.ZipFile(str(wheel.filename)) as opened:
        opened.extractall(tmp_path)
    program = "import ds4q.artifact.hfq, ds4q.cli; print(ds4q.artifact.hfq.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,  # first on the path with -c, before the installed ds4q
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "ds4q" / "artifact" / "hfq.py")


def test_the_wheel_carries_licence_and_command(wheel: zipfile.ZipFile) -> None:
    with zipfile.ZipFile(str(wheel.filename)) as opened:
        info = next(n.split("/")[0] for n in opened.namelist() if ".dist-info/" in n)
        assert opened.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
        assert "ds4q = ds4q.__main__:entry" in opened.read(f"{info}/entry_points.txt").decode()


@pytest.mark.parametrize("room", ROOMS)
def test_each_link_reads_one_folder_up(room: str) -> None:
    assert os.readlink(ROOT / "ds4q" / room) == f"../{room}"


def test_there_is_no_link_too_many() -> None:
    links = {path.name for path in (ROOT / "ds4q").iterdir() if path.is_symlink()}
    assert links == set(ROOMS)


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_a_checkout_that_lost_its_links_says_so_and_is_mended(
    checkout: Path, tmp_path: Path
) -> None:
    lost = tmp_path / "lost"
    shutil.copytree(checkout, lost, symlinks=True)
    for room in ROOMS:  # what unzip tools without links write
        (lost / "ds4q" / room).unlink()
        (lost / "ds4q" / room).write_text(f"../{room}")
    start = [sys.executable, "-c", "import ds4q.artifact.hfq"]
    done = subprocess.run(start, cwd=lost, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "ImportError: ds4q/quantize is not a folder: symlinks were lost; run 'make links'"
    )
    subprocess.run(["make", "links"], cwd=lost, check=True, capture_output=True)
    assert subprocess.run(start, cwd=lost).returncode == 0
