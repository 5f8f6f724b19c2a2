"""What commands share: sizes, options, progress, JSON, last words."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from ds4q.artifact import stops
from ds4q.artifact.files import AppearedError, beginning
from ds4q.cli import common


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("8GiB", 8 << 30),
        ("98GB", 98_000_000_000),
        ("1.5GB", 1_500_000_000),
        ("1.5 gib", 3 << 29),
        ("4096", 4096),
        ("7B", 7),
        ("0.1TB", 100_000_000_000),
        ("2PiB", 2 << 50),
        ("1.0005kB", 1000),  # part of a byte is dropped
    ],
)
def test_sizes_are_exact(text: str, size_bytes: int) -> None:
    assert common.SIZE.convert(text, None, None) == size_bytes


@pytest.mark.parametrize(
    "text", ["", "8G", "8GIBB", "-1", "0", "0.4", "1e9", "1,5GB", "nan", "GiB", "٣GB", "9" * 21]
)
def test_what_is_not_a_size_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter):
        common.SIZE.convert(text, None, None)


@given(st.integers(1, 10**15))
def test_a_number_of_bytes_is_itself(size_bytes: int) -> None:
    assert common.SIZE.convert(str(size_bytes), None, None) == size_bytes
    assert common.SIZE.convert(size_bytes, None, None) == size_bytes


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1 kB"),
        (999_600, "1 MB"),
        (3_420_000_000, "3.42 GB"),
        (5 * 10**15, "5e+03 TB"),
    ],
)
def test_amounts_read_well(amount: int, text: str) -> None:
    assert common.amount_text(amount) == text


def test_counts_keep_their_unit() -> None:
    assert common.amount_text(12345, "tokens") == "12,345 tokens"


@click.command()
@common.threads_option
@common.json_option
@common.talk_options
def shared(threads: int, as_json: bool, quiet: bool, verbose: bool) -> None:
    click.echo(f"{threads} {as_json} {quiet} {verbose}")


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        ([], f"{len(os.sched_getaffinity(0))} False False False"),
        (["--threads", "3", "--json", "-q", "-v"], "3 True True True"),
        (["--quiet", "--verbose"], f"{len(os.sched_getaffinity(0))} False True True"),
    ],
)
def test_shared_options(arguments: list[str], answer: str) -> None:
    result = CliRunner().invoke(shared, arguments)
    assert (result.exit_code, result.output.strip()) == (0, answer)


@pytest.mark.parametrize("threads", ["0", "-1", "1025", "two"])
def test_impossible_thread_counts_are_usage_errors(threads: str) -> None:
    assert CliRunner().invoke(shared, ["--threads", threads]).exit_code == 2


def test_json_is_one_ascii_document(capsys: pytest.CaptureFixture[str]) -> None:
    common.emit_json({"text": "你好 \udcff", "n": 1})
    out = capsys.readouterr().out
    assert out.isascii()
    assert json.loads(out) == {"schema_version": 1, "text": "$'你好 \\xff'", "n": 1}


def test_json_has_no_nan() -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        common.emit_json({"x": float("nan")})


class Gone(io.StringIO):
    """A stream whose reader has left."""

    def write(self, text: str) -> int:
        raise BrokenPipeError

    def flush(self) -> None:
        raise BrokenPipeError


def test_words_to_a_lost_stderr_do_not_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Gone())
    common.say("lost")
    common.warn("lost")
    safe = common._SafeStderr()
    assert safe.write("lost") == 4
    safe.flush()


def stopped(out: Path, text: str | None) -> None:
    if text is not None:
        out.write_text(text)
    raise KeyboardInterrupt


def test_a_stop_says_whether_a_file_was_written(tmp_path: Path) -> None:
    out = tmp_path / "x"
    said = [" was not written; nothing unfinished was left", " is written"]
    for text, words in zip((None, "new"), said, strict=True):
        with pytest.raises(KeyboardInterrupt) as stop, common.writing(out):
            stopped(out, text)
        assert stop.value.__notes__ == [f"{out}{words}"]


def test_last_words_are_left_on_a_stop_only() -> None:
    with pytest.raises(KeyboardInterrupt) as stop, common.last_words(lambda: "go on with: x"):
        raise stops.Terminated
    assert stop.value.__notes__ == ["go on with: x"]
    with pytest.raises(KeyboardInterrupt) as stop, common.last_words(lambda: None):
        raise KeyboardInterrupt
    assert not hasattr(stop.value, "__notes__")
    with pytest.raises(ValueError, match="else") as other, common.last_words(lambda: "never"):
        raise ValueError("else")
    assert not hasattr(other.value, "__notes__")


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


def test_a_log_gets_whole_lines_at_most_one_a_second(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    monkeypatch.setattr(common, "time", clock)
    with common.progress("packing", 1000, unit="rows") as advance:
        for _ in range(100):  # 10 s of steps of 0.1 s
            clock.now_s += 0.1
            advance(10)
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert captured.out == ""
    assert "\r" not in captured.err
    assert "\x1b" not in captured.err
    assert 8 <= len(lines) <= 10
    assert lines[0].startswith("packing: 1")
    assert lines == sorted(lines, key=lambda line: int(line.split()[1]))
    assert lines[-1].endswith("of 1,000 rows)")


def test_bytes_have_a_rate_and_a_time_that_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    monkeypatch.setattr(common, "time", clock)
    with common.progress("pull", 1_000_000_000) as advance:
        advance(500_000_000)  # there from an earlier run
        for step in [20_000_000] * 20 + [0] * 12:
            clock.now_s += 2
            advance(step)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "pull: 52 % (520 MB of 1 GB, 10 MB/s, 48 s left)"
    assert lines[19] == "pull: 90 % (900 MB of 1 GB, 10 MB/s, 10 s left)"
    assert lines[20] == "pull: 90 % (900 MB of 1 GB, 9 MB/s, 11 s left)"
    assert lines[31] == "pull: 90 % (900 MB of 1 GB)"  # nothing came for a while


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (99.4, "99 s"), (100, "2 min"), (5940, "99 min"), (6000, "1 h 40 min")],
)
def test_times_are_told_roughly(seconds: float, text: str) -> None:
    assert common.time_text(seconds) == text


def test_a_short_job_and_a_quiet_one_log_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    monkeypatch.setattr(common, "time", clock)
    with common.progress("short", 2) as advance:
        advance(2)
    with common.progress("quiet", 2, quiet=True) as advance:
        clock.now_s += 60
        advance(2)
    assert capsys.readouterr().err == ""


def test_nothing_to_do_is_all_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    monkeypatch.setattr(common, "time", clock)
    with common.progress("empty", 0) as advance:
        clock.now_s += 2
        advance(0)
    assert capsys.readouterr().err == "empty: 100 % (0 bytes of 0 bytes)\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("term", "redraws"), [("xterm-256color", True), ("dumb", False), ("", False), (None, False)]
)
def test_only_a_capable_terminal_gets_a_bar(
    monkeypatch: pytest.MonkeyPatch, term: str | None, redraws: bool
) -> None:
    monkeypatch.delenv("TERM", raising=False)
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    if term is not None:
        monkeypatch.setenv("TERM", term)
    stderr = Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    with common.progress("[b]packing[/b]", 10, unit="rows") as advance:
        advance(5)
    assert ("\x1b[" in stderr.getvalue()) is redraws
    assert ("[b]packing[/b]" in stderr.getvalue()) is redraws  # a label is text, not markup


class Wrapped(io.TextIOWrapper):
    """As the real one, with bytes beneath it."""

    def isatty(self) -> bool:
        return True


def test_what_is_said_stands_above_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    beneath = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", Wrapped(beneath, "utf-8", write_through=True))
    with common.progress("packing", 10, unit="rows"):
        common.say("a word")
    shown = beneath.getvalue().decode()
    before, _, after = shown.partition("a word\n")
    assert before.endswith("\r\x1b[2K")  # what stood in the line is gone
    assert "packing" in before
    assert "packing" in after


def test_a_file_on_stderr_gets_no_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    with open(tmp_path / "log", "w+") as log:
        monkeypatch.setattr(sys, "stderr", log)
        assert not common._stderr_can_redraw()


# --- files that a user names for a report

OURS = beginning(b"mark")


def test_a_report_replaces_an_earlier_report_and_nothing_else(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    common.claim_report(report, "--junit", OURS)
    common.write_report(report, "mark 1", OURS)
    common.claim_report(report, "--junit", OURS)
    common.write_report(report, "mark 2", OURS)
    assert report.read_text("utf-8") == "mark 2"
    assert list(tmp_path.iterdir()) == [report]
    for other in ("an artifact of 150 GB", "notes about the mark of a report"):
        report.write_text(other)
        with pytest.raises(click.BadParameter, match="exists and is no earlier report"):
            common.claim_report(report, "--junit", OURS)


def test_a_file_that_appears_before_the_report_is_written_is_kept(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    common.claim_report(report, "--junit", OURS)
    report.write_text("an artifact of 150 GB")
    with pytest.raises(AppearedError):
        common.write_report(report, "mark", OURS)
    assert [(path, path.read_text()) for path in tmp_path.iterdir()] == [
        (report, "an artifact of 150 GB")
    ]


@pytest.mark.parametrize("place", ["no/such/folder.xml", ".", "/dev/full"])
def test_a_report_that_cannot_be_written_is_refused_before_work(tmp_path: Path, place: str) -> None:
    with pytest.raises(click.BadParameter):
        common.claim_report(tmp_path / place, "--junit", OURS)


def test_a_report_is_written_through_no_other_file(tmp_path: Path) -> None:
    notes, precious = tmp_path / "report.xml.tmp", tmp_path / "precious.txt"
    precious.write_text("precious")
    notes.symlink_to(precious)
    common.write_report(tmp_path / "report.xml", "report", OURS)
    assert (tmp_path / "report.xml").read_text() == "report"
    assert not (tmp_path / "report.xml").is_symlink()
    assert notes.is_symlink()
    assert precious.read_text() == "precious"
    assert len(list(tmp_path.iterdir())) == 3


def test_a_report_that_fails_leaves_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = tmp_path / "report.xml"
    common.write_report(report, "mark 1", OURS)

    def fail(source: object, target: object) -> None:
        raise OSError(errno.EIO, "broken disk", str(source))

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="broken disk") as caught:
        common.write_report(report, "second", OURS)
    assert caught.value.filename == str(report)
    assert (report.read_text("utf-8"), list(tmp_path.iterdir())) == ("mark 1", [report])
