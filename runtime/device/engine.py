"""Owns a loaded model on a HIP device: opening an artifact, sequences, tokens to logits or ids.

It knows no text. A decode step is one replayed graph; prefill launches the same kernels directly.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from ds4q.artifact.hfq import Reader
from ds4q.runtime.backend.hip import HipBackend
from ds4q.runtime.config import ModelConfig, check_sound, checked_config
from ds4q.runtime.device.block import StepBlock
from ds4q.runtime.device.expert_cache import ExpertCache, untraceable
from ds4q.runtime.device.layout import Layout
from ds4q.runtime.device.model import ModelWeights, plan_weights
from ds4q.runtime.device.paging import BandIds, DevicePaging
from ds4q.runtime.device.program import Program
from ds4q.runtime.device.room import Asked, allocate, check_room
from ds4q.runtime.device.scratch import HEAD_TOKENS, Scratch
from ds4q.runtime.device.snapshot import DeviceSnapshot, Snapshots
from ds4q.runtime.device.staging import Staging
from ds4q.runtime.device.state import Caches, DeviceState
from ds4q.runtime.device.steps import Part, Steps, block_sizes
from ds4q.runtime.device.weights import DeviceSource
from ds4q.runtime.engine import (
    BATCH_TOKENS,
    check_parts,
    checked_context,
    checked_ids,
    checked_kv_type,
    digests_of,
)
from ds4q.runtime.errors import CacheError
from ds4q.runtime.experts.options import CacheOptions
from ds4q.runtime.experts.store import Phase
from ds4q.runtime.experts.view import ExpertsView
from ds4q.runtime.kvtype import KvType
from ds4q.runtime.laps import Laps
from ds4q.runtime.model.parts import Trace
from ds4q.runtime.model.rope import layer_frequencies
from ds4q.runtime.sampling import check_finite
from ds4q.runtime.source import Progress
from ds4q.runtime.spread import Spread

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]


class HipEngine:
    """A DeepSeek-V4 model in a device's memory; use it as a context.

    Parameters
    ----------
    backend : an open device; the engine closes it
    reader : an artifact; nothing of it is needed once this has returned
    max_context : most tokens of one sequence; None takes the model's own limit and lets caches
        grow, a number sizes them at once
    batch_tokens : most tokens that go through the layers together; bounds memory, changes nothing
    replay : run decode steps as a graph; else by the same launches, one by one
    progress : called with (bytes read, bytes in all)
    cache : how routed experts are kept; None: all of them on the device
    layers : numbers of the layers to run, ascending, then the head; None: all
    kv_type : how window rows and compressed entries are kept; all else is float32
    sequences, beside_bytes : what a cache of experts that is sized by itself leaves room for: so
        many sequences at once, and so many bytes of other things in the host's memory

    Attributes
    ----------
    batch_tokens : as given
    notes : what a user should hear, one line each; may grow
    load_s : seconds that loading took, by what they went into

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
        cache: CacheOptions | None = None,
        layers: Sequence[int] | None = None,
        kv_type: KvType = "f32",
        sequences: int = 1,
        beside_bytes: int = 0,
    ) -> None:
        self.config = config = checked_config(reader).shortened(layers)
        self.metadata: Mapping[str, Any] = reader.metadata
        self.max_context = checked_context(config, max_context, batch_tokens)
        self._backend = backend
        self.batch_tokens = batch_tokens
        self._replay = replay
        self._paging: DevicePaging | None = None
        self._cache: ExpertCache | None = None
        self._sequences = count()
        self.notes: list[str] = []
        self.load_s: dict[str, float] = {}
        self._kv_type = checked_kv_type(kv_type)
        self._digests = digests_of(reader, cache, self.notes)
        self._caches = Caches(
            config, batch_tokens, self.max_context, max_context is not None, self._kv_type
        )
        self._snapshots = Snapshots(backend, self._caches)
        self._left_bytes = sequences * self._caches.expected_bytes
        if backend.device.unified:  # its memory is the host's
            self._left_bytes += beside_bytes
        check_sound(reader)
        try:
            self._load(reader, progress, cache)
        except BaseException:
            self._close_cache()
            raise
        finally:
            if self._digests is not None:
                self._digests.wait()

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        max_context: int | None = None,
        batch_tokens: int = BATCH_TOKENS,
        replay: bool | None = None,
        progress: Progress | None = None,
        cache: CacheOptions | None = None,
        layers: Sequence[int] | None = None,
        spread: Spread | None = None,
        kv_type: KvType = "f32",
        sequences: int = 1,
        beside_bytes: int = 0,
    ) -> Self:
        """Open the device that is found, and load an artifact onto it.

        ``replay`` None: yes, unless the environment says ``DS4Q_HIP_GRAPH=0``. ``spread``: what the
        model runs on; one device is all there is.
        """
        (spread or Spread(devices=("hip",))).check(paged=cache is not None and cache.paged)
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
                    cache=cache,
                    layers=layers,
                    kv_type=kv_type,
                    sequences=sequences,
                    beside_bytes=beside_bytes,
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
        return DeviceState(self._backend, self._caches, next(self._sequences))

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
        phase = _phase(state, tokens)
        for start in range(0, len(tokens), self.batch_tokens):
            batch = tokens[start : start + self.batch_tokens]
            if logits == "all":
                self._step(state, batch, phase, trace, out[start : start + len(batch)])
            else:
                last = start + len(batch) == len(tokens)
                self._step(state, batch, phase, trace, out if last else out[:0])
        return out

    def next_id(self, state: DeviceState, ids: Sequence[int] | npt.NDArray[np.integer[Any]]) -> int:
        """Append ``ids`` and return the id of the last one's largest logit, the lower on ties.

        The logits stay on the device, unless they are not finite: ``LogitsError`` tells which.
        """
        tokens = self._checked(state, ids)
        phase = _phase(state, tokens)
        for start in range(0, len(tokens), self.batch_tokens):
            batch = tokens[start : start + self.batch_tokens]
            if not self._advance(state, batch, phase) and start + len(batch) == len(tokens):
                self._steps.queue_head(len(batch) - 1, 1)
        self._backend.stream.download(self._found, self._scratch.id.address)
        self._finish()
        found = int.from_bytes(self._found.array.tobytes(), "little", signed=True)
        if found < 0:
            logits = np.empty((1, self.vocab_size), np.float32)
            self._download(logits)
            check_finite(logits[0])
        return found

    def forward_many(
        self, parts: Sequence[tuple[DeviceState, Sequence[int] | npt.NDArray[np.integer[Any]]]]
    ) -> F32:
        """Append ids to several sequences, all of them through the layers together.

        Each sequence gets the bits of ``forward`` alone. A call that fails moves none of them.

        Parameters
        ----------
        parts : sequences, each once, and the 1-D ids that it gets; ``batch_tokens`` ids in all at
            most

        Returns
        -------
        f32 [N, vocab], the logits of each part's last id

        Raises
        ------
        TokenError, ContextError : as ``forward``
        SequenceError, RunError : no parts, a sequence twice, or too many ids for one step
        """
        batch = [(state, self._checked(state, ids)) for state, ids in parts]
        check_parts(batch, self.batch_tokens)
        decode = all(_phase(state, ids) == "decode" for state, ids in batch)
        queued = self._queue(batch, "decode" if decode else "prefill", None)
        out = np.empty((len(batch), self.vocab_size), np.float32)
        lasts = (np.cumsum([len(ids) for _, ids in batch]) - 1).tolist()
        for part in [slice(len(batch))] if queued else _heads(lasts):
            if not queued:
                self._steps.queue_head(lasts[part][0], len(lasts[part]))
            self._download(out[part])
        for state, ids in batch:
            state.position += len(ids)
        return out

    def snapshot(self, state: DeviceState) -> DeviceSnapshot:
        """A copy of the sequence in host memory, of no more than later steps can read."""
        state.check_of(self._backend)
        return self._snapshots.take(state)

    def restore(self, snapshot: DeviceSnapshot) -> DeviceState:
        """A new sequence that goes on from ``snapshot``, with the bits of one that never stopped.

        Raises
        ------
        SequenceError : the snapshot is another engine's
        DeviceMemoryError : there is no room for another sequence
        """
        state = self.new_state()
        try:
            self._snapshots.put(snapshot, state)
        except BaseException:
            state.close()
            raise
        return state

    def close(self) -> None:
        """End all reading, and free everything on the device, sequences too."""
        try:
            self._close_cache()
        finally:
            self._backend.close()

    def cache_counters(self) -> dict[str, Any] | None:
        """What the cache of routed experts counts; None where all are on the device."""
        return None if self._paging is None else self._paging.counters()

    def check_file(self) -> None:
        """Raise ``ChangedError`` if what is still to be read can not be; from any thread."""
        if self._cache is not None:
            self._cache.check_file()

    def experts_view(self) -> ExpertsView | None:
        """What to tell of routed experts; None where all are on the device, which tells nothing."""
        return None if self._paging is None else self._paging.view()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Close; a trace of what failed, other than by an interrupt, is dropped."""
        if self._cache is not None and isinstance(error, Exception):
            self._cache.drop_trace()
        self.close()

    # ---- loading ---------------------------------------------------------------------------------

    def _load(self, reader: Reader, progress: Progress | None, cache: CacheOptions | None) -> None:
        """Place everything, see that it fits, then read it."""
        config, device = self.config, self._backend.device
        laps = Laps()
        source, work, weights, experts = self._planned(reader, cache)
        frequencies = _frequencies(config)
        blocks = [
            StepBlock(device, work, config, frequencies, size)
            for size in block_sizes(self.batch_tokens)
        ]
        program = Program(config, weights, source, self._scratch, self._kv_type)
        band_ids = None
        if experts is not None:
            band_ids = BandIds(work, source, config, self.batch_tokens)
        self._found = device.pinned(4)
        self._logits = device.pinned(4 * self.vocab_size * HEAD_TOKENS)
        layouts = [*source.layouts, *([] if experts is None else experts.pools.layouts), work]
        asked = Asked(config, source.tensors, cache, reader.path)
        self.notes += check_room(device, layouts, self._caches.first_bytes, asked)
        laps.lap("audit")
        allocate(device, layouts, asked)
        laps.lap("pools")
        self._backend.prepare([*program.body(blocks[0], 1, self.max_context), *program.head(0, 1)])
        laps.lap("first_kernel")
        self._staging: Staging | None = source.fill(device, self._backend.copies, progress)
        if (note := reader.check_unwritten()) is not None:
            self.notes.append(note)
        self._copied = self._backend.copies.record()
        self._await_weights()
        laps.lap("dense")
        if experts is not None and band_ids is not None:
            self._paging = experts.open(self._backend, source, program, self._scratch, band_ids)
            laps.lap("pools")
        self._steps = Steps(
            self._backend,
            program,
            blocks,
            context=self.max_context,
            replay=self._replay,
            paging=self._paging,
        )
        self.load_s = laps.seconds

    def _planned(
        self, reader: Reader, cache: CacheOptions | None
    ) -> tuple[DeviceSource, Layout, ModelWeights, ExpertCache | None]:
        """Places of all that is read and computed; the cache of experts, unless all of them fit."""
        config, source, work = self.config, DeviceSource(reader, self._digests), Layout()
        self._scratch = Scratch(work, config, self.batch_tokens, self.max_context)
        if cache is not None:
            _refuse(cache)
        if cache is None or not (cache.paged or cache.cold):
            return source, work, plan_weights(config, source, reader.path), None
        self._cache = experts = ExpertCache(config, source, reader, cache, self.notes)
        slots = experts.catalogue, experts.pools
        weights = plan_weights(config, source, reader.path, slots)
        needed = sum(layout.nbytes for layout in (*source.layouts, work))
        if experts.size(self._backend.device, needed + self._left_bytes):
            self._close_cache()
            self._cache = None
            return self._planned(reader, None)
        return source, work, weights, experts

    def _close_cache(self) -> None:
        if self._cache is not None:
            self._cache.close()

    def _await_weights(self) -> None:
        """Let the first step wait for the last copies: they go through another stream."""
        self._backend.stream.wait(self._copied)

    # ---- steps -----------------------------------------------------------------------------------

    def _step(
        self, state: DeviceState, ids: I64, phase: Phase, trace: Trace | None, out: F32
    ) -> None:
        """One batch; logits of its last ``len(out)`` tokens to ``out``."""
        queued = self._advance(state, ids, phase, trace)
        for start in range(0, len(out), HEAD_TOKENS):
            part = out[start : start + HEAD_TOKENS]
            if not queued:
                self._steps.queue_head(len(ids) - len(out) + start, len(part), trace)
            self._download(part)

    def _advance(
        self, state: DeviceState, ids: I64, phase: Phase, trace: Trace | None = None
    ) -> bool:
        """Queue one batch of a sequence; whether its logits and the best id are queued, too."""
        queued = self._queue([(state, ids)], phase, trace)
        state.position += len(ids)
        return queued

    def _queue(self, parts: Sequence[Part], phase: Phase, trace: Trace | None) -> bool:
        """See ``Steps.queue``. Several sequences are, to records, one of their own."""
        number = parts[0][0].number if len(parts) == 1 else next(self._sequences)
        return self._steps.queue(parts, phase, number, trace)

    def _download(self, out: F32) -> None:
        """The first logits held [T, vocab], by way of pinned memory."""
        held = self._logits.array.view(np.float32)[: out.size]
        self._backend.stream.download(held, self._scratch.logits.address)
        self._finish()
        out[:] = held.reshape(out.shape)

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


def _refuse(cache: CacheOptions) -> None:
    """What is asked of experts that a device cannot do."""
    if cache.trace_states:
        raise CacheError(
            "router states on a device", remedy="record them on the CPU: leave out --device hip"
        )
    if cache.trace is not None and not cache.paged:
        raise untraceable("page them (--expert-cache), or leave out --device hip")


def _phase(state: DeviceState, ids: I64) -> Phase:
    """Of a whole call."""
    return "decode" if len(ids) == 1 and state.position > 0 else "prefill"


def _heads(lasts: Sequence[int]) -> Iterator[slice]:
    """Cuts ``lasts``, rows of a step, into those whose logits are formed together."""
    start = 0
    for end in range(1, len(lasts) + 1):
        ends = end == len(lasts) or lasts[end] != lasts[end - 1] + 1
        if ends or end - start == HEAD_TOKENS:
            yield slice(start, end)
            start = end


def _frequencies(config: ModelConfig) -> dict[int, npt.NDArray[np.float64]]:
    """Radians per position by ratio; ratios of one base share one array."""
    by_base = {
        bool(ratio): layer_frequencies(config, layer)
        for layer, ratio in enumerate(config.compress_ratios)
    }
    return {ratio: by_base[bool(ratio)] for ratio in sorted(set(config.compress_ratios))}
