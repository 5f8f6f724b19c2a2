"""Questions at temperature 0, here and in a process that is really another one."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from ds4q.runtime.engine import Engine
from ds4q.runtime.errors import GateError
from ds4q.runtime.gates import asking
from ds4q.runtime.gates.asking import Asker, ask_fresh_process
from ds4q.runtime.gates.pair import Surroundings
from tests.checks import check_refused
from tests.runtime.gates.tiny import Made

COPY = "Repeat exactly: {}"
NAMES = ["kv_cache_block_17", "test_count_token_o07", "PoolLock1l1l5"]


@pytest.fixture(scope="module")
def asker(lossless: Path) -> Asker:
    return Asker(Engine.load(lossless, threads=1), path=lossless)


def test_the_model_is_asked_in_its_chat_format(asker: Asker) -> None:
    assert [asker.ask(COPY.format(name)) for name in NAMES] == NAMES


def test_an_answer_that_does_not_end_is_cut_and_marked(
    asker: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """17 tokens spell the identifier; whether it ends there only the 18th tells."""
    monkeypatch.setattr(asking, "ANSWER_TOKENS", 17)
    assert asker.ask(COPY.format(NAMES[0])) == NAMES[0] + "..."
    monkeypatch.setattr(asking, "ANSWER_TOKENS", 18)
    assert asker.ask(COPY.format(NAMES[0])) == NAMES[0]


def test_a_fresh_process_gives_the_same_answers(
    asker: Asker, lossless: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = [*(COPY.format(name) for name in NAMES), "é\u2028{}", "def f(x):\n    "]
    expected = [asker.ask(question) for question in questions]
    monkeypatch.setattr(Engine, "load", lambda *_, **options: pytest.fail("not fresh"))
    assert ask_fresh_process(lossless, questions, Surroundings(2)) == expected


def test_a_fresh_process_finds_its_modules_wherever_the_user_stands(
    lossless: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('the wrong json')")
    monkeypatch.chdir(tmp_path)
    where = Surroundings(1).paged("auto")
    assert ask_fresh_process(lossless, [], where) == []


def test_a_fresh_process_that_fails_says_why(tmp_path: Path, made: Made) -> None:
    absent = tmp_path / "no\nfile.hfq"
    says = ["the fresh process failed", "No such file", "ds4q run"]
    check_refused(
        GateError, lambda: ask_fresh_process(absent, ["a"], Surroundings(1)), path=None, says=says
    )
    partial = made(partial=True)
    says = ["found 1: ", "holds only part of a model"]
    check_refused(GateError, lambda: ask_fresh_process(partial, [], Surroundings(1)), says=says)


def test_a_fresh_process_that_is_killed_says_so(
    lossless: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, -9, "", "")

    monkeypatch.setattr(subprocess, "run", killed)
    says = ["found -9: no word on stderr"]
    check_refused(GateError, lambda: ask_fresh_process(lossless, [], Surroundings(1)), says=says)


def test_questions_need_a_tokenizer(made: Made) -> None:
    engine = Engine.load(made(others={"tokenizer": "{}"}), threads=1)
    check_refused(GateError, lambda: Asker(engine, path="x"), path="x", says=["no tokenizer"])
