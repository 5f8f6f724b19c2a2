"""Owns a server's model from the first byte of loading to its end. Knows no HTTP and no options.

Loading runs in a thread of its own, so that whoever asks hears how far it is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Literal, Protocol

from ds4q.artifact.errors import Ds4qError
from ds4q.runtime.errors import EngineError
from ds4q.runtime.serve.job import BatchEngine
from ds4q.runtime.serve.mailbox import Mailbox
from ds4q.runtime.serve.scheduler import Scheduler
from ds4q.runtime.source import Progress

ServiceState = Literal["loading", "ready", "failed", "draining"]


class ServedEngine(BatchEngine, Protocol):
    """A loaded model that tells how its experts are kept, and that can be given up."""

    def cache_counters(self) -> dict[str, Any] | None:
        """What the pager of routed experts counted; None where nothing is paged."""

    def experts_view(self) -> Any:
        """Which experts were chosen and are resident (``ExpertsView``); None where unknown."""

    def check_file(self) -> None:
        """Raise ``ChangedError`` if what is still to be read can not be; from any thread."""

    def close(self) -> None:
        """Free what it holds."""


def warm_up(engine: BatchEngine) -> None:
    """Compute tokens in each way that a server does, and forget them.

    Kernels are compiled when they are first called, once on a machine; that takes long, and can
    neither be cancelled nor told from an answer that takes long.
    """
    state = engine.new_state()
    try:
        for ids in ([0, 0], [0]):
            engine.forward_many([(state, ids)])
    finally:
        state.close()


class _GivenUpError(Exception):
    """Raised in the loading thread: nobody waits for the model any more."""


class Service:
    """A model that is loaded, then served, then given up.

    Parameters
    ----------
    load : opens the model, telling its progress as (bytes read, bytes in all)
    make : the scheduler of a loaded model; what it is to call after it told something comes along

    Attributes
    ----------
    state : "failed" where loading ended with ``error``
    progress : (bytes read, bytes in all); (0, 0) before the first is told
    error : why loading failed
    engine, scheduler : None until it is ready
    mailbox : brings what the scheduler tells into the event loop
    """

    def __init__(
        self,
        load: Callable[[Progress], ServedEngine],
        make: Callable[[ServedEngine, Callable[[], None]], Scheduler],
    ) -> None:
        self.state: ServiceState = "loading"
        self.progress = (0, 0)
        self.error: Ds4qError | None = None
        self.engine: ServedEngine | None = None
        self.scheduler: Scheduler | None = None
        self.mailbox = Mailbox()
        self._load = load
        self._make = make
        self._lock = threading.Lock()  # of what follows from being given up while loading
        self._loaded = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ds4q-load", daemon=True)

    def condition(self) -> tuple[ServiceState, Ds4qError | None]:
        """Whether requests are answered, and what ails it; may wait for the file system.

        It is ``state`` and ``error``, but "failed" also while it serves a paged model whose file
        was written to. The server goes on: experts that are in memory still answer.
        """
        engine = self.engine
        if self.state == "ready" and engine is not None:
            try:
                engine.check_file()
            except (Ds4qError, OSError) as error:
                return "failed", EngineError.of(error, "the model's file cannot be looked at")
        return self.state, self.error

    def start(self) -> None:
        """Begin to load; returns at once."""
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until loading has ended one way or another; whether it has."""
        return self._loaded.wait(timeout_s)

    def drain(self, timeout_s: float) -> bool:
        """Take no new request, let those that there are end; cancel what is left after the time.

        Returns whether all ended by themselves. A model that is still loading is given up.
        """
        with self._lock:
            self.state = "draining"
        return self.scheduler is None or self.scheduler.drain(timeout_s)

    def close(self) -> None:
        """End requests and loading, and free the model; a second call does nothing."""
        with self._lock:
            self.state = "draining"
        if self._thread.is_alive():
            self._thread.join()
        if self.scheduler is not None:
            self.scheduler.close()
        engine, self.engine = self.engine, None
        if engine is not None:
            engine.close()

    def _run(self) -> None:
        engine = None
        try:
            engine = self._load(self._told)
            scheduler = self._make(engine, self.mailbox.deliver)
            with self._lock:
                self.engine, self.scheduler = engine, scheduler
                if self.state == "loading":
                    self.state = "ready"
        except _GivenUpError:
            pass
        except Exception as error:
            if engine is not None:
                engine.close()
            self._fail(error)
        finally:
            self._loaded.set()

    def _told(self, done: int, total: int) -> None:
        self.progress = (done, total)
        if self.state == "draining":
            raise _GivenUpError

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self.error = EngineError.of(error, "the model cannot be loaded")
            if self.state == "loading":
                self.state = "failed"
