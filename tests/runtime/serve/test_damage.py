"""A served paged model meets damage: a named error, never a wrong word; the others go on."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from ds4q.artifact.hfq import Reader
from ds4q.artifact.receipt import receipt_path
from ds4q.runtime.engine import Engine
from ds4q.runtime.experts.options import CacheOptions
from ds4q.runtime.serve.documents import Health
from tests.quantize.damage import flip
from tests.runtime.serve.scripted import ScriptedEngine
from tests.runtime.serve.served import Served, serving

LONG_AGO_NS = 10**18
HURT, SOUND = [5, 6], [70]  # prompts that choose different experts
TOKENS = 3


def paged(path: Path, **options: Any) -> Engine:
    """With room for the experts of one token alone: what is asked for is read."""
    return Engine.load(path, threads=1, cache=CacheOptions(slots=4, **options))


@pytest.fixture
def artifact(tmp_path: Path, tiny_artifact: Path) -> Path:
    path = Path(shutil.copy(tiny_artifact, tmp_path / "m.hfq"))
    shutil.copy(receipt_path(tiny_artifact), receipt_path(path))
    os.utime(path, ns=(LONG_AGO_NS, LONG_AGO_NS))
    return path


def alone(path: Path, prompt: Sequence[int]) -> tuple[list[int], set[tuple[int, int]]]:
    """The ids that answer a prompt, and the experts (layer, number) that were asked for."""
    with paged(path) as engine:
        state = engine.new_state()
        found: list[int] = []
        ids = list(prompt)
        for _ in range(TOKENS):
            found.append(int(np.argmax(engine.forward(state, ids))))
            ids = found[-1:]
        return found, {(int(n), int(e)) for n, e in np.argwhere(engine.experts_view().routed)}


def ask(served: Served, prompt: Sequence[int], **fields: Any) -> httpx.Response:
    body = {"prompt": list(prompt), "max_tokens": TOKENS, "temperature": 0}
    return served.http.post("/v1/completions", json=body | {"return_token_ids": True} | fields)


def ids_of(response: httpx.Response) -> list[int]:
    assert response.status_code == 200, response.text
    return list(response.json()["choices"][0]["token_ids"])


def refused(served: Served, response: httpx.Response, code: str) -> str:
    """The message of a failure, which begins with no path; a stream ends with the same one."""
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (500, code), response.text
    assert "/" not in error["message"].split(": ")[0]
    last = ask(served, HURT, stream=True).text.strip().split("\n\n")[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == code
    return str(error["message"])


@pytest.fixture
def served_paged(artifact: Path) -> Iterator[Served]:
    with Reader(artifact) as reader:
        described = reader.metadata
    with serving(load=lambda report: paged(artifact), described=described) as served:
        yield served


def test_a_flipped_byte_of_an_expert_is_an_error_of_the_requests_that_need_it(
    artifact: Path,
) -> None:
    _, needed = alone(artifact, HURT)
    expected, others = alone(artifact, SOUND)
    layer, expert = min(needed - others)
    name = f"layers.{layer}.ffn.experts.{expert}.w2.weight"
    with Reader(artifact) as reader:
        described = reader.metadata
        entry = reader.entry(name)
    flip(artifact, entry.offset + entry.nbytes - 1)
    with (
        serving(load=lambda report: paged(artifact), described=described) as served,
        ThreadPoolExecutor(4) as pool,
    ):
        for _ in range(3):
            asked = [pool.submit(ask, served, prompt) for prompt in (HURT, SOUND, HURT, SOUND)]
            hurt, sound, *more = (each.result() for each in asked)
            assert name in refused(served, hurt, "DigestError")
            assert more[0].json() == hurt.json()
            assert ids_of(sound) == ids_of(more[1]) == expected
        assert served.http.get("/health").status_code == 200  # for other requests it is


@pytest.mark.parametrize("write", ["flipped", "grown"])
def test_a_file_that_is_written_to_is_an_error_and_health_says_so(
    artifact: Path, served_paged: Served, write: str
) -> None:
    expected = {tuple(prompt): alone(artifact, prompt)[0] for prompt in (HURT, SOUND)}
    assert ids_of(ask(served_paged, SOUND)) == expected[tuple(SOUND)]
    assert served_paged.http.get("/health").json()["status"] == "ready"
    if write == "flipped":
        flip(artifact, 5000)  # no expert's byte: what was read belongs to no file any more
    else:
        with artifact.open("ab") as file:
            file.write(b"more")

    health = served_paged.http.get("/health")  # before any request has met it
    assert health.status_code == 503
    Health.model_validate(health.json())
    assert health.json()["status"] == "failed"
    assert "the file was written to while it was in use" in health.json()["error"]
    assert str(artifact) not in health.text
    live = served_paged.http.get("/live").json()
    assert (live["state"], live["error"]) == ("failed", health.json()["error"])
    assert 'ds4q_state{state="failed"} 1.0' in served_paged.http.get("/metrics").text

    assert "written to" in refused(served_paged, ask(served_paged, HURT), "ChangedError")
    for prompt in (HURT, SOUND) * 2:  # experts that are in memory may answer
        response = ask(served_paged, prompt)
        if response.status_code == 200:
            assert ids_of(response) == expected[tuple(prompt)]
        else:
            assert response.json()["error"]["code"] == "ChangedError"
    assert served_paged.thread.is_alive()


def test_another_file_at_the_path_changes_no_answer(artifact: Path, served_paged: Served) -> None:
    expected = alone(artifact, HURT)[0]
    other = artifact.with_name("other")
    other.write_bytes(b"another model")
    other.replace(artifact)
    assert served_paged.http.get("/health").status_code == 200
    assert ids_of(ask(served_paged, HURT)) == expected
    engine = served_paged.service.engine
    assert isinstance(engine, Engine)
    assert len([note for note in engine.notes if "another file" in note]) == 1


def test_a_file_that_cannot_be_looked_at_is_a_failure_too() -> None:
    engine = ScriptedEngine()
    with serving(engine) as served:
        engine.damage = OSError(5, "Input/output error")
        health = served.http.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "failed")
        assert "Input/output error" in health.json()["error"]
        engine.damage = None
        assert served.http.get("/health").status_code == 200


def test_a_closed_model_is_not_looked_at(artifact: Path) -> None:
    engine = paged(artifact)
    engine.check_file()
    flip(artifact, 5000)
    engine.close()
    engine.check_file()
