"""Owns what benchmarks.serve asks with: a server process, requests that differ, and their answers.

It measures and judges nothing. Requests go out from plain threads, one connection each, since a
client that many people use would take more of the machine than the server.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LINE = re.compile(r"listening on http://127\.0\.0\.1:(\d+)")
LONGEST_TOKENS = 128
PATIENCE_S = 600.0
TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Request:
    """A path and the fields of a body; greedy and drawn, chat and completion."""

    path: str
    fields: dict[str, Any]

    @property
    def body(self) -> bytes:
        return json.dumps(
            {
                **self.fields,
                "stream": True,
                "stream_options": {"include_usage": True},
                "return_token_ids": True,
            }
        ).encode()


@dataclass(frozen=True)
class Answer:
    """What came back.

    ``ids`` are None where no whole answer came, and then ``problem`` says what did; ``first_s`` and
    ``total_s`` count from the connection.
    """

    ids: tuple[int, ...] | None
    first_s: float = 0.0
    total_s: float = 0.0
    prompt_tokens: int = 0
    problem: str = ""
    left: bool = False


def requests(count: int, seed: int) -> list[Request]:
    """So many requests, no two the same: names and facts to repeat, code to go on with."""
    draw = random.Random(seed)
    made = []
    for number in range(count):
        words = [f"{draw.choice(NAMES)}_{draw.randrange(100)}" for _ in range(draw.randint(1, 3))]
        fields: dict[str, Any] = {"max_tokens": draw.randint(LONGEST_TOKENS // 2, LONGEST_TOKENS)}
        fields |= {"temperature": 0.0} if number % 2 else {"temperature": 0.9, "seed": number}
        if number % 4:
            text = f"def {words[0]}_{number}({', '.join(words[1:])}):\n    "
            made.append(Request("/v1/completions", {"prompt": text, **fields}))
            continue
        messages = [{"role": "user", "content": f"{'; '.join(words)} {number}?"}]
        thinking = {"type": "enabled" if number % 8 else "disabled"}
        made.append(
            Request("/v1/chat/completions", {"messages": messages, "thinking": thinking, **fields})
        )
    return made


NAMES = ("count", "shard", "proj", "index", "value", "total", "cache", "route", "scale", "width")


def ask(port: int, request: Request, leave_after: int | None = None) -> Answer:
    """Ask, and read the answer; or go away once ``leave_after`` tokens have come."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    began = time.perf_counter()
    first_s = 0.0
    raw = b""
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", request.path, request.body, headers)
        if leave_after == 0:
            return Answer(None, left=True)
        response = connection.getresponse()
        if response.status != 200:
            return Answer(None, problem=f"{response.status}: {response.read().decode()[:200]}")
        while piece := response.read1(1 << 16):
            raw += piece
            if not first_s and b'"token_ids"' in raw:
                first_s = time.perf_counter() - began
            if leave_after is not None and raw.count(b'"token_ids"') >= leave_after:
                return Answer(None, left=True)
    except (OSError, http.client.HTTPException) as error:
        return Answer(None, problem=f"{type(error).__name__}: {error}")
    finally:
        connection.close()
    return _parsed(raw, first_s, time.perf_counter() - began)


def _parsed(raw: bytes, first_s: float, total_s: float) -> Answer:
    lines = [line[6:] for line in raw.decode("utf-8").split("\n\n") if line.startswith("data: ")]
    if not lines or lines[-1] != "[DONE]":
        return Answer(None, problem=f"no end: ...{raw[-200:].decode('utf-8', 'replace')}")
    ids: list[int] = []
    usage = None
    for line in lines[:-1]:
        chunk = json.loads(line)
        usage = chunk.get("usage") or usage
        for choice in chunk.get("choices", ()):
            ids += choice.get("token_ids") or ()
    if usage is None or usage["completion_tokens"] != len(ids):
        return Answer(None, problem=f"{len(ids)} ids, but usage {usage}")
    return Answer(tuple(ids), first_s, total_s, usage["prompt_tokens"])


def ask_all(
    port: int,
    wanted: Sequence[Request],
    at_once: int,
    leaving: Sequence[int | None] | None = None,
) -> list[Answer]:
    """All of them, so many at once, in order; ``leaving`` says after how many tokens each goes."""
    answers: list[Answer | None] = [None] * len(wanted)
    places = iter(range(len(wanted)))
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                place = next(places, None)
            if place is None:
                return
            after = None if leaving is None else leaving[place]
            answers[place] = ask(port, wanted[place], after)

    threads = [threading.Thread(target=work) for _ in range(at_once)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [Answer(None, problem="never asked") if each is None else each for each in answers]


class Process:
    """A running ``ds4q serve``."""

    def __init__(self, process: subprocess.Popen[str], port: int, ready_s: float) -> None:
        self.port = port
        self.ready_s = ready_s
        self._stat = Path(f"/proc/{process.pid}/stat")
        self._status = Path(f"/proc/{process.pid}/status")

    @property
    def cpu_s(self) -> float:
        """Processor seconds so far, of all its threads."""
        fields = self._stat.read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICK

    @property
    def resident_bytes(self) -> int:
        """Memory that it holds."""
        found = re.search(r"VmRSS:\s*(\d+) kB", self._status.read_text())
        if found is None:
            raise OSError(f"{self._status}: no VmRSS")
        return int(found[1]) * 1024

    def get(self, path: str) -> Any:
        """The JSON at ``path``."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            connection.request("GET", path)
            return json.loads(connection.getresponse().read())
        finally:
            connection.close()


@contextmanager
def serving(artifact: Path, *options: str) -> Iterator[Process]:
    """``ds4q serve`` on a free port, ready; ended with SIGTERM, which it must obey."""
    command = [sys.executable, "-m", "ds4q", "serve", str(artifact), "--port", "0", *options]
    began = time.perf_counter()
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    said: list[str] = []
    assert process.stderr is not None
    stderr = process.stderr
    try:
        for line in stderr:
            said.append(line)
            if found := LINE.search(line):
                port = int(found[1])
                break
        else:
            raise OSError("the server does not listen: " + "".join(said))
        rest = threading.Thread(target=lambda: said.extend(stderr), daemon=True)
        rest.start()
        while _health(port) != 200:
            if process.poll() is not None:
                raise OSError("the server has ended: " + "".join(said))
            time.sleep(0.01)
        yield Process(process, port, time.perf_counter() - began)
        process.terminate()
        if process.wait(PATIENCE_S) not in (0, 143):
            raise OSError(f"the server ended with {process.returncode}: " + "".join(said))
    finally:
        process.kill()
        process.wait()
        stderr.close()


def _health(port: int) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()
