"""ds4q run --device hip on the simulated device: the ids of the CPU, and one line when it fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ds4q import api
from ds4q.cli import main
from ds4q.hipkern.sim.control import Control
from ds4q.runtime.device.engine import HipEngine

DS4Q = [sys.executable, "-m", "ds4q"]
DATA = Path(__file__).parents[1] / "data"
MODELS = {"ds4-tiny": 12, "ds4-random": 4}  # new tokens: a simulated step takes a tenth of a second
RECIPES: dict[str, dict[str, Any]] = {
    "fp4": {},
    "fp4-q8": {},
    "mix": {},
    "budget": {"target_bpw": 3.0},
}
OPTIONS = ["--prompt-ids", "5,6", "--temp", "0", "--ignore-eos"]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["run", *arguments])


def prompt_of(name: str) -> str:
    expected = json.loads((DATA / name / "expected.json").read_text("utf-8"))
    ids = expected["copy-snake"]["prompt"] if name == "ds4-tiny" else expected["prompt"][:16]
    return ",".join(map(str, ids))


@pytest.mark.filterwarnings("ignore::UserWarning")  # what quantize says of the models
@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        pytest.param(name, recipe, marks=() if first else pytest.mark.slow)
        for name, recipe, first in (
            *(("ds4-tiny", recipe, recipe in ("fp4", "mix")) for recipe in RECIPES),
            *(("ds4-random", recipe, recipe in ("fp4-q8", "budget")) for recipe in RECIPES),
        )
    ],
)
def test_greedy_ids_are_those_of_the_cpu(
    name: str, recipe: str, sim: Control, tmp_path: Path
) -> None:
    path = tmp_path / "m.hfq"
    api.quantize(DATA / name, path, recipe=recipe, threads=2, **RECIPES[recipe])
    options = ["--prompt-ids", prompt_of(name), "--temp", "0", "--max-tokens", str(MODELS[name])]
    options += ["--ignore-eos", "--json"]
    found, wanted = (run(str(path), *options, "--device", device) for device in ("hip", "cpu"))
    assert found.exit_code == 0, found.stderr
    assert "simulated" in found.stderr
    document, reference = json.loads(found.stdout), json.loads(wanted.stdout)
    assert document["ids"] == reference["ids"]
    assert document["text"] == reference["text"]
    assert document["device"] == {
        "kind": "sim",
        "name": "ds4q simulated device (CPU)",
        "arch": "sim",
    }
    assert document["timings"].keys() == reference["timings"].keys()


def test_the_same_seed_draws_the_same_ids(sim: Control, tiny_artifact: Path) -> None:
    options = ["--raw", "-p", "def f(", "--temp", "0.8", "--seed", "3", "--max-tokens", "8"]
    texts = [
        run(str(tiny_artifact), *options, "--device", device).stdout for device in ("hip", "cpu")
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"devices": 0}, "no device"),
        ({"memory_bytes": 4 << 20}, "bytes on the device in all"),
        ({"fail": "hipMalloc:2:2"}, "hipErrorOutOfMemory"),
        ({"fail": "hipStreamSynchronize:3:719"}, "hipErrorLaunchFailure (719)"),
        ({"fail": "hipGraphLaunch:2:719"}, "hipErrorLaunchFailure (719)"),
        ({"lost_after": 60}, "hipErrorLaunchFailure (719)"),
        ({"lost_after": 330}, "hipErrorLaunchFailure (719)"),
        ({"fail": "hipMemcpyAsync:5:1"}, "hipMemcpyAsync failed"),
        ({"fail": "hipEventRecord:3:999"}, "hipEventRecord failed"),
    ],
    ids=str,
)
def test_a_device_that_fails_is_one_line(
    settings: dict[str, Any], says: str, sim: Control, tiny_artifact: Path
) -> None:
    """The fixture sees that nothing is left on the device."""
    sim.set(**settings)
    result = run(str(tiny_artifact), "--device", "hip", "--max-tokens", "4", *OPTIONS)
    assert result.exit_code == 1
    errors = [line for line in result.stderr.splitlines() if line.startswith("ds4q: error: ")]
    assert len(errors) == 1
    assert says in errors[0]
    assert "Traceback" not in result.output


def test_without_a_library_there_is_one_line(tiny_artifact: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [*DS4Q, "run", str(tiny_artifact), "--prompt-ids", "5", "--device", "hip"],
        capture_output=True,
        text=True,
        env=os.environ | {"ROCM_PATH": str(tmp_path)},
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("ds4q: error: HIP is not available: ")
    assert len(done.stderr.splitlines()) == 1


def test_an_interrupt_leaves_nothing_behind(
    sim: Control, tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fixture looks."""
    pick, left = HipEngine.next_id, [3]

    def next_id(self: HipEngine, state: Any, ids: Any) -> int:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return pick(self, state, ids)

    monkeypatch.setattr(HipEngine, "next_id", next_id)
    result = run(str(tiny_artifact), "--device", "hip", "--max-tokens", "9", *OPTIONS)
    assert result.exit_code == 130
    assert "generated: 2 tokens" in result.stderr


def test_a_signal_ends_a_run_with_a_report(tiny_artifact: Path) -> None:
    with subprocess.Popen(
        [*DS4Q, "run", str(tiny_artifact), "--device", "hip", "--max-tokens", "100000", *OPTIONS],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"DS4Q_HIP": "sim"},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(8)  # it is generating
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "ended by: interrupt" in errors
    assert "Traceback" not in errors
