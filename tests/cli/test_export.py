"""ds4q export: options, output, exit statuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ds4q.cli import main


def run(*words: object) -> Result:
    return CliRunner().invoke(main, ["export", *map(str, words)])


def test_people_read_what_was_written(tiny_artifact: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.gguf"
    result = run(tiny_artifact, "--to", "gguf", "-o", out, "--only", "experts", "-q")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"wrote {out}: {out.stat().st_size:,} bytes, 12 tensors in ")
    assert lines[1].split() == ["MXFP4", "12", "tensors", "6,684,672", "bytes"]
    assert lines[2:] == ["left out 114 tensors: not an expert's"]
    assert result.stderr == ""


def test_json_is_one_document(tiny_artifact: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run(tiny_artifact, "--to", "safetensors", "-o", out, "--json", "--threads", "1")
    document = json.loads(result.stdout)
    assert document.pop("seconds") > 0
    files = {file["name"]: file["bytes"] for file in document.pop("files")}
    assert files == {path.name: path.stat().st_size for path in out.iterdir()}
    types = document.pop("types")
    assert types["I8"] == {"tensors": 192, "bytes": 6291456}
    assert document == {
        "schema_version": 1,
        "output": str(out),
        "format": "safetensors",
        "bytes": sum(files.values()),
        "tensors": sum(entry["tensors"] for entry in types.values()),
        "left_out": {},
        "warnings": [],
    }


def test_warnings_go_to_stderr(tiny_artifact: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.hfq"
    copy.write_bytes(tiny_artifact.read_bytes())
    result = run(copy, "--to", "gguf", "-o", tmp_path / "x.gguf", "--json", "-q")
    assert len(json.loads(result.stdout)["warnings"]) == 2
    lines = result.stderr.splitlines()
    assert [line.startswith("ds4q: warning: ") for line in lines] == [True, True]
    assert "no receipt" in result.stderr


def test_a_refusal_is_one_line_and_leaves_stdout_empty(tiny_artifact: Path, tmp_path: Path) -> None:
    result = run(tiny_artifact, "--to", "gguf", "-o", tiny_artifact)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == (
        f"ds4q: error: {tiny_artifact}: output exists; choose another name, or remove it first\n"
    )
    missing = run(tmp_path / "none.hfq", "--to", "gguf", "-o", tmp_path / "x.gguf")
    assert (missing.exit_code, missing.stdout) == (1, "")
    assert "none.hfq: No such file" in missing.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["-o", "x"], "--to"),
        (["--to", "gguf"], "--output"),
        (["--to", "onnx", "-o", "x"], "onnx"),
        (["--to", "gguf", "-o", "x", "--only", "norms"], "norms"),
        (["--to", "safetensors", "-o", "x", "--variant-107", "dual"], "are for --to gguf"),
        (["--to", "safetensors", "-o", "x", "--fp6-code32", "zero"], "are for --to gguf"),
    ],
)
def test_wrong_usage(tiny_artifact: Path, options: list[str], says: str) -> None:
    result = run(tiny_artifact, *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert says in result.stderr
