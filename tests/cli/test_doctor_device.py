"""ds4q doctor --device hip: the self-test of kernels on the device, and how a fault is told."""

from __future__ import annotations

import json
import re

import pytest
from click.testing import CliRunner, Result

from ds4q.cli import main
from ds4q.hipkern import selftest
from ds4q.hipkern.sim.control import Control


@pytest.fixture(autouse=True)
def few_kernels(sim: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulated device, and three kernels: all of them are run elsewhere."""
    few = [case for case in selftest.cases() if case.file in ("head.hip", "route.hip")]
    monkeypatch.setattr(selftest, "cases", lambda: few)


def doctor(*words: str) -> Result:
    return CliRunner().invoke(main, ["doctor", "--device", "hip", "--quiet", *words])


def test_a_device_whose_kernels_are_right() -> None:
    result = doctor()
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    (at,) = [i for i, line in enumerate(lines) if line.startswith("self-test ")]
    assert "3 of 3 kernels give the bits that are expected, in " in lines[at]
    assert "simulated on this CPU" in lines[at + 1]
    assert lines[-1].startswith("verdict ")


def test_the_document() -> None:
    result = doctor("--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)["selftest"]
    assert (found["kernels"], found["equal"], found["differ"]) == (3, 3, [])
    assert (found["device"], found["kind"]) == ("ds4q simulated device (CPU)", "sim")
    without = CliRunner().invoke(main, ["doctor", "--json"])
    assert json.loads(without.stdout)["selftest"] is None


def test_a_kernel_that_differs_is_named_and_1(monkeypatch: pytest.MonkeyPatch) -> None:
    digests = selftest.expected_digests()
    digests["head.hip argmax"][""] = "0" * 32
    monkeypatch.setattr(selftest, "expected_digests", lambda: digests)
    result = doctor()
    assert result.exit_code == 1
    (problem,) = [line for line in result.stdout.splitlines() if line.startswith("PROBLEM")]
    assert "head.hip argmax gives other bits on this device: expected 0000" in problem
    assert "2 of 3 kernels" in result.stdout
    assert "verdict" not in result.stdout
    found = json.loads(doctor("--json").stdout)
    assert found["ok"] is False
    (wrong,) = found["selftest"]["differ"]
    assert (wrong["kernel"], wrong["decoder"], wrong["expected"]) == (
        "head.hip argmax",
        "",
        "0" * 32,
    )


def test_no_device_is_a_problem_and_1(sim: Control) -> None:
    sim.set(devices=0)
    result = doctor()
    assert result.exit_code == 1
    (problem,) = [line for line in result.stdout.splitlines() if line.startswith("PROBLEM")]
    assert "the self-test of kernels stopped: " in problem
    assert "no device" in problem


def test_a_device_that_is_lost_is_a_problem_and_1(sim: Control) -> None:
    sim.set(fail="hipModuleLaunchKernel:2:719")
    result = doctor()
    assert result.exit_code == 1
    assert "hipErrorLaunchFailure" in result.stdout
    assert re.search(r"^self-test +stopped before its end$", result.stdout, re.MULTILINE)
    found = json.loads(doctor("--json").stdout)["selftest"]
    assert (found["complete"], found["equal"]) == (True, 3)  # the fault was for one launch
