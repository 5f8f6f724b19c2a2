"""ds4q calibrate: options, output and exit statuses, end to end on ds4-tiny."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ds4q.cli import main
from ds4q.hipkern.sim.control import Control
from ds4q.quantize.imatrix import read_imatrix

DATA = Path(__file__).parents[1] / "data"
TEXT = DATA / "text" / "calibration.txt"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["calibrate", *map(str, arguments)])


def test_writes_an_imatrix_and_a_line(tiny_artifact: Path, tmp_path: Path) -> None:
    out = tmp_path / "tiny.imatrix"
    result = run(tiny_artifact, "--text", TEXT, "-o", out, "--tokens", "900", "-q")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith(f"{out}: 4 layers of 16 experts, 902 tokens in 2 windows")
    assert result.stderr == ""
    imatrix = read_imatrix(out, dims=None, fingerprint=None)
    assert imatrix.tokens(3).sum() == 902 * 4


def test_json(tiny_artifact: Path, tmp_path: Path) -> None:
    other = tmp_path / "more.ids"
    other.write_text("1,2,3\n4")
    out = tmp_path / "tiny.imatrix"
    options = ["--text", TEXT, "--text", other, "--window", "40", "--json", "--threads", "1"]
    result = run(tiny_artifact, "-o", out, "--tokens", "39", *options)
    document = json.loads(result.stdout)
    assert document.pop("seconds") > 0
    texts = [{"file": str(p), "sha256": sha256(p)} for p in (TEXT, other)]
    fingerprint = read_imatrix(out, dims=None, fingerprint=None).fingerprint
    unseen = document.pop("unseen")
    assert document == {
        "schema_version": 1,
        "output": str(out),
        "bytes": out.stat().st_size,
        "sha256": sha256(out),
        "source_fingerprint": fingerprint,
        "texts": texts,
        "tokens": 40,
        "windows": 1,
        "window_tokens": 40,
        "layers": 4,
        "experts": 16,
    }
    assert unseen == read_imatrix(out, dims=None, fingerprint=None).unseen > 0
    assert f"{unseen} of 64 experts saw no token" in result.stderr
    assert run(tiny_artifact, "-o", out, "--tokens", "41", *options, "-q").stderr == ""


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_another_file_is_kept_unless_forced(tiny_artifact: Path, tmp_path: Path) -> None:
    out = tmp_path / "precious"
    out.write_text("precious")
    options = (tiny_artifact, "--text", TEXT, "-o", out, "--tokens", "10")
    refused = run(*options)
    assert refused.exit_code == 1
    assert refused.stderr.count("\n") == 1
    assert "--force" in refused.stderr
    assert out.read_text() == "precious"
    assert run(*options, "--force").exit_code == 0
    assert run(*options).exit_code == 0  # now an imatrix stands there


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["-o", "a"], "--text"),
        (["--text", TEXT], "--output"),
        (["--text", "none.txt", "-o", "a"], "none.txt"),
        (["--text", TEXT, "-o", "a", "--tokens", "0"], "--tokens"),
        (["--text", TEXT, "-o", "a", "--window", "1"], "--window"),
    ],
)
def test_wrong_usage(tiny_artifact: Path, options: list[object], words: str) -> None:
    result = run(tiny_artifact, *options)
    assert result.exit_code == 2
    assert words in result.stderr


def test_partial_and_draft_artifacts(random_artifact: Path, tmp_path: Path) -> None:
    part = tmp_path / "part.hfq"
    source = DATA / "ds4-random"
    quantize = ["quantize", str(source), "-o", str(part), "--exclude-prefix", "layers.5", "-q"]
    assert CliRunner().invoke(main, quantize).exit_code == 0
    draft = random_artifact.with_name("ds4-random-dspark.hfq")
    for file, words in ((part, "only part of a model"), (draft, "draft part of a model")):
        result = run(file, "--text", TEXT, "-o", tmp_path / "a")
        assert result.exit_code == 1
        assert words in result.stderr
        assert result.stderr.count("\n") == 1


def test_an_interrupt_leaves_nothing(tiny_artifact: Path, tmp_path: Path) -> None:
    out = tmp_path / "out" / "tiny.imatrix"
    out.parent.mkdir()
    options = ["-o", str(out), "--text", str(TEXT)]
    command = [sys.executable, "-m", "ds4q", "calibrate", str(tiny_artifact), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith(b"calibrating"):
                break
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 130
    assert stdout == b""
    left = f"{out} was not written; nothing unfinished was left".encode()
    assert stderr.splitlines()[-2:] == [b"ds4q: interrupted", left]
    assert list(out.parent.iterdir()) == []


@pytest.mark.parametrize("size", ["240KB", "1MB", "auto"])
def test_a_cache_changes_no_byte(size: str, tiny_artifact: Path, tmp_path: Path) -> None:
    """Of a layer's 1.9 MB of experts two, half or all are in memory at a time."""
    words = ["--text", TEXT, "--tokens", "300", "--window", "120", "-q"]
    for name, cache in (("whole", []), ("paged", ["--expert-cache", size])):
        result = run(tiny_artifact, *words, "-o", tmp_path / name, *cache)
        assert result.exit_code == 0, result.stderr
    assert (tmp_path / "whole").read_bytes() == (tmp_path / "paged").read_bytes()


def test_on_a_device(tiny_artifact: Path, tmp_path: Path, sim: Control) -> None:
    """The CPU's routing, and its means but for rounding; the same bytes each time."""
    made = {}
    for name, device in (("cpu", "cpu"), ("hip", "hip"), ("again", "hip")):
        out = made[name] = tmp_path / name
        words = ["--text", TEXT, "-o", out, "--tokens", "60", "--window", "40", "-q"]
        result = run(tiny_artifact, *words, "--device", device)
        assert result.exit_code == 0, result.stderr
    assert sha256(made["hip"]) == sha256(made["again"]) != sha256(made["cpu"])
    on_cpu, on_device = (read_imatrix(made[n], dims=None, fingerprint=None) for n in ("cpu", "hip"))
    for layer in range(4):
        assert on_cpu.tokens(layer).tolist() == on_device.tokens(layer).tolist()


def test_a_device_holds_a_layer_whatever_the_cache(tiny_artifact: Path, tmp_path: Path) -> None:
    words = ["--text", TEXT, "-o", tmp_path / "a", "--device", "hip", "--expert-cache", "3MB"]
    result = run(tiny_artifact, *words)
    assert result.exit_code == 2
    assert "--expert-cache is for --device cpu" in result.stderr


def test_without_a_device(
    tiny_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS4Q_HIP", str(tmp_path / "none.so"))
    result = run(tiny_artifact, "--text", TEXT, "-o", tmp_path / "a", "--device", "hip")
    assert result.exit_code == 1
    assert result.stderr.count("ds4q: error:") == 1
    assert "none.so" in result.stderr
    assert list(tmp_path.iterdir()) == []
