"""ds4q run on real artifacts: the expected answers of both models, signals, broken pipes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ds4q.cli import main

DS4Q = [sys.executable, "-m", "ds4q"]
DATA = Path(__file__).parents[1] / "data"
TINY, RANDOM = DATA / "ds4-tiny", DATA / "ds4-random"
VOCAB = 512
ENDLESS = ["--raw", "-p", "def f(", "--ignore-eos", "--max-tokens", "1000000", "--temp", "0"]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["run", *arguments])


def expected(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "expected.json").read_text(encoding="utf-8"))
    return content


def common(ids: Sequence[int], wanted: Sequence[int], margins: Sequence[float]) -> int:
    """How many leading ids must be equal: up to the first step whose margin is small."""
    assert len(ids) <= len(wanted) == len(margins)
    return next((i for i, margin in enumerate(margins) if margin <= 0.01), len(wanted))


@pytest.mark.parametrize("name", ["copy-snake", "copy-hex", "copy-upper", "recall"])
def test_tiny_answers_in_chat(name: str, tiny_artifact: Path) -> None:
    case = expected(TINY)[name]
    prompt = bytes(case["prompt"][2:-2]).decode()
    document = json.loads(run(str(tiny_artifact), "-p", prompt, "--temp", "0", "--json").stdout)
    assert document["text"] == case["text"]
    assert document["ids"] == case["greedy"]
    assert document["finish_reason"] == "stop"
    assert document["usage"]["prompt_tokens"] == len(case["prompt"])


@pytest.mark.parametrize("name", ["code-short", "code-long", "code-across-window"])
def test_tiny_goes_on_from_ids(name: str, tiny_artifact: Path) -> None:
    case = expected(TINY)[name]
    prompt = ",".join(map(str, case["prompt"]))
    options = ["--prompt-ids", prompt, "--temp", "0", "--max-tokens", "32", "--json"]
    document = json.loads(run(str(tiny_artifact), *options).stdout)
    n = common(document["ids"], case["greedy"], case["margins"])
    assert document["ids"][:n] == case["greedy"][:n]
    assert n > 3


def test_tiny_streams_the_same_text(tiny_artifact: Path) -> None:
    case = expected(TINY)["copy-snake"]
    prompt = bytes(case["prompt"][2:-2]).decode()
    assert run(str(tiny_artifact), "-p", prompt, "--temp", "0").stdout == case["text"] + "\n"


def test_tiny_same_seed_same_text(tiny_artifact: Path) -> None:
    options = ["--raw", "-p", "def f(", "--seed", "3", "--max-tokens", "24", "--json"]
    texts = [
        json.loads(run(str(tiny_artifact), *options, "--threads", threads).stdout)["ids"]
        for threads in ("1", "2")
    ]
    assert texts[0] == texts[1]


def test_random_prints_ids(random_artifact: Path) -> None:
    prompt = ",".join(map(str, expected(RANDOM)["prompt"][:20]))
    result = run(str(random_artifact), "--prompt-ids", prompt, "--max-tokens", "4", "--ignore-eos")
    assert result.exit_code == 0, result.stderr
    ids = [int(word) for word in result.stdout.strip().split(",")]
    assert len(ids) == 4
    assert all(0 <= token < VOCAB for token in ids)
    refused = run(str(random_artifact), "-p", "hi")
    assert refused.exit_code == 1
    assert refused.stderr.count("\n") == 1


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_ends_a_real_run(number: int, status: int, tiny_artifact: Path) -> None:
    process = subprocess.Popen(
        [*DS4Q, "run", str(tiny_artifact), *ENDLESS], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    first = process.stdout.read(1)  # it generates
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == status
    assert first
    assert (first + stdout).endswith(b"\n")
    assert b"ended by: interrupt" in stderr
    assert b"Traceback" not in stderr


def test_reader_that_leaves(tiny_artifact: Path) -> None:
    with subprocess.Popen(
        [*DS4Q, "run", str(tiny_artifact), *ENDLESS], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(1)
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read()
    assert process.returncode == 1
