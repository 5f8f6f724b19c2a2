"""Short questions to a model at temperature 0, here or in a fresh process. Judges no answer.

Run as a module it is the fresh process: what to load and the questions as JSON on stdin, answers as
JSON on stdout.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ds4q.artifact.errors import Ds4qError
from ds4q.runtime.engine import Engine
from ds4q.runtime.errors import GateError
from ds4q.runtime.gates.pair import Model, Surroundings
from ds4q.runtime.generate import generate, stop_ids
from ds4q.runtime.sampling import Sampler, check_finite
from ds4q.runtime.text.chat import encode_chat
from ds4q.runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ds4q.runtime.device.engine import HipEngine

ANSWER_TOKENS = 64
MODULE = "ds4q.runtime.gates.asking"


def require_tokenizer(tokenizer: Tokenizer | None, path: object) -> Tokenizer:
    """``tokenizer``, of the artifact ``path``; ``GateError`` where it has none."""
    if tokenizer is None:
        raise GateError(
            "the artifact has no tokenizer to ask questions with",
            path=path,
            remedy="quantize again from a folder with tokenizer.json",
        )
    return tokenizer


class Margin:
    """A greedy sampler that keeps how sure the model was.

    ``least`` is the smallest difference, in nats, between the two largest logits of a step: the
    logarithm of the ratio of their probabilities.
    """

    def __init__(self) -> None:
        self.least = math.inf

    def __call__(self, logits: npt.NDArray[np.float32]) -> int:
        """The most likely token of ``logits`` [vocab], the lower id on ties."""
        check_finite(logits)
        second, first = np.partition(logits, -2)[-2:]
        self.least = min(self.least, float(first) - float(second))
        return int(np.argmax(logits))


class Asker:
    """A loaded model with its chat format; every question is a conversation of its own."""

    def __init__(self, engine: Engine | HipEngine, *, path: object = None) -> None:
        tokenizer = require_tokenizer(Tokenizer.from_metadata(engine.metadata, path=path), path)
        self._engine = engine
        self._tokenizer = tokenizer
        self._stops = stop_ids(engine.metadata, tokenizer)
        self._path = path

    def ask(self, question: str, sampler: Callable[..., int] | None = None) -> str:
        """The most likely answer, without reasoning; one that does not end is cut, with ``...``.

        ``sampler`` takes the place of the plain greedy one; it must choose as that does.
        """
        messages = [{"role": "user", "content": question}]
        config = self._engine.metadata["config"]
        generation = generate(
            self._engine,
            encode_chat(config, self._tokenizer, messages, path=self._path).ids,
            max_tokens=ANSWER_TOKENS,
            context_tokens=self._engine.max_context,
            sampler=sampler or Sampler(temperature=0, top_p=1, seed=0),
            stop_ids=self._stops,
            tokenizer=self._tokenizer,
        )
        for _ in generation:
            pass
        return generation.text if generation.finish_reason == "stop" else generation.text + "..."


def ask_fresh_process(
    path: str | os.PathLike[str], questions: Sequence[str], where: Surroundings
) -> list[str]:
    """Answers of a new Python process, which loads the artifact anew and ends with the last one.

    Raises
    ------
    GateError : the process failed; with its last words
    """
    # -P: the folder that the user happens to stand in is not searched for modules.
    command = [sys.executable, "-P", "-m", MODULE]
    asked = {
        "path": os.fspath(path),
        "questions": list(questions),
        "threads": where.threads,
        "device": where.device,
        "budget": None if where.cache is None else where.cache.budget,
    }
    search = os.pathsep.join(os.path.abspath(place) for place in sys.path)
    done = subprocess.run(
        command,
        input=json.dumps(asked),
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        env=os.environ | {"PYTHONPATH": search},
        check=False,
    )
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        raise GateError(
            "the fresh process failed",
            path=path,
            expected="exit status 0",
            found=f"{done.returncode}: {said[-1] if said else 'no word on stderr'}",
            remedy="run the artifact by hand: ds4q run FILE.hfq -p TEXT --temp 0",
        )
    answers: list[str] = json.loads(done.stdout)
    return answers


def main() -> None:
    """Answer what stdin asks."""
    asked = json.load(sys.stdin)
    where = Surroundings(asked["threads"], device=asked["device"]).paged(asked["budget"])
    try:
        model = Model.read(asked["path"])
        with model.load(where) as engine:
            asker = Asker(engine, path=model.path)
            answers = [asker.ask(question) for question in asked["questions"]]
    except (Ds4qError, OSError, MemoryError) as error:
        sys.exit(str(error))
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
