"""What reaches a terminal: no controls from files and servers, no failure of the encoding."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ds4q.artifact.errors import Ds4qError
from ds4q.cli import common, main
from ds4q.cli.run import _Screen
from tests.registry.documents import document, entry

HOSTILE = "\x9b31mX\u202e\x1b[2J\x07\u2028\u200b\x85[red]\n## injected"


def controls(text: str) -> list[str]:
    """Characters that a terminal may obey, or that hide or reorder others."""
    return [ascii(c) for c in text if c != "\n" and not c.isprintable()]


def hostile_documents() -> dict[str, dict[str, Any]]:
    """Registry documents with one hostile field each."""
    made = {"generated_at": document({"t:x": entry()}, generated_at=HOSTILE)}
    for field in (
        "desc", "quant", "quant_recipe", "repo", "file", "revision", "arch", "family", "license",
        "base_model", "notes", "unknownkey", "kv_type", "default_sampling", "temperature",
        HOSTILE,
    ):  # fmt: skip
        made[field] = document({"t:x": entry(**{field: HOSTILE})})
    made["profiles"] = document({"t:x": entry(sampling_profiles={HOSTILE: {"temperature": 1}})})
    made["aliases"] = document({"t:x": entry()}, aliases={HOSTILE: "t:x"})
    made["tag"] = document({HOSTILE: entry()})
    return made


@pytest.mark.parametrize("field", hostile_documents())
def test_a_registry_document_sends_no_controls(
    field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS4Q_HOME", str(tmp_path / "home"))
    file = tmp_path / "r.json"
    file.write_text(json.dumps(hostile_documents()[field]), "utf-8")
    for words in (
        ["list"], ["show", "t:x"], ["card", "t:x"], ["status"], ["verify"],
        ["pull", "t:x", "--dry-run"],
    ):  # fmt: skip
        done = CliRunner().invoke(main, ["registry", *words, "--registry", str(file)])
        assert controls(done.output) == [], (words, done.output)
        assert "internal error" not in done.stderr
        assert "\n## injected" not in done.output


def test_tables_labels_and_notes_send_no_controls(capsys: pytest.CaptureFixture[str]) -> None:
    common.print_table((HOSTILE, "b"), [(HOSTILE, "[link=file:///x]y[/link]"), None, ("c", "d")])
    common.line(HOSTILE)
    common.say(HOSTILE, style=lambda text: f"<{text}>")
    common.warn(HOSTILE + "x" * 90_000)
    shown = capsys.readouterr()
    assert controls(shown.out + shown.err) == []
    assert "[red]" in shown.out, "text and not markup"
    assert "[link=file:///x]y[/link]" in shown.out
    assert shown.err.count("\n") == 2
    assert len(shown.err) < 10_000


def test_words_of_a_command_line_are_quoted_without_controls() -> None:
    for words in ([HOSTILE], ["inspect", "--\x1b[2J"], ["run", "x", "--temp", "\x9b1m\u202e"]):
        done = CliRunner().invoke(main, words)
        assert done.exit_code == 2
        assert controls(done.output) == []


def test_a_traceback_has_no_controls() -> None:
    done = CliRunner().invoke(main, ["inspect", "/no/such/\x1b]0;x\x07", "-v"])
    assert done.exit_code == 1
    assert controls(done.output) == []
    try:
        raise Ds4qError(f"\x1b[2J{HOSTILE}")
    except Ds4qError as error:
        failed = error
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", written := io.StringIO())
        common.say_traceback(failed)
    assert "Traceback" in written.getvalue()
    assert controls(written.getvalue()) == []


@pytest.mark.parametrize("terminal", [True, False])
def test_a_model_s_text_is_neutralised_for_a_terminal_only(
    terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = io.BytesIO()
    stdout = io.TextIOWrapper(raw, "utf-8")
    monkeypatch.setattr(stdout, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(sys, "stdout", stdout)
    text = "one\ttwo\r\n\x1b]0;title\x07\x9b2J\u202e\u2066 caf\u00e9 \u200f \u200d"
    _Screen(as_ids=False, thinking=False)._write(text)
    stdout.flush()
    shown = raw.getvalue().decode("utf-8")
    bell = "\ufffd"
    expected = f"one\ttwo\n{bell}]0;title{bell}{bell}2J{bell}{bell} caf\u00e9 \u200f \u200d"
    assert shown == (expected if terminal else text)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp437"])
def test_a_stream_that_lacks_a_character_escapes_it(
    encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "\u043c\u043e\u0434\u0435\u043b\u044c\udcff.json"
    file.write_text("{}")
    raw = {name: io.BytesIO() for name in ("stdout", "stderr")}
    for name, stream in raw.items():
        monkeypatch.setattr(sys, name, io.TextIOWrapper(stream, encoding))
    with pytest.raises(SystemExit) as end:
        main(["verify", str(file), "--quiet"])
    assert end.value.code == 1  # of the job: the file is not an artifact
    shown = raw["stdout"].getvalue() + raw["stderr"].getvalue()
    assert rb"\u043c\u043e\u0434\u0435\u043b\u044c\xff.json" in shown
    assert b"internal error" not in shown
    assert b"codec" not in shown
