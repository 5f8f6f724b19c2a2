"""Owns what gates share: an artifact, the one that it is held against, and how they are loaded."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ds4q.artifact.check import own_metadata
from ds4q.artifact.hfq import Reader
from ds4q.artifact.report import Check
from ds4q.runtime.config import ModelConfig, checked_config
from ds4q.runtime.engine import (
    BATCH_TOKENS,
    Engine,
    expected_state_bytes,
)
from ds4q.runtime.errors import CacheError, GateError
from ds4q.runtime.experts.budget import available_bytes
from ds4q.runtime.experts.cache import check_cache
from ds4q.runtime.experts.options import Budget, CacheOptions
from ds4q.runtime.source import Progress
from ds4q.runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ds4q.runtime.device.engine import HipEngine

Advance = Callable[[int], None]


@contextmanager
def _silent(label: str, total: int, *, unit: str = "bytes") -> Iterator[Advance]:
    yield lambda amount: None


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Where a gate runs.

    Attributes
    ----------
    threads : most threads that a model uses
    progress : called with a label, a total and ``unit=``; yields a function that hears of progress
    tell : called with lines for people, such as how much disk the gate is about to take
    device : where models run
    cache : how routed experts are kept where a gate does not say itself; None: all in memory
    """

    threads: int = 1
    progress: Callable[..., AbstractContextManager[Advance]] = _silent
    tell: Callable[[str], None] = lambda line: None
    device: Literal["cpu", "hip"] = "cpu"
    cache: CacheOptions | None = None

    def paged(self, budget: Budget | None) -> Surroundings:
        """The same with an expert cache of ``budget``; None: with all experts in memory."""
        return replace(self, cache=None if budget is None else CacheOptions(budget=budget))


Measurement = Callable[[Check], None]
"""Runs the model; figures and failures go to the check."""


class Gate(Protocol):
    """A measurement that an artifact has to pass."""

    @property
    def name(self) -> str:
        """As in ``--gate NAME`` and in the report."""

    def prepare(self, path: str | os.PathLike[str], where: Surroundings) -> Measurement:
        """What measures the artifact ``path``.

        ``RunError`` and ``OSError`` for what can be told without reading a large tensor.
        """


@dataclass(frozen=True, slots=True)
class Model:
    """What the front of a complete artifact tells; nothing is loaded."""

    path: Path
    config: ModelConfig
    metadata: Mapping[str, Any]
    tokenizer: Tokenizer | None
    recipe: str | None
    source: str | None

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Model:
        """Read header and index; ``RunError`` for a partial artifact, a draft or another model."""
        with Reader(path) as reader:
            config = checked_config(reader)
            ours = own_metadata(reader) or {}
            tokenizer = Tokenizer.from_metadata(reader.metadata, path=reader.path)
            return cls(
                Path(path),
                config,
                reader.metadata,
                tokenizer,
                ours.get("recipe"),
                ours.get("source_fingerprint"),
            )

    def load(
        self,
        where: Surroundings,
        *,
        threads: int = 0,
        batch_tokens: int = BATCH_TOKENS,
        cache: CacheOptions | None = None,
    ) -> Engine | HipEngine:
        """The model, on the device of ``where``, to be closed.

        Whatever model was loaded before is gone by then, if nothing holds it any more.

        Parameters
        ----------
        threads, cache : 0 and None take those of ``where``
        """
        engine: Engine | HipEngine
        with self._loading(where) as report:
            options: dict[str, Any] = {"batch_tokens": batch_tokens, "progress": report}
            options["cache"] = cache or where.cache
            if where.device == "hip":
                from ds4q.runtime.device.engine import HipEngine  # for this alone

                engine = HipEngine.load(self.path, **options)
            else:
                engine = Engine.load(self.path, threads=threads or where.threads, **options)
        return engine

    @contextmanager
    def running(
        self, where: Surroundings, cache: CacheOptions | None, layers: Sequence[int] | None
    ) -> Iterator[Engine | HipEngine]:
        """The model on the device of ``where``, closed afterwards; ``layers`` None runs all."""
        with ExitStack() as stack:
            with self._loading(where) as report:
                options: dict[str, Any] = {"cache": cache, "layers": layers, "progress": report}
                engine: Engine | HipEngine
                if where.device == "hip":
                    from ds4q.runtime.device.engine import HipEngine  # for this alone

                    engine = HipEngine.load(self.path, **options)
                else:
                    engine = Engine.load(self.path, threads=where.threads, **options)
                stack.enter_context(engine)
            yield engine

    def check_cache(
        self,
        cache: CacheOptions,
        where: Surroundings,
        *,
        layers: Sequence[int] | None = None,
        holds_all: bool = False,
    ) -> None:
        """Refuse a cache that the model could not run with, or that pages nothing.

        ``holds_all``: it is not to page, and its size is not ``--cache``. How much memory a device
        has is not asked here.
        """
        remedy = "give --cache a size that fits, or leave it out for the smallest"
        if holds_all:
            remedy = "free memory: this gate also loads with a cache that holds all experts"

        def unknown() -> int:
            raise CacheError("the device has not been asked")

        config = self.config.shortened(layers)
        try:
            with Reader(self.path) as reader:
                plan = check_cache(
                    reader,
                    config,
                    cache,
                    state_bytes=expected_state_bytes(config),
                    available=available_bytes if where.device == "cpu" else unknown,
                )
        except CacheError as error:
            raise GateError(
                error.what,
                path=error.path,
                expected=error.expected,
                found=error.found,
                remedy=remedy,
            ) from None
        if plan is not None and plan.resident and not holds_all:
            raise GateError(
                f"not exercised: the cache holds all {plan.slots} experts of every layer",
                path=self.path,
                remedy="give a smaller --cache, or leave it out for the smallest",
            )

    @contextmanager
    def _loading(self, where: Surroundings) -> Iterator[Progress]:
        """Shows the progress of a load."""
        gc.collect()
        with where.progress(f"loading {self.path.name}", self.path.stat().st_size) as advance:
            known = 0

            def report(done: int, total: int) -> None:
                nonlocal known
                advance(done - known)
                known = done

            yield report


def read_pair(path: str | os.PathLike[str], against: str | os.PathLike[str]) -> tuple[Model, Model]:
    """An artifact and its reference; ``GateError`` unless they read the same tokens."""
    model, reference = Model.read(path), Model.read(against)
    if model.config.vocab_size != reference.config.vocab_size:
        raise GateError(
            "the reference has another vocabulary",
            path=reference.path,
            expected=f"{model.config.vocab_size} token ids",
            found=reference.config.vocab_size,
            remedy="compare artifacts of one model",
        )
    if _tokenizer_json(model) != _tokenizer_json(reference):
        raise GateError(
            "the reference has another tokenizer",
            path=reference.path,
            remedy="compare artifacts of one model",
        )
    return model, reference


def _tokenizer_json(model: Model) -> Any:
    """What decides how text is cut; None without a tokenizer, however its absence is written."""
    return None if model.tokenizer is None else json.loads(model.metadata["tokenizer"])
