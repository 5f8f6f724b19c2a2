"""ds4q verify --device hip: green on sound artifacts, red by place, and devices that fail.

The device is the simulated one; it is named as such.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ds4q import api
from ds4q.artifact.hfq import Reader
from ds4q.artifact.types import TIDI32
from ds4q.cli import main
from ds4q.hipkern import driver, kernels
from ds4q.hipkern.errors import HipLibraryError
from ds4q.hipkern.sim.control import Control
from ds4q.hipkern.source import FOLDER

ROOT = Path(__file__).parents[2]


def verify(*words: object) -> Result:
    return CliRunner().invoke(main, ["verify", *map(str, words), "--device", "hip", "--quiet"])


def device_check(result: Result) -> dict[str, Any]:
    """The device's check of a JSON report whose other checks are all ok."""
    assert result.stderr == ""
    checks = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    assert [name for name, check in checks.items() if not check["ok"]] in ([], ["device"])
    found: dict[str, Any] = checks["device"]
    assert result.exit_code == (0 if found["ok"] else 1)
    return found


def broken_kernels(folder: Path, monkeypatch: pytest.MonkeyPatch, before: str, after: str) -> None:
    """From now on kernels are built from sources with one change."""
    copy = folder / "kernels"
    shutil.copytree(FOLDER, copy)
    text = (copy / "ds4q_unpack.h").read_text("utf-8")
    assert before in text
    (copy / "ds4q_unpack.h").write_text(text.replace(before, after), "utf-8")
    monkeypatch.setattr(kernels, "Kernels", partial(kernels.Kernels, folder=copy))


# ---------------------------------------------------------------- sound artifacts


def test_every_weight_of_an_artifact(sim: Control, tiny_artifact: Path) -> None:
    sim.set(memory_bytes=16 << 20)  # the values take four times as much
    check = device_check(verify(tiny_artifact, "--threads", 1, "--json"))
    assert check["ok"]
    figures = check["figures"]
    assert (figures["tensors"], figures["without_weights"]) == (305, 1)
    assert figures["weights"] == 16_044_189
    with Reader(tiny_artifact) as reader:
        weighed = [e for e in reader.tensors.values() if e.type_id != TIDI32.id]
    assert figures["bytes"] == sum(entry.nbytes for entry in weighed)
    assert figures["bytes_per_second"] > 0
    assert figures["device"] == "ds4q simulated device (CPU)"
    assert (figures["arch"], figures["kind"]) == ("sim", "sim")
    (note,) = figures["notes"]
    assert "simulated" in note


def test_people_read_that_the_device_is_simulated(sim: Control, tiny_artifact: Path) -> None:
    result = verify(tiny_artifact)
    assert (result.exit_code, result.stderr) == (0, "")
    (row,) = [line for line in result.stdout.splitlines() if line.startswith("device ")]
    assert " ok " in row
    assert "kind sim" in row
    assert "\ndevice: the device is simulated on this CPU" in result.stdout


def test_without_the_option_no_device_is_touched(tiny_artifact: Path) -> None:
    report = api.verify(tiny_artifact)
    assert [check.name for check in report.checks if check.name == "device"] == []


@pytest.mark.slow
@pytest.mark.parametrize("source", ["ds4-tiny", "ds4-random"])
@pytest.mark.parametrize(
    ("recipe", "options"),
    [("fp4", {}), ("fp4-q8", {}), ("mix", {}), ("budget", {"target_bpw": 3.0})],
)
def test_artifacts_of_every_kind_of_recipe(
    sim: Control, tmp_path: Path, source: str, recipe: str, options: dict[str, Any]
) -> None:
    out = tmp_path / "x.hfq"
    folder = ROOT / "tests" / "data" / source
    api.quantize(folder, out, recipe=recipe, threads=2, warn=lambda line: None, **options)
    report = api.verify(out, device="hip", threads=2)
    assert report.failure_lines() == []
    (check,) = [check for check in report.checks if check.name == "device"]
    assert report.reader is not None
    weighed = check.figures["tensors"] + check.figures["without_weights"]
    assert weighed == len(report.reader.tensors)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["fp4", "mix"])
def test_an_nvidia_gpu_decodes_to_the_same_bits(tmp_path: Path, recipe: str) -> None:
    """In a process of its own, since a process opens one HIP library."""
    out = tmp_path / "x.hfq"
    api.quantize(ROOT / "tests" / "data" / "ds4-tiny", out, recipe=recipe, threads=4)
    command = [sys.executable, "-m", "ds4q", "verify", str(out), "--device", "hip", "--json"]
    environ = os.environ | {"DS4Q_HIP": "cuda"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["device"]["figures"]["kind"] == "cuda"
    assert checks["device"]["figures"]["weights"] == 16_044_189


# ---------------------------------------------------------------- broken decodes


def test_a_broken_decode_is_red_with_the_block_named(
    sim: Control, tiny_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The level 1.5 of FP4 becomes 1.25; nothing else uses this table.
    broken_kernels(tmp_path, monkeypatch, "0x3e3c3800u, 0x46444240u", "0x3d3c3800u, 0x46444240u")
    check = device_check(verify(tiny_artifact, "--json"))
    assert not check["ok"]
    assert check["figures"]["failures"] > 100  # one a matrix of an expert
    assert len(check["failures"]) == 100
    first = check["failures"][0]
    place = [first[key] for key in ("layer", "expert", "projection")]
    assert first["tensor"] == "layers.{}.ffn.experts.{}.{}.weight".format(*place)
    assert first["row"] >= 0
    assert first["block"] >= 0
    assert "decodes" in first["message"]
    assert float(first["expected"].split("(")[1][:-1]) * 1.25 == (
        float(first["found"].split("(")[1][:-1]) * 1.5
    )


def test_people_are_told_the_place_on_stderr(
    sim: Control, tiny_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken_kernels(tmp_path, monkeypatch, "0x3e3c3800u, 0x46444240u", "0x3d3c3800u, 0x46444240u")
    result = verify(tiny_artifact)
    assert result.exit_code == 1
    first = result.stderr.splitlines()[0]
    assert first.startswith("device: layers.0.ffn.experts.0.w1.weight, layer 0, expert 0, ")
    assert ", row " in first
    assert ", block " in first
    assert ": the device decodes " in first
    assert "device" in [line.split()[0] for line in result.stdout.splitlines() if "FAILED" in line]


def test_a_kernel_that_does_not_compile(
    sim: Control, tiny_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken_kernels(tmp_path, monkeypatch, "#pragma once", "#pragma once\nno such thing;")
    check = device_check(verify(tiny_artifact, "--json"))
    (failure,) = check["failures"]
    assert "decode.hip" in failure["message"]
    assert "does not compile" in failure["message"]


# ---------------------------------------------------------------- devices that fail


def test_no_library(tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise HipLibraryError("HIP is not available: no libamdhip64.so")

    monkeypatch.setattr(driver, "open_library", none)
    check = device_check(verify(tiny_artifact, "--json"))
    (failure,) = check["failures"]
    assert failure["message"].startswith("HIP is not available: no libamdhip64.so; install ROCm")


def test_no_device(sim: Control, tiny_artifact: Path) -> None:
    sim.set(devices=0)
    check = device_check(verify(tiny_artifact, "--json"))
    (failure,) = check["failures"]
    assert "no device" in failure["message"]
    assert "DS4Q_HIP=sim" in failure["message"]
    assert check["figures"] == {"failures": 1}


def test_too_little_memory(sim: Control, tiny_artifact: Path) -> None:
    sim.set(memory_bytes=1 << 20)
    check = device_check(verify(tiny_artifact, "--threads", 2, "--json"))
    (failure,) = check["failures"]
    assert "hipErrorOutOfMemory" in failure["message"]
    assert "bytes on the device" in failure["expected"]
    assert "free" in failure["found"]


@pytest.mark.parametrize("calls", [40, 400, 900])
def test_a_device_that_is_lost_on_the_way(sim: Control, tiny_artifact: Path, calls: int) -> None:
    sim.set(lost_after=calls, lost_code=719)
    check = device_check(verify(tiny_artifact, "--threads", 2, "--json"))
    (failure,) = check["failures"]
    assert "hipErrorLaunchFailure" in failure["message"]
    assert check["figures"]["tensors"] < 305


def test_an_error_is_one_line_for_people(sim: Control, tiny_artifact: Path) -> None:
    sim.set(devices=0)
    result = verify(tiny_artifact)
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("device: ")
    assert "Traceback" not in result.output
