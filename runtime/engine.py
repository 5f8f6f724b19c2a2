"""Owns a loaded model: opening an artifact, sequences, and tokens to logits.

It knows no text and picks no token.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import count
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from ds4q.artifact.fastpath import steady
from ds4q.artifact.hfq import Reader
from ds4q.runtime import kv
from ds4q.runtime.backend.cpu import CpuBackend
from ds4q.runtime.backend.workers import Workers
from ds4q.runtime.config import ModelConfig, check_sound, checked_config
from ds4q.runtime.digests import Digests
from ds4q.runtime.errors import ContextError, RunError, SequenceError, TokenError
from ds4q.runtime.experts.cache import ExpertCache, open_cache
from ds4q.runtime.experts.options import CacheOptions
from ds4q.runtime.experts.plan import check_resident, working_bytes
from ds4q.runtime.experts.resident import ResidentExperts
from ds4q.runtime.experts.store import ExpertStore, Phase
from ds4q.runtime.experts.view import Choices, ExpertsView
from ds4q.runtime.kv import Snapshot, State
from ds4q.runtime.kvtype import STORED, KvType
from ds4q.runtime.laps import Laps
from ds4q.runtime.model.block import Block
from ds4q.runtime.model.head import Embedding, Head
from ds4q.runtime.model.parts import Observer, Parts, Span, Step, Trace, WeightSource
from ds4q.runtime.model.rope import layer_frequencies
from ds4q.runtime.source import ArtifactSource, Progress
from ds4q.runtime.spread import Spread

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]

BATCH_TOKENS = 256
UNSIZED_CONTEXT_TOKENS = 1 << 15  # that memory is left for where nobody names a context


class Engine:
    """A DeepSeek-V4 model in memory, on the CPU in float32.

    Parameters
    ----------
    config, source, experts : the model's constants, tensors and routed experts
    threads : most threads that one operator uses
    max_context : most tokens of one sequence; None takes the model's own limit and lets caches
        grow, a number sizes them at once
    batch_tokens : most tokens that go through the layers together; bounds memory, changes nothing
    kv_type : how window rows and compressed entries are kept
    metadata : the artifact's, for whoever needs its tokenizer
    cache : what ``experts`` belongs to, where they are not simply all in memory; closed with the
        engine

    Attributes
    ----------
    batch_tokens : as given
    notes : lines for the user about loading and experts; may grow
    load_s : seconds that loading took, by what they went into; "first_kernel" is that of the first
        step through the first layer, when compiled code is loaded
    """

    def __init__(
        self,
        config: ModelConfig,
        source: WeightSource,
        experts: ExpertStore,
        *,
        threads: int,
        max_context: int | None = None,
        batch_tokens: int = BATCH_TOKENS,
        kv_type: KvType = "f32",
        metadata: Mapping[str, Any] | None = None,
        cache: ExpertCache | None = None,
    ) -> None:
        self.config = config
        self.metadata = {} if metadata is None else metadata
        self.max_context = checked_context(config, max_context, batch_tokens)
        self._sized_context = max_context
        self._kv_type = checked_kv_type(kv_type)
        self.batch_tokens = batch_tokens
        self._cache = cache
        self._choices = Choices(config.num_hidden_layers, config.n_routed_experts)
        self._sequences = count()
        self.notes: list[str] = []
        self.load_s: dict[str, float] = {}
        parts = Parts(config, source, experts, CpuBackend(threads), Workers(threads))
        self._embedding = Embedding(parts)
        self._blocks = [Block(parts, layer) for layer in range(config.num_hidden_layers)]
        self._head = Head(parts)
        self._frequencies = {
            ratio: layer_frequencies(config, layer)
            for layer, ratio in enumerate(config.compress_ratios)
        }

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        threads: int,
        max_context: int | None = None,
        batch_tokens: int = BATCH_TOKENS,
        progress: Progress | None = None,
        cache: CacheOptions | None = None,
        layers: Sequence[int] | None = None,
        spread: Spread | None = None,
        kv_type: KvType = "f32",
        sequences: int = 1,
        beside_bytes: int = 0,
    ) -> Engine:
        """Load an artifact; without ``cache`` all experts are in memory.

        Everything that the header and index can tell is checked before the first large read.

        Parameters
        ----------
        path : an HFQ file
        progress : called with (bytes read, bytes in all)
        cache : how routed experts are kept
        layers : numbers of the layers to run, ascending, then the head; None: all
        spread : what the model runs on; one CPU is all there is
        kv_type : how window rows and compressed entries are kept; all else is float32
        sequences, beside_bytes : what there has to be room for beside the weights: so many
            sequences at once, and so many bytes of other things

        Raises
        ------
        ArtifactError : the file breaks a rule of the format, its receipt cannot be used, or the
            file was written to meanwhile
        RunError : it holds no complete model that this runtime can run, or not as asked
        DigestError : a tensor differs from the receipt
        HostMemoryError : it does not fit into memory; the weights were not read
        """
        (spread or Spread()).check(paged=cache is not None and cache.paged)
        laps = Laps()
        with Reader(path) as reader, ExitStack() as stack:
            laps.lap("open")
            config = checked_config(reader).shortened(layers)
            notes: list[str] = []
            digests = digests_of(reader, cache, notes)
            if digests is not None:
                stack.callback(digests.wait)
            laps.lap("audit")
            source = ArtifactSource(reader, digests)
            laps.lap("tables")
            state_bytes = expected_state_bytes(config, max_context, batch_tokens, kv_type)
            state_bytes *= sequences
            experts, opened = _open_experts(
                reader, config, source, cache, state_bytes + beside_bytes, laps, notes
            )
            if opened is not None:
                stack.callback(opened.close)
            engine = cls(
                config,
                source,
                experts,
                threads=threads,
                max_context=max_context,
                batch_tokens=batch_tokens,
                kv_type=kv_type,
                metadata=reader.metadata,
                cache=opened,
            )
            check_sound(reader)
            if opened is None or opened.plan is None:
                needed = {"weights": source.planned_bytes, "sequences": state_bytes}
                needed |= {
                    "computing": working_bytes(config, batch_tokens),
                    "all else": beside_bytes,
                }
                notes += check_resident(needed, config, source, path=reader.path)
            laps.lap("audit")
            source.fill(progress)
            if (note := reader.check_unwritten()) is not None:
                notes.append(note)
            laps.lap("dense")
            if opened is not None:
                opened.attach([block.router for block in engine._blocks])
            stack.pop_all()
        engine.load_s = laps.seconds
        engine.notes = notes
        return engine

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.config.vocab_size

    def cache_counters(self) -> dict[str, Any] | None:
        """What the pager of routed experts counted; None where nothing is paged."""
        return None if self._cache is None else self._cache.counters()

    def check_file(self) -> None:
        """Raise ``ChangedError`` if what is still to be read can not be; from any thread."""
        if self._cache is not None:
            self._cache.check_file()

    def experts_view(self) -> ExpertsView:
        """What tokens have chosen so far, and what is in memory now; from any thread."""
        shape = self.config.num_hidden_layers, self.config.n_routed_experts
        whole = np.ones(shape, np.bool_)
        return self._choices.view(whole if self._cache is None else self._cache.resident())

    def close(self) -> None:
        """End all reading and finish a trace; a second call does nothing."""
        if self._cache is not None:
            self._cache.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Close; a trace of what failed, other than by an interrupt, is dropped."""
        if self._cache is not None and isinstance(error, Exception):
            self._cache.drop_trace()
        self.close()

    def new_state(self) -> State:
        """An empty sequence."""
        state = kv.new_state(self.config, self.batch_tokens, self._sized_context, self._kv_type)
        state.number = next(self._sequences)
        return state

    def snapshot(self, state: State) -> Snapshot:
        """A compact copy of the sequence as it is; nothing changes it."""
        return kv.snapshot(state)

    def restore(self, snapshot: Snapshot) -> State:
        """A new sequence that goes on from ``snapshot`` of this engine, bit for bit."""
        state = self.new_state()
        kv.load(state, snapshot)
        return state

    @steady()
    def forward(
        self,
        state: State,
        ids: Sequence[int] | npt.NDArray[np.integer[Any]],
        logits: Literal["all", "last"] = "last",
        *,
        trace: Trace | None = None,
        observer: Observer | None = None,
    ) -> F32:
        """Append ``ids`` to the sequence and return logits.

        The position moves batch by batch; a call that is interrupted leaves ``state`` at the end
        of the last whole batch.

        Parameters
        ----------
        state : from ``new_state`` of this engine; advanced
        ids : 1-D token ids
        logits : those of every id, or of the last only
        trace : called with names and arrays of intermediate values, once per batch and name
        observer : called with what each layer's routed experts are about to compute, once per
            batch and layer

        Returns
        -------
        f32 [T, vocab] or [1, vocab]
        """
        tokens = checked_ids(ids, state.position, self.vocab_size, self.max_context)
        out = np.empty((len(tokens) if logits == "all" else 1, self.vocab_size), np.float32)
        phase: Phase = "decode" if state.position and len(tokens) == 1 else "prefill"
        for start in range(0, len(tokens), self.batch_tokens):
            batch = tokens[start : start + self.batch_tokens]
            streams = self._advance([(state, batch)], phase, trace, observer)
            if logits == "all":
                out[start : start + len(batch)] = self._head.forward(streams, trace)
            elif start + len(batch) == len(tokens):
                out[:] = self._head.forward(streams[-1:], trace)
            state.position += len(batch)
        return out

    @steady()
    def forward_many(
        self, parts: Sequence[tuple[State, Sequence[int] | npt.NDArray[np.integer[Any]]]]
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
        batch = [
            (state, checked_ids(ids, state.position, self.vocab_size, self.max_context))
            for state, ids in parts
        ]
        check_parts(batch, self.batch_tokens)
        decode = all(state.position and len(ids) == 1 for state, ids in batch)
        streams = self._advance(batch, "decode" if decode else "prefill", None, None)
        lasts = np.cumsum([len(ids) for _, ids in batch]) - 1
        out = self._head.forward(streams[lasts], None)
        for state, ids in batch:
            state.position += len(ids)
        return out

    def _advance(
        self,
        batch: Sequence[tuple[State, I64]],
        phase: Phase,
        trace: Trace | None,
        observer: Observer | None,
    ) -> F32:
        """One batch through all layers; the caches hold it, the positions do not count it yet."""
        spans: list[Span] = []
        row = 0
        for state, each in batch:
            spans.append(Span(slice(row, row + len(each)), state.position, state.layers))
            row += len(each)
        ids = np.concatenate([each for _, each in batch])
        if self._cache is not None:
            self._cache.begin(*self._place(batch), ids, phase)
        step = Step.of(
            ids,
            spans,
            self._frequencies,
            trace=trace,
            observer=observer,
            phase=phase,
            routed=self._routed,
        )
        started = time.perf_counter()
        streams = self._embedding.forward(ids)
        for block in self._blocks:
            streams = block.forward(streams, step)
            self.load_s.setdefault("first_kernel", time.perf_counter() - started)
        return streams

    def _routed(self, layer: int, ids: I64, logits: F32, x: F32) -> None:
        self._choices.add(layer, ids)
        if self._cache is not None and self._cache.routed is not None:
            self._cache.routed(layer, ids, logits, x)

    def _place(self, batch: Sequence[tuple[State, I64]]) -> tuple[int, int]:
        """Sequence and position of a batch in records; of several sequences, a new one's start."""
        if len(batch) == 1:
            return batch[0][0].number, batch[0][0].position
        return next(self._sequences), 0


def digests_of(reader: Reader, cache: CacheOptions | None, notes: list[str]) -> Digests | None:
    """What the tensors of an artifact are compared with; None where ``cache`` says not to.

    Raises ``ReceiptError`` where a receipt is required, and there is none of this file.
    """
    options = CacheOptions() if cache is None else cache
    if not options.check_reads:
        return None
    return Digests.of(reader, notes, require=options.require_receipt)


def _open_experts(
    reader: Reader,
    config: ModelConfig,
    source: ArtifactSource,
    cache: CacheOptions | None,
    state_bytes: int,
    laps: Laps,
    notes: list[str],
) -> tuple[ExpertStore, ExpertCache | None]:
    """Where the model gets its experts from, and what has to be closed of it."""
    if cache is None or cache.plain:
        experts = ResidentExperts(config, source, path=reader.path)
        laps.lap("pools")
        return experts, None
    opened = open_cache(
        reader, config, source, cache, state_bytes=state_bytes, laps=laps, notes=notes
    )
    return opened.store, opened


def expected_state_bytes(
    config: ModelConfig,
    max_context: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
    kv_type: KvType = "f32",
) -> int:
    """Bytes that a cache of experts leaves to a sequence; refuses as ``checked_context`` does."""
    context = checked_context(config, max_context, batch_tokens)
    if max_context is None:  # caches grow: few sequences reach the model's own limit
        context = min(context, UNSIZED_CONTEXT_TOKENS)
    return kv.state_bytes(config, batch_tokens, context, checked_kv_type(kv_type))


def checked_kv_type(kv_type: KvType) -> KvType:
    """``kv_type``; refuses what rows cannot be kept as."""
    if kv_type not in STORED:
        raise RunError("unknown KV type", expected=f"one of {', '.join(STORED)}", found=kv_type)
    return kv_type


def checked_context(config: ModelConfig, max_context: int | None, batch_tokens: int) -> int:
    """The most tokens of a sequence; refuses a context or a batch that cannot be."""
    limit = config.max_position_embeddings
    if max_context is not None and not 1 <= max_context <= limit:
        raise ContextError(
            "context length out of range",
            expected=f"1 to {limit}",
            found=max_context,
            remedy="choose a context that the model has positions for",
        )
    if batch_tokens < 1:
        raise RunError("bad batch size", expected="1 or more", found=batch_tokens)
    return limit if max_context is None else max_context


def checked_ids(
    ids: Sequence[int] | npt.NDArray[np.integer[Any]], position: int, vocab: int, context: int
) -> I64:
    """``ids`` as int64 [T]; refuses what is no token, and what goes beyond the context."""
    tokens = np.asarray(ids)
    if tokens.ndim != 1 or not tokens.size or tokens.dtype.kind not in "iu":
        raise TokenError(
            "not a list of token ids",
            expected="one or more integers",
            found=f"{tokens.dtype} {tokens.shape}",
        )
    bad = tokens[(tokens < 0) | (tokens >= vocab)]
    if bad.size:
        raise TokenError(expected=f"0..{vocab - 1}", found=int(bad[0]))
    if position + len(tokens) > context:
        raise ContextError(
            expected=f"at most {context} tokens",
            found=position + len(tokens),
        )
    return tokens.astype(np.int64)


def check_parts(parts: Sequence[tuple[object, I64]], most_tokens: int) -> None:
    """Refuse a step of no sequences, of one twice, or of more than ``most_tokens`` ids."""
    if not parts:
        raise RunError("no sequences to go on with", expected="one or more", found=0)
    if len({id(state) for state, _ in parts}) < len(parts):
        raise SequenceError("a sequence twice in one step", remedy="give each sequence once")
    tokens = sum(len(ids) for _, ids in parts)
    if tokens > most_tokens:
        raise RunError(
            "too many tokens for one step", expected=f"at most {most_tokens}", found=tokens
        )
