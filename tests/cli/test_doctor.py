"""ds4q doctor: facts from the texts of /proc, and a verdict that a broken machine changes."""

from __future__ import annotations

import json
import os
import re
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from ds4q.cli import doctor, main

ROOT = Path(__file__).parents[2]
NO_LIMIT_V1 = "9223372036854771712\n"


def reader_of(files: dict[str, str]) -> doctor.Read:
    return files.get


def test_the_report_is_one_json_document() -> None:
    result = CliRunner().invoke(main, ["doctor", "--json"])
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    facts = json.loads(result.stdout)
    assert facts["ok"] is True
    assert facts["problems"] == []
    assert facts["run"] == {"device": "cpu", "hip": doctor.can_use_hip(facts["hip"])}
    assert facts["cpu"]["cores_available"] == len(os.sched_getaffinity(0))
    assert facts["disks"][0]["path"] == str(Path.cwd())
    assert facts["disks"][1]["path"] == os.environ["DS4Q_HOME"]
    assert all(disk["free_bytes"] > 0 for disk in facts["disks"])
    assert all(facts["packages"].values())
    assert set(facts["hip"]) == {
        *("library", "version", "devices", "problem", "found", "hiprtc", "choice", "packages")
    }


def test_the_report_for_people_names_the_device_that_run_uses() -> None:
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 0
    assert re.search(r"^run uses +the CPU", result.stdout, re.MULTILINE)
    assert re.search(r"^verdict +quantize, verify and run work here$", result.stdout, re.MULTILINE)


def test_a_missing_package_is_a_problem_and_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PACKAGES", ("numpy", "no_such_package_1"))
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 1
    assert "PROBLEM    no_such_package_1 does not import" in result.stdout
    assert "verdict" not in result.stdout


def test_a_kernel_that_gives_wrong_bytes_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    from ds4q.artifact.formats import hfp4g32

    right = hfp4g32.unpack
    assert doctor.kernel_problem() is None
    monkeypatch.setattr(hfp4g32, "unpack", lambda rows: (right(rows)[0] ^ 1, right(rows)[1]))
    assert "wrong bytes" in (doctor.kernel_problem() or "")
    monkeypatch.delattr(hfp4g32, "unpack")
    assert "cannot be compiled" in (doctor.kernel_problem() or "")


def test_packages_are_the_declared_dependencies() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"[<>=!~ ]", line)[0] for line in project["dependencies"]}
    assert set(doctor.PACKAGES) == declared


CPUINFO = """\
processor\t: 0
model name\t: Some CPU @ 2 GHz
flags\t\t: fpu avx2 fma avx512f_not ssse3
processor\t: 1
model name\t: Another
flags\t\t: fpu
"""


def test_cpu_facts_of_the_first_core() -> None:
    facts = doctor.cpu_facts(CPUINFO)
    assert facts["model"] == "Some CPU @ 2 GHz"
    have = {name for name, present in facts["features"].items() if present}
    assert have == {"avx2", "ssse3"}


def test_cpu_facts_without_proc() -> None:
    facts = doctor.cpu_facts(None)
    assert facts["model"]
    assert not any(facts["features"].values())


def test_memory_in_a_container_v2_takes_the_tightest_group() -> None:
    read = reader_of(
        {
            "/proc/meminfo": "MemTotal:       24684092 kB\nMemAvailable:   24272400 kB\n",
            "/proc/self/cgroup": "0::/a/b\n",
            "/sys/fs/cgroup/a/b/memory.max": "max\n",
            "/sys/fs/cgroup/a/memory.max": "4294967296\n",
            "/sys/fs/cgroup/memory.max": "8589934592\n",
        }
    )
    assert doctor.memory_facts(read) == {
        "total_bytes": 24684092 * 1024,
        "available_bytes": 24272400 * 1024,
        "limit_bytes": 4294967296,
    }


def test_memory_limit_v1_knows_its_word_for_none() -> None:
    files = {
        "/proc/self/cgroup": "5:cpu,memory:/x\n1:name=systemd:/\n0::/\n",
        "/sys/fs/cgroup/memory/x/memory.limit_in_bytes": NO_LIMIT_V1,
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": NO_LIMIT_V1,
    }
    assert doctor.cgroup_limit(reader_of(files)) is None
    files["/sys/fs/cgroup/memory/x/memory.limit_in_bytes"] = "1000000\n"
    assert doctor.cgroup_limit(reader_of(files)) == 1000000


@pytest.mark.parametrize("group", ["", "garbage", "0::", "::::", "0::/a\n9:memory"])
def test_unreadable_memory_facts_are_null(group: str) -> None:
    facts = doctor.memory_facts(reader_of({"/proc/self/cgroup": group, "/proc/meminfo": "?"}))
    assert facts == {"total_bytes": None, "available_bytes": None, "limit_bytes": None}


def test_a_limit_above_the_memory_bounds_nothing() -> None:
    read = reader_of(
        {
            "/proc/meminfo": "MemTotal: 1000 kB\n",
            "/proc/self/cgroup": "0::/\n",
            "/sys/fs/cgroup/memory.max": "1024000\n",
        }
    )
    assert doctor.memory_facts(read)["limit_bytes"] is None


def test_disk_facts_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    wanted = tmp_path / "not" / "yet"
    facts = doctor.disk_facts(wanted)
    assert facts["path"] == str(wanted)
    assert 0 < facts["free_bytes"] <= facts["total_bytes"]
    assert not wanted.exists()


def test_compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.compiler_facts(None) is None
    compiler = tmp_path / "mycc"
    compiler.write_text("#!/bin/sh\necho 'mycc 1.2'\necho more\n")
    compiler.chmod(0o755)
    assert doctor.compiler_facts("mycc") == {"path": str(compiler), "version": "mycc 1.2"}
    compiler.write_text("not a program")
    assert doctor.compiler_facts("mycc") == {"path": str(compiler), "version": None}


def test_the_report_for_people_says_what_is_missing() -> None:
    facts = doctor.report()
    facts["memory"] = {"total_bytes": None, "available_bytes": 1000, "limit_bytes": 2_000_000}
    facts["compiler"] = None
    facts["hip"].update(library="l.so", version=7, devices=2, problem=None)
    text = "\n".join(doctor.lines(facts))
    assert "1 kB available of unknown" in text
    assert "limited to 2 MB by the control group" in text
    assert "compiler   none found" in text
    assert "HIP        l.so: version 7, devices: 2" in text
    facts["hip"]["problem"] = "no such symbol"
    assert "HIP        l.so: no such symbol" in "\n".join(doctor.lines(facts))


def test_the_simulated_device_is_told_with_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS4Q_HIP", "sim")
    facts = doctor.report()
    assert facts["hip"]["choice"] == "sim"
    (device,) = facts["hip"]["found"]
    assert device["arch"] == "sim"
    assert device["total_bytes"] > 0
    assert facts["run"] == {"device": "cpu", "hip": True}
    text = "\n".join(doctor.lines(facts))
    assert re.search(r"^ +device 0: .*, sim, .* \(simulated on this CPU: ", text, re.MULTILINE)
    assert re.search(r"^ +hiprtc [\d.]+, hip-python [\d.]+, ziglang 0\.17\.1$", text, re.MULTILINE)
    assert "run uses   the CPU; with --device hip, the device above" in text
    assert facts["ok"] is True


def test_a_wrong_choice_of_library_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS4Q_HIP", "none")
    facts = doctor.report()
    assert facts["ok"] is True, "the CPU path works all the same"
    assert facts["run"]["hip"] is False
    assert "no library (DS4Q_HIP names no library" in "\n".join(doctor.lines(facts))


@pytest.mark.parametrize(
    ("arch", "said"),
    [
        ("gfx1151", "(nothing of ds4q has run on AMD hardware so far)"),
        ("sm_90", "(NVIDIA, behind HIP's names: a test vehicle)"),
    ],
)
def test_what_other_devices_are(arch: str, said: str) -> None:
    facts = doctor.report()
    facts["hip"].update(library="l.so", version=7, devices=1, problem=None, hiprtc="7.1")
    facts["hip"]["found"] = [{"name": "Card", "arch": arch, "total_bytes": 16_000_000_000}]
    assert f"device 0: Card, {arch}, 16 GB {said}" in "\n".join(doctor.lines(facts))


@pytest.mark.parametrize(
    ("lack", "said"),
    [
        ({"devices": 0}, "needs a device (DS4Q_HIP=sim simulates one)"),
        ({"packages": {"hip-python": None, "ziglang": None}}, "pip install 'ds4q[hip]'"),
        ({"hiprtc": None}, "needs ROCm's hiprtc"),
    ],
)
def test_what_a_device_still_lacks(lack: dict[str, object], said: str) -> None:
    facts = doctor.report()
    packages = {"hip-python": "10", "ziglang": None}
    hip = {**facts["hip"], "library": "l.so", "version": 7, "devices": 1, "problem": None}
    facts["hip"] = {**hip, "hiprtc": "7.1", "packages": packages, **lack}
    assert doctor.can_use_hip(hip | {"hiprtc": "7.1", "packages": packages})
    assert not doctor.can_use_hip(facts["hip"])
    facts["run"]["hip"] = False
    assert said in "\n".join(doctor.lines(facts))
