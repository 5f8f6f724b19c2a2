"""What scripts rely on, with real commands in real processes: exit status, stdout, stderr."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DS4Q = [sys.executable, "-m", "ds4q"]
Done = subprocess.CompletedProcess[str]


def ds4q(*arguments: object, **environment: str) -> Done:
    return subprocess.run(
        [*DS4Q, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )


@pytest.fixture(scope="module")
def artifact(cases_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact of one partial layer, written without a terminal."""
    out = tmp_path_factory.mktemp("streams") / "good.hfq"
    done = ds4q("quantize", cases_dir / "good", "-o", out, "--allow-partial", "--json")
    assert done.returncode == 0, done.stderr
    return out


def test_a_missing_source_is_one_line_and_no_output(tmp_path: Path) -> None:
    out = tmp_path / "x.hfq"
    done = ds4q("quantize", "/no/such", "-o", out)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"ds4q: error: /no/such: [^\n]+\n", done.stderr)
    assert list(tmp_path.iterdir()) == []


def test_a_changed_byte_is_1_and_names_the_tensor(
    artifact: Path, cases_dir: Path, tmp_path: Path
) -> None:
    index = json.loads(ds4q("inspect", artifact, "--tensors", "--json").stdout)
    last = max(index["tensor_list"], key=lambda tensor: tensor["offset"])
    data = bytearray(artifact.read_bytes())
    data[last["offset"] + last["bytes"] - 1] ^= 1
    changed = tmp_path / "changed.hfq"
    changed.write_bytes(data)
    done = ds4q("verify", changed, "--source", cases_dir / "good", "--json")
    assert done.returncode == 1
    document = json.loads(done.stdout)
    assert document["ok"] is False
    named = {f["tensor"] for check in document["checks"] for f in check["failures"]}
    assert last["name"] in named
    for_people = ds4q("verify", changed, "--source", cases_dir / "good")
    assert for_people.returncode == 1
    assert last["name"] in for_people.stderr


def told(stderr: str) -> list[str]:
    """Lines of stderr but for progress, of which a busy machine sees one a second."""
    lines = stderr.splitlines()
    return [line for line in lines if not re.match(r"\w+: \d+ % \(", line)]


def test_a_sound_file_is_0(artifact: Path, cases_dir: Path) -> None:
    done = ds4q("verify", artifact, "--source", cases_dir / "good")
    assert done.returncode == 0
    assert not told(done.stderr)


@pytest.mark.parametrize("term", ["xterm-256color", "dumb"])
def test_a_log_has_no_carriage_returns_and_no_escapes(
    cases_dir: Path, tmp_path: Path, term: str
) -> None:
    out = tmp_path / "o.hfq"
    done = ds4q("quantize", cases_dir / "good", "-o", out, "--allow-partial", TERM=term)
    assert done.returncode == 0
    for text in (done.stdout, done.stderr):
        assert "\r" not in text
        assert "\x1b" not in text
    assert str(out) in done.stdout  # the result; warnings and progress are on stderr
    assert all(line.startswith("ds4q: warning: ") for line in told(done.stderr))


def test_json_with_warnings_is_one_document(cases_dir: Path, tmp_path: Path) -> None:
    done = ds4q(
        "quantize", cases_dir / "good", "-o", tmp_path / "o.hfq", "--allow-partial", "--json"
    )
    assert done.returncode == 0
    assert json.loads(done.stdout)["partial"] is True
    assert "ds4q: warning: " in done.stderr


def test_json_of_a_failure_leaves_stdout_empty(tmp_path: Path) -> None:
    (tmp_path / "not.hfq").write_bytes(b"no artifact at all" * 10)
    for command in (["verify"], ["inspect"], ["run", "-p", "x"]):
        done = ds4q(command[0], tmp_path / "not.hfq", *command[1:], "--json")
        assert done.returncode == 1, command
        assert "not.hfq" in done.stderr + done.stdout
        if command[0] == "verify":
            assert json.loads(done.stdout)["ok"] is False  # the report is the result
        else:
            assert done.stdout == ""
        assert "Traceback" not in done.stderr


def test_head_ends_inspect_quietly(artifact: Path) -> None:
    command = f"{sys.executable} -m ds4q inspect {artifact} --tensors | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout.count("\n") == 1


def test_a_closed_stdin_does_not_matter(cases_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "o.hfq"
    source = cases_dir / "good"
    command = f"exec {sys.executable} -m ds4q quantize {source} -o {out} --allow-partial -q <&-"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert ds4q("verify", out).returncode == 0
