"""ds4q serve as a process: options, what it says, its exit statuses; the examples of the docs."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numba
import pytest
from click.testing import CliRunner
from pydantic import BaseModel

from ds4q.cli import main
from ds4q.runtime.errors import RunError
from ds4q.runtime.serve.schema import ONLY, ChatRequest, CompletionRequest
from tests.cli.test_run import write_artifact
from tests.runtime.serve.served import metadata

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "docs" / "serving.md", ROOT / "README.md")
PATIENCE_S = 300.0  # only broken code waits so long

SCRIPTED = """
import sys, threading
from ds4q.artifact import stops
from ds4q.cli import loading, main
from ds4q.runtime.serve.scheduler import Scheduler
from tests.runtime.serve.scripted import ScriptedEngine

def hastening(engine):  # what is under way when the end is asked for ends fast
    drain = Scheduler.drain
    def hasten(self, timeout_s):
        engine.delay_s = 0
        return drain(self, timeout_s)
    Scheduler.drain = hasten

def load(self, tokens, report, **room):
    report(10, 100)
    if MODE == "blocked":  # hears nothing of an end
        threading.Event().wait()
    if MODE == "broken":
        raise ZeroDivisionError("a bug in loading")
    engine = ScriptedEngine(default=b"never-ending " * 300)
    engine.delay_s = 1.0 if MODE == "slow" else 0.02
    if MODE == "hasty":
        hastening(engine)
    return engine, {"kind": "cpu"}

MODE = sys.argv.pop(1)
loading.Loading.load = load
with stops.caught(to_the_end=True):
    main(sys.argv[1:])
"""


class Process:
    """A server that runs, and what it has said on stderr.

    Attributes
    ----------
    url : where it listens
    said : lines of stderr so far
    """

    def __init__(self, command: list[str], **environment: str) -> None:
        path = {"PYTHONPATH": str(ROOT)}
        self.popen = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | path | environment,
            text=True,
        )
        self.said: list[str] = []
        self.url = ""
        self._heard = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = re.search(r"http://\S+", self.await_line("listening on"))[0]  # type: ignore[index]

    def _read(self) -> None:
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            with self._heard:
                self.said.append(line.rstrip("\n"))
                self._heard.notify_all()
        with self._heard:
            self.said.append("")
            self._heard.notify_all()

    def await_line(self, words: str) -> str:
        """The first line with ``words``."""

        def found() -> bool:
            return any(words in line for line in self.said) or self.said[-1:] == [""]

        with self._heard:
            assert self._heard.wait_for(found, PATIENCE_S), self.said
        lines = [line for line in self.said if words in line]
        assert lines, self.said
        return lines[0]

    def end(self, *signals: int) -> int:
        """The exit status after these signals; all that was said is in ``said`` then."""
        for each in signals:
            self.popen.send_signal(each)
        status = self.popen.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        return status

    def close(self) -> None:
        """Leave nothing running."""
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.communicate()


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    return write_artifact(tmp_path / "small.hfq", metadata())


@pytest.fixture
def start(artifact: Path) -> Iterator[Any]:
    """Starts a server whose model is loaded as ``mode`` says."""
    started: list[Process] = []

    def begin(mode: str, *options: str, **environment: str) -> Process:
        code = [sys.executable, "-c", SCRIPTED, mode, "serve", str(artifact), "--port", "0"]
        started.append(Process([*code, *options], **environment))
        return started[-1]

    yield begin
    for each in started:
        each.close()


@pytest.fixture(scope="module")
def tiny(tiny_artifact: Path) -> Iterator[Process]:
    """ds4-tiny, served as a user would."""
    command = [sys.executable, "-m", "ds4q", "serve", str(tiny_artifact), "--port", "0"]
    process = Process([*command, "--threads", "1"])
    try:
        process.await_line("ready after")
        yield process
    finally:
        assert process.end(signal.SIGTERM) == 143
        process.close()
        assert not any("Traceback" in line for line in process.said), process.said
        assert process.said[-2:] == ["ds4q: terminated", ""]


def ask(process: Process, **fields: Any) -> httpx.Response:
    """A greedy chat without reasoning."""
    body = {
        "messages": [{"role": "user", "content": "Repeat exactly: kv_cache_block_17"}],
        "thinking": {"type": "disabled"},
        "temperature": 0,
        **fields,
    }
    return httpx.post(f"{process.url}/v1/chat/completions", json=body, timeout=PATIENCE_S)


# --- a real model --------------------------------------------------------------------------------


def test_a_model_is_served_with_the_answers_of_run(tiny: Process) -> None:
    assert httpx.get(f"{tiny.url}/health", timeout=PATIENCE_S).json()["status"] == "ready"
    answer = ask(tiny).json()
    assert answer["model"] == "ds4-tiny"
    assert answer["choices"][0]["message"]["content"] == "kv_cache_block_17"
    live = httpx.get(f"{tiny.url}/live", timeout=PATIENCE_S).json()
    assert (live["device"], live["kv_type"]) == ("cpu", "f32")
    done, total = live["progress"]
    assert done == total > 0


def examples() -> list[tuple[str, str]]:
    """Commands of the pages that ask a server with curl, each with what it says they print."""
    blocks = re.compile(r"```sh\n(curl .*?)```(?:\n+```(?:json|text)\n(.*?)```)?", re.DOTALL)
    found = [each for page in PAGES for each in blocks.findall(page.read_text("utf-8"))]
    assert len(found) >= 6, "the pages' examples are not where they are looked for"
    return [(command.strip(), shown.strip()) for command, shown in found]


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl to try them with")
@pytest.mark.parametrize(("command", "shown"), examples(), ids=lambda each: each[:60])
def test_the_pages_examples_do_what_they_say(tiny: Process, command: str, shown: str) -> None:
    here = command.replace("http://127.0.0.1:8000", tiny.url)
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", here], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip(), result.stderr
    if shown:
        assert steady(result.stdout) == steady(shown)


def listed(head: str) -> list[tuple[list[str], str, str]]:
    """Rows (fields, endpoint, notes) of the table with this head on the page of serving."""
    table = PAGES[0].read_text("utf-8").partition(f"| field | of | {head} |\n|---|---|---|\n")[2]
    rows = [line.strip("|").split("|", 2) for line in table.partition("\n\n")[0].splitlines()]
    return [
        ([name.partition(".")[0] for name in re.findall(r"`([\w.]+)`", names)], of.strip(), notes)
        for names, of, notes in rows
    ]


@pytest.mark.parametrize(
    ("endpoint", "request_of"), [("chat", ChatRequest), ("completions", CompletionRequest)]
)
def test_the_page_lists_the_fields_of_each_endpoint(
    endpoint: str, request_of: type[BaseModel]
) -> None:
    rows = listed("notes") + listed("value")
    told = [name for names, of, _ in rows if of in (endpoint, "both") for name in names]
    assert len(told) == len(set(told))
    assert set(told) | {"model"} == set(request_of.model_fields)


def test_the_page_lists_the_fields_with_one_value() -> None:
    told = {name: value.strip(" `") for names, _, value in listed("value") for name in names}
    assert told.pop("service_tier") == "auto` or `default"
    assert told == ONLY


def steady(output: str) -> str:
    """Output without what differs each time, tokens that came in one chunk of a stream included."""
    head, tail = r'"delta":{"content":"', r'"},"logprobs":null,"finish_reason":null'
    output = output.replace(f"{tail}\n{head}", "")
    output = re.sub(r"(chatcmpl|cmpl|call)[-_][0-9a-f]+", r"\1-ID", output)
    output = re.sub(r'"(created|cached_tokens)": ?\d+', r'"\1":0', output)
    return re.sub(r"\s+", "", output)


def test_a_stream_is_the_same_in_fewer_chunks() -> None:
    def chunk(content: str) -> str:
        return f'"delta":{{"content":"{content}"}},"logprobs":null,"finish_reason":null\n'

    assert steady(chunk("a") + chunk("b")) == steady(chunk("ab"))
    assert steady(chunk("a") + chunk("b")) != steady(chunk("a") + chunk("c"))
    assert steady(chunk("a")) != steady(chunk("ab"))


# --- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        ["--port", "-1"],
        ["--port", "65536"],
        ["--port", "http"],
        ["--queue", "0"],
        ["--queue", "-1"],
        ["--concurrent", "0"],
        ["--concurrent", "257"],
        ["--concurrent", "999999999"],
        ["--max-context", "0"],
        ["--max-tokens", "0"],
        ["--prefix-cache", "-1"],
        ["--prefix-cache", "much"],
        ["--timeout", "0"],
        ["--timeout", "-3"],
        ["--timeout", "nan"],
        ["--timeout", "inf"],
        ["--threads", "0"],
        ["--api-key", ""],
        ["--api-key", "two words"],
        ["--api-key", "schlüssel"],
        ["--host", "0.0.0.0"],
        ["--host", "::"],
        ["--host", ""],
        ["--host", " "],
    ],
)
def test_options_that_cannot_be_are_wrong_usage(artifact: Path, options: list[str]) -> None:
    result = CliRunner().invoke(main, ["serve", str(artifact), *options])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert options[0] in result.stderr


def test_a_wide_host_without_a_key_is_told_what_to_do(artifact: Path) -> None:
    result = CliRunner().invoke(main, ["serve", str(artifact), "--host", "0.0.0.0"])
    assert result.exit_code == 2
    for words in ("--api-key", "DS4Q_API_KEY", "--allow-no-key"):
        assert words in result.stderr


def test_an_automatic_expert_cache_leaves_room_for_all_that_is_served(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def load(self: Any, tokens: int | None, report: Any, **room: int) -> Any:
        asked.append((tokens, room))
        raise RunError("seen enough")

    monkeypatch.setattr("ds4q.cli.loading.Loading.load", load)
    options = ["--port", "0", "--concurrent", "3", "--prefix-cache", "2MB", "--max-context", "99"]
    result = CliRunner().invoke(main, ["serve", str(artifact), *options])
    assert asked == [(99, {"sequences": 3, "beside_bytes": 2_000_000, "warm": True})]
    assert result.exit_code == 1
    assert "seen enough" in result.stderr


def test_kernels_that_are_compiled_are_told_of(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(self: Any, *given: Any, **room: Any) -> Any:
        numba.njit(lambda x: x + 1)(1)
        raise RunError("seen enough")

    monkeypatch.setattr("ds4q.cli.loading.Loading.load", load)
    for options, count in (([], 1), (["-q"], 0)):
        result = CliRunner().invoke(main, ["serve", str(artifact), "--port", "0", *options])
        assert "seen enough" in result.stderr
        assert result.stderr.count("compiling kernels: the first start on a machine") == count


def test_without_the_extra_it_says_what_to_install(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ds4q.cli.serve.NEEDED", ("json", "no_such_package"))
    result = CliRunner().invoke(main, ["serve", str(artifact)])
    assert result.exit_code == 2
    assert "no_such_package: pip install 'ds4q[serve]'" in result.stderr


def failing(*arguments: str) -> str:
    """The one line of a server that cannot begin."""
    command = [sys.executable, "-m", "ds4q", "serve", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (result.returncode, result.stdout) == (1, ""), result.stderr
    lines = [line for line in result.stderr.splitlines() if "error:" in line]
    assert len(lines) == 1, result.stderr
    assert "Traceback" not in result.stderr
    return lines[0]


def test_a_port_in_use_is_told(artifact: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = failing(str(artifact), "--port", str(port))
    assert f"cannot listen on 127.0.0.1 port {port}" in line
    assert "Address already in use" in line
    assert "--port" in line


def test_files_that_cannot_be_served_are_told(tmp_path: Path, artifact: Path) -> None:
    assert "No such file" in failing(str(tmp_path / "none.hfq"), "--port", "0")
    bare = write_artifact(tmp_path / "bare.hfq", metadata() | {"tokenizer": "{}"})
    assert "no tokenizer" in failing(str(bare), "--port", "0")
    for key, value in (("temperature", "x"), ("top_p", 10**400), ("eos_token_id", -1)):
        odd = write_artifact(bare, metadata() | {"generation_config": {key: value}})
        assert f"ds4q: error: {odd}: generation_config" in failing(str(odd), "--port", "0")
    assert str(artifact) in failing(str(artifact), "--port", "0")  # it has no tensors


@pytest.mark.parametrize("host", ["a..b", "x" * 64, ".a"])
def test_a_host_that_can_be_no_name_is_told(artifact: Path, host: str) -> None:
    said = f"cannot listen on {host}: the name cannot be resolved: found what is no host's name; "
    for key in (["--api-key", "k"], []):
        result = CliRunner().invoke(
            main, ["serve", str(artifact), "--host", host, "--port", "0", *key]
        )
        assert result.exit_code == 1
        assert result.stderr == f"ds4q: error: {said}choose another --host\n"


def test_no_host_at_all_is_told_with_what_to_write(artifact: Path) -> None:
    options = ["--host", "", "--api-key", "k"]
    result = CliRunner().invoke(main, ["serve", str(artifact), *options])
    assert result.exit_code == 2
    assert "'--host': it is empty; 0.0.0.0 or :: listens on every address" in result.stderr


def test_a_host_that_is_none_is_told(artifact: Path) -> None:
    for key in (["--api-key", "k"], []):
        line = failing(str(artifact), "--host", "no.such.host.invalid", *key)
        assert "cannot listen on no.such.host.invalid: the name cannot be resolved" in line
        assert "other machines" not in line


def test_what_comes_up_while_it_serves_is_a_warning_once(
    tiny_artifact: Path, tmp_path: Path
) -> None:
    file = Path(shutil.copy(tiny_artifact, tmp_path / "m.hfq"))
    words = ["serve", str(file), "--port", "0", "--threads", "1", "--expert-cache", "2MB"]
    process = Process([sys.executable, "-m", "ds4q", *words])
    try:
        process.await_line("ready after")
        (tmp_path / "new").write_bytes(b"another model")
        (tmp_path / "new").replace(file)
        assert ask(process).json()["choices"][0]["message"]["content"] == "kv_cache_block_17"
        process.await_line("the path now leads to another file")
        assert ask(process, max_tokens=2).status_code == 200
        assert httpx.get(f"{process.url}/health", timeout=PATIENCE_S).status_code == 200
        assert process.end(signal.SIGTERM) == 143
    finally:
        process.close()
    warned = [line for line in process.said if line.startswith("ds4q: warning: ")]
    assert len([line for line in warned if "the path now leads to another file" in line]) == 1
    assert len([line for line in warned if "no receipt" in line]) == 1


# --- the life of a process -----------------------------------------------------------------------


def test_a_key_of_the_environment_is_asked_for_also_from_far(start: Any) -> None:
    process = start("ready", "--host", "0.0.0.0", DS4Q_API_KEY="sk-1")
    url = process.url.replace("0.0.0.0", "127.0.0.1")
    process.await_line("ready after")
    assert httpx.get(f"{url}/v1/models", timeout=PATIENCE_S).status_code == 401
    headers = {"Authorization": "Bearer sk-1"}
    assert (
        httpx.get(f"{url}/v1/models", timeout=PATIENCE_S, headers=headers).json()["data"][0]["id"]
        == "small"
    )
    assert not any("sk-1" in line for line in process.said)


def test_everybody_may_come_where_that_is_said(start: Any) -> None:
    process = start("ready", "--host", "0.0.0.0", "--allow-no-key", "--model-name", "mine", "-v")
    url = process.url.replace("0.0.0.0", "127.0.0.1")
    answer = httpx.get(f"{url}/v1/models", timeout=PATIENCE_S, headers={"Host": "models.example"})
    assert answer.json()["data"][0]["id"] == "mine"
    assert "GET /v1/models 200" in process.await_line("/v1/models")


def test_while_it_loads_it_is_asked_and_ended(start: Any) -> None:
    process = start("blocked")
    health = httpx.get(f"{process.url}/health", timeout=PATIENCE_S)
    assert health.status_code == 503
    assert health.json()["status"] == "loading"
    assert process.end(signal.SIGTERM) == 143
    assert process.said[-2:] == ["ds4q: terminated", ""]


def test_a_model_that_cannot_be_loaded_ends_it(start: Any) -> None:
    process = start("broken")
    assert process.end() == 1
    assert "ZeroDivisionError: a bug in loading" in process.await_line("ds4q: error:")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_one_signal_lets_requests_end(start: Any, number: int, status: int) -> None:
    process = start("hasty")
    process.await_line("ready after")
    answers: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: answers.append(ask(process, max_tokens=1000)))
    asking.start()
    await_running(process)
    assert process.end(number) == status
    asking.join(PATIENCE_S)
    assert answers[0].json()["usage"]["completion_tokens"] == 1000
    process.await_line("1 requests may end")


def test_a_second_signal_ends_it_at_once(start: Any) -> None:
    process = start("slow")  # so slow that the request cannot end by itself before
    process.await_line("ready after")
    answers: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: answers.append(ask(process)))
    asking.start()
    await_running(process)
    process.popen.send_signal(signal.SIGTERM)
    process.await_line("1 requests may end")
    assert process.end(signal.SIGTERM) == 143
    asking.join(PATIENCE_S)
    assert answers[0].status_code == 503
    assert json.loads(answers[0].text)["error"]["code"] == "draining"


def await_running(process: Process) -> None:
    """Return once the model works on a request."""
    for _ in range(int(PATIENCE_S / 0.02)):
        if httpx.get(f"{process.url}/live", timeout=PATIENCE_S).json()["completion_tokens"] > 0:
            return
        threading.Event().wait(0.02)
    raise AssertionError("the request was not begun")
