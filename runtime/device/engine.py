"""Owns a loaded model on a HIP device: opening an artifact, sequences, tokens to logits or ids.

It knows no text. A decode step is one replayed graph; prefill launches the same kernels directly.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from ds4q.artifact.hfq import Reader
from ds4q.hipkern.streams import Graph
from ds4q.runtime.backend.hip import HipBackend, Launch
from ds4q.runtime.config import ModelConfig
from ds4q.runtime.device.block import StepBlock
from ds4q.runtime.device.layout import Layout
from ds4q.runtime.device.model import plan_weights
from ds4q.runtime.device.program import Program
from ds4q.runtime.device.scratch import HEAD_TOKENS, Scratch
from ds4q.runtime.device.staging import Staging
from ds4q.runtime.device.state import Caches, DeviceState
from ds4q.runtime.device.weights import DeviceSource
from ds4q.runtime.engine import BATCH_TOKENS, checked_config, checked_context, checked_ids
from ds4q.runtime.model.parts import Trace
from ds4q.runtime.model.rope import layer_frequencies
from ds4q.runtime.sampling import check_finite
from ds4q.runtime.source import Progress

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]


class HipEngine:
    """A DeepSeek-V4 model in a device's memory, all experts resident; use it as a context.

    Parameters
    ----------
    backend : an open device; the engine closes it
    reader : an artifact; nothing of it is needed once this has returned
    max_context : most tokens of one sequence; None takes the model's own limit and lets caches
        grow, a number sizes them at once
    batch_tokens : most tokens that go through the layers together; bounds memory, changes nothing
    replay : run decode steps as a graph; else by the same launches, one by one
    progress : called with (bytes read, bytes in all)

    Raises
    ------
    ArtifactError : the file breaks a rule of the format
    RunError : it holds no complete model that this runtime can run
    HipError : the device lacks memory, told before the first large read, or fails
    """

    def __init__(
        self,
        backend: HipBackend,
        reader: Reader,
        *,
        max_context: int | None = None,
        batch_tokens: int = BATCH_TOKENS,
        replay: bool = True,
        progress: Progress | None = None,
    ) -> None:
        self.config = config = checked_config(reader)
        self.metadata: Mapping[str, Any] = reader.metadata
        self.max_context = checked_context(config, max_context, batch_tokens)
        self._backend = backend
        self._batch_tokens = batch_tokens
        self._replay = replay
        self._graph: Graph | None = None
        self._caches = Caches(config, batch_tokens, self.max_context, sized=max_context is not None)
        self._load(reader, progress)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        max_context: int | None = None,
        batch_tokens: int = BATCH_TOKENS,
        replay: bool | None = None,
        progress: Progress | None = None,
    ) -> Self:
        """Open the device that is found, and load an artifact onto it.

        ``replay`` None: yes, unless the environment says ``DS4Q_HIP_GRAPH=0``.
        """
        if replay is None:
            replay = os.environ.get("DS4Q_HIP_GRAPH") != "0"
        with Reader(path) as reader:
            backend = HipBackend.open()
            try:
                return cls(
                    backend,
                    reader,
                    max_context=max_context,
                    batch_tokens=batch_tokens,
                    replay=replay,
                    progress=progress,
                )
            except BaseException:
                backend.close()
                raise

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.config.vocab_size

    @property
    def backend(self) -> HipBackend:
        """The device that the model is on."""
        return self._backend

    def new_state(self) -> DeviceState:
        """An empty sequence."""
        return DeviceState(self._backend, self._caches)

    def forward(
        self,
        state: DeviceState,
        ids: Sequence[int] | npt.NDArray[np.integer[Any]],
        logits: Literal["all", "last"] = "last",
        *,
        trace: Trace | None = None,
    ) -> F32:
        """Append ``ids`` to the sequence and return logits.

        Parameters
        ----------
        state : from ``new_state`` of this engine; advanced batch by batch
        ids : 1-D token ids
        logits : those of every id, or of the last only
        trace : called with names and arrays of intermediate values, once per batch and name

        Returns
        -------
        f32 [T, vocab] or [1, vocab]
        """
        tokens = self._checked(state, ids)
        out = np.empty((len(tokens) if logits == "all" else 1, self.vocab_size), np.float32)
        for start in range(0, len(tokens), self._batch_tokens):
            batch = tokens[start : start + self._batch_tokens]
            if logits == "all":
                self._step(state, batch, trace, out[start : start + len(batch)])
            else:
                last = start + len(batch) == len(tokens)
                self._step(state, batch, trace, out if last else out[:0])
        return out

    def next_id(self, state: DeviceState, ids: Sequence[int] | npt.NDArray[np.integer[Any]]) -> int:
        """Append ``ids`` and return the id of the last one's largest logit, the lower on ties.

        The logits stay on the device, unless they are not finite: ``LogitsError`` tells which.
        """
        tokens = self._checked(state, ids)
        for start in range(0, len(tokens), self._batch_tokens):
            batch = tokens[start : start + self._batch_tokens]
            self._advance(state, batch, head=start + len(batch) == len(tokens))
        self._backend.stream.download(self._found, self._scratch.id.address)
        self._finish()
        found = int.from_bytes(self._found.array.tobytes(), "little", signed=True)
        if found < 0:
            logits = np.empty(self.vocab_size, np.float32)
            self._download(logits)
            check_finite(logits)
        return found

    def close(self) -> None:
        """Free everything on the device, sequences too."""
        self._backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()

    # ---- loading ---------------------------------------------------------------------------------

    def _load(self, reader: Reader, progress: Progress | None) -> None:
        """Place everything, see that it fits, then read it."""
        config, device = self.config, self._backend.device
        source, work = DeviceSource(reader), Layout()
        weights = plan_weights(config, source, reader.path)
        frequencies = _frequencies(config)
        self._decode_block = StepBlock(device, work, config, frequencies, 1)
        self._batch_block = StepBlock(device, work, config, frequencies, self._batch_tokens)
        self._scratch = Scratch(work, config, self._batch_tokens, self.max_context)
        self._program = Program(config, weights, source, self._scratch, self.max_context)
        self._found = device.pinned(4)
        self._logits = device.pinned(4 * self.vocab_size)
        layouts = [*source.layouts, work]
        needed = sum(layout.nbytes for layout in layouts) + self._caches.first_bytes
        device.ensure_free(needed, f"the weights and caches of {reader.path}")
        for layout in layouts:
            layout.allocate(device)
        self._backend.prepare(self._decode())
        self._staging: Staging | None = source.fill(device, self._backend.copies, progress)
        reader.check_unchanged()
        self._copied = self._backend.copies.record()
        self._await_weights()

    def _await_weights(self) -> None:
        """Let the first step wait for the last copies: they go through another stream."""
        self._backend.stream.wait(self._copied)

    def _decode(self, *, traced: bool = False) -> list[Launch]:
        return self._program.decode(self._decode_block, traced=traced)

    # ---- steps -----------------------------------------------------------------------------------

    def _step(self, state: DeviceState, ids: I64, trace: Trace | None, out: F32) -> None:
        """One batch; logits of its last ``len(out)`` tokens to ``out``."""
        self._advance(state, ids, head=len(out) == 1, trace=trace)
        if len(out) == 1:
            self._download(out[0])
            return
        for start in range(0, len(out), HEAD_TOKENS):
            part = out[start : start + HEAD_TOKENS]
            self._run(self._program.head(start, len(part), traced=trace is not None), trace)
            self._backend.stream.download(part, self._scratch.logits.address)

    def _advance(
        self, state: DeviceState, ids: I64, *, head: bool, trace: Trace | None = None
    ) -> None:
        """Queue one batch through all layers; with ``head`` also the last one's logits and id."""
        backend, first, tokens = self._backend, state.position, len(ids)
        state.reserve(first + tokens)
        block = self._decode_block if tokens == 1 else self._batch_block
        block.send(backend.stream, first, ids, state.table)
        if tokens > 1:
            traced = trace is not None
            body = self._program.body(block, tokens, first + tokens, traced=traced)
            self._run(body, trace)
            if head:
                self._run(self._program.head(tokens - 1, 1, traced=traced), trace)
                self._run(self._program.argmax(), trace)
        elif trace is None and self._replay:
            if self._graph is None:
                self._graph = backend.capture(self._decode())
            self._graph.launch(backend.stream)
        else:
            self._run(self._decode(traced=trace is not None), trace)
        state.position += tokens
        if tokens == 1:
            block.foresee(first + 1, 1)

    def _run(self, launches: Iterable[Launch], trace: Trace | None) -> None:
        """Launch directly, showing ``trace`` what it asks for after each."""
        if trace is None:
            self._backend.run(launches)
            return
        for launch in launches:
            self._backend.run([launch])
            for shown in launch.shows:
                values = np.empty(shown.shape, shown.dtype)
                self._backend.stream.download(values, shown.place.address)
                trace(shown.name, values)

    def _download(self, out: F32) -> None:
        """The first logits held, by way of pinned memory."""
        self._backend.stream.download(self._logits, self._scratch.logits.address)
        self._finish()
        out[:] = self._logits.array.view(np.float32)

    def _finish(self) -> None:
        """Wait for all that was queued: the one wait of a step."""
        self._backend.stream.synchronize()
        staging, self._staging = self._staging, None
        if staging is not None:  # a step has run, so the copies that it waited for were made
            staging.free()

    def _checked(
        self, state: DeviceState, ids: Sequence[int] | npt.NDArray[np.integer[Any]]
    ) -> I64:
        state.check_of(self._backend)
        return checked_ids(ids, state.position, self.vocab_size, self.max_context)


def _frequencies(config: ModelConfig) -> dict[int, npt.NDArray[np.float64]]:
    """Radians per position by ratio; ratios of one base share one array."""
    by_base = {
        bool(ratio): layer_frequencies(config, layer)
        for layer, ratio in enumerate(config.compress_ratios)
    }
    return {ratio: by_base[bool(ratio)] for ratio in sorted(set(config.compress_ratios))}
