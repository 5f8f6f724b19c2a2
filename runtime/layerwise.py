"""Calibration layer by layer: all tokens through one layer, then through the next.

Between layers the hidden states of all tokens wait on disk (``rows.py``). So memory holds the
weights of one layer, every weight is read once, and the statistics are those of a model that is in
memory as a whole, bit for bit: a token's bits depend neither on how its text is cut nor on what
else is computed, and sums grow in the order of the texts.

Where even one layer's experts are more than may be in memory they come in groups: attention and
router run first, then each group serves its tokens, then the outputs are added, in the order in
which the router chose. The experts' inputs and outputs wait on disk meanwhile, too.

T tokens, K experts per token, n streams, d hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ds4q.artifact.fastpath import steady
from ds4q.artifact.hfq import Reader
from ds4q.quantize.imatrix import LayerStatistics
from ds4q.runtime.backend.cpu import CpuBackend
from ds4q.runtime.backend.weights import Expert
from ds4q.runtime.backend.workers import Workers
from ds4q.runtime.collect import Collector
from ds4q.runtime.config import ModelConfig
from ds4q.runtime.digests import Digests
from ds4q.runtime.engine import BATCH_TOKENS
from ds4q.runtime.errors import CacheError
from ds4q.runtime.experts.budget import available_bytes, grant
from ds4q.runtime.experts.catalogue import Catalogue, Record
from ds4q.runtime.experts.options import Budget
from ds4q.runtime.experts.plan import working_bytes
from ds4q.runtime.experts.resident import layer_experts
from ds4q.runtime.experts.store import Band, Phase
from ds4q.runtime.kv import LayerCache
from ds4q.runtime.model.block import Block
from ds4q.runtime.model.head import Embedding
from ds4q.runtime.model.hyper import expand
from ds4q.runtime.model.parts import Parts, Span, Step
from ds4q.runtime.model.rope import layer_frequencies
from ds4q.runtime.rows import Rows, check_room
from ds4q.runtime.source import ArtifactSource

if TYPE_CHECKING:
    from ds4q.runtime.backend.hip import HipBackend

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]
Advance = Callable[[int], None]


class Plan(NamedTuple):
    """What a calibration takes.

    Attributes
    ----------
    expert_bytes : of experts that are in memory at a time
    disk_bytes : of temporary files
    notes : lines for the user
    """

    expert_bytes: int
    disk_bytes: int
    notes: list[str]


def plan_layers(
    reader: Reader, config: ModelConfig, tokens: int, asked: Budget | None, *, device: bool = False
) -> Plan:
    """What ``tokens`` through the layers take, refused where there is no room for it.

    Parameters
    ----------
    asked : bytes of experts that may be in memory; "auto": what memory leaves; None: as "auto", and
        a whole layer's where the free memory is unknown
    device : the layers are on a device, and the host holds none of them

    Raises
    ------
    CacheError : memory is too small, or ``asked`` is less than one expert
    SpoolError : the folder for temporary files has too little room
    """
    source = ArtifactSource(reader)
    embedding = source.matrix_entry("embed.weight", (config.vocab_size, config.hidden_size))
    catalogue = Catalogue(config, source, path=reader.path, bind=False)
    layers = [sum(record.nbytes for record in layer) for layer in catalogue.records]
    largest = max(record.nbytes for record in catalogue)
    if isinstance(asked, int) and asked < largest:
        raise CacheError(
            "the expert cache is too small: an expert is in memory as a whole",
            path=reader.path,
            expected=f"at least {largest:,} bytes",
            found=f"{asked:,} bytes",
            remedy=f"--expert-cache {largest} or more",
        )
    floats = tokens * config.hc_mult * config.hidden_size
    if device:
        check_room(4 * floats)
        return Plan(0, 4 * floats, [])
    dense = max(*_dense_bytes(reader, layers), embedding.nbytes)
    needed = dense + _own_bytes(config, tokens)
    granted, notes = max(layers), []
    try:
        free = available_bytes()
    except CacheError as error:
        if asked == "auto":
            raise
        notes.append(f"{reader.path}: memory was not checked before loading: {error.what}")
        granted = min(granted, asked or granted)
    else:
        room = grant(
            asked or "auto",
            least=largest,
            needed=needed,
            available=lambda: free,
            path=reader.path,
        )
        granted = min(granted, room)
    if granted < max(layers):  # the inputs of experts and their outputs
        floats += tokens * (1 + config.num_experts_per_tok) * config.hidden_size
    check_room(4 * floats)
    return Plan(granted, 4 * floats, notes)


def observe_layers(
    reader: Reader,
    config: ModelConfig,
    windows: Sequence[npt.NDArray[np.integer[Any]]],
    *,
    expert_bytes: int,
    threads: int,
    backend: HipBackend | None = None,
    digests: Digests | None = None,
    advance: Advance = lambda tokens: None,
) -> list[LayerStatistics]:
    """What the experts of an artifact see in windows of token ids, each from an empty context.

    Parameters
    ----------
    expert_bytes : of experts that are in memory at a time, at least those of the largest one
    threads : most threads that one operator uses
    backend : the device that the layers run on, a whole one at a time; None: the CPU
    digests : of the artifact's receipt; every tensor that is read is compared with them
    advance : hears of a batch's tokens each time that they are through a layer

    Raises
    ------
    ArtifactError, RunError : the artifact cannot be run, or differs from its receipt
    SpoolError : a temporary file cannot be written
    """
    model = _Model(reader, config, threads, digests)
    batches = list(_batches(windows))
    tokens = sum(len(batch.ids) for batch in batches)
    found = []
    with ExitStack() as stack, steady():
        streams = stack.enter_context(Rows(tokens, config.hc_mult * config.hidden_size))
        model.embed(batches, streams)
        groups = [_groups(layer, expert_bytes) for layer in model.catalogue.records]
        between: _Between | None = None
        if backend is None and any(len(each) > 1 for each in groups):
            between = _Between.made(config, tokens, stack)
        for layer, each in enumerate(groups):
            collector = Collector(config, threads, range(layer, layer + 1))
            through = _Layer(model, layer, batches, streams, collector, advance)
            if backend is not None:
                through.on(backend, reader, digests)
            elif len(each) == 1 or between is None:
                through.whole()
            else:
                through.in_groups(each, between)
            found += collector.statistics()
            reader.check_unwritten()
    return found


class _Batch(NamedTuple):
    """Token ids [T], rows ``first`` on of all tokens, at ``position`` of their window."""

    first: int
    position: int
    ids: I64


class _Between(NamedTuple):
    """What waits between the steps of a layer whose experts come in groups."""

    inputs: Rows  # of the experts, a row a token
    outputs: Rows  # a row for each token and choice
    ids: I64  # [T, K]
    weights: F32  # [T, K]

    @classmethod
    def made(cls, config: ModelConfig, tokens: int, stack: ExitStack) -> _Between:
        """Closed with ``stack``."""
        chosen = tokens, config.num_experts_per_tok
        return cls(
            stack.enter_context(Rows(tokens, config.hidden_size)),
            stack.enter_context(Rows(chosen[0] * chosen[1], config.hidden_size)),
            np.empty(chosen, np.int64),
            np.empty(chosen, np.float32),
        )


class _Experts:
    """An ``ExpertStore`` of the one layer that is in memory."""

    def __init__(self) -> None:
        self.held: Mapping[int, Expert] = {}

    def bands(
        self, layer: int, ids: npt.NDArray[np.integer[Any]], phase: Phase
    ) -> Generator[Band, None, None]:
        """All of them in one band."""
        yield Band(self.held, None)


class _Model:
    """An artifact, of which one part is in memory at a time."""

    def __init__(
        self, reader: Reader, config: ModelConfig, threads: int, digests: Digests | None
    ) -> None:
        self.config = config
        self.source = ArtifactSource(reader, digests)
        self.path = reader.path
        self.catalogue = Catalogue(config, self.source, path=reader.path, bind=False)
        self.backend = CpuBackend(threads)
        self.store = _Experts()
        workers = Workers(threads)
        self.parts = Parts(config, self.source, self.store, self.backend, workers)

    def embed(self, batches: Sequence[_Batch], streams: Rows) -> None:
        """Write the streams before the first layer."""
        embedding = Embedding(self.parts)
        self.source.fill(None)
        for batch in batches:
            streams.write(batch.first, embedding.forward(batch.ids))

    def experts(self, layer: int, ids: Sequence[int]) -> dict[int, Expert]:
        """Experts of a layer, whose bytes arrive with ``source.fill``."""
        return layer_experts(self.config, self.source, layer, ids, self.path)


class _Layer:
    """All tokens on their way through one layer."""

    def __init__(
        self,
        model: _Model,
        layer: int,
        batches: Sequence[_Batch],
        streams: Rows,
        collector: Collector,
        advance: Advance,
    ) -> None:
        self._model = model
        self._config = model.config
        self._layer = layer
        self._batches = batches
        self._streams = streams
        self._collector = collector
        self._advance = advance

    @cached_property
    def _block(self) -> Block:
        return Block(self._model.parts, self._layer)

    def on(self, backend: HipBackend, reader: Reader, digests: Digests | None) -> None:
        """With the layer on a device."""
        from ds4q.runtime.device.alone import LayerAlone  # for this alone

        longest = max(batch.position + len(batch.ids) for batch in self._batches)
        with LayerAlone(
            backend,
            reader,
            self._config,
            self._layer,
            batch_tokens=BATCH_TOKENS,
            context_tokens=longest,
            digests=digests,
        ) as alone:
            for batch in self._batches:
                passed = alone.forward(self._read(batch), batch.ids, batch.position)
                self._write(batch, passed.streams)
                self._collector.computed(self._layer, *passed[2:4], passed.inputs, passed.hidden)
                self._advance(len(batch.ids))

    def whole(self) -> None:
        """With all of the layer's experts in memory."""
        model, block = self._model, self._block
        model.store.held = model.experts(self._layer, range(self._config.n_routed_experts))
        model.source.fill(None)
        for batch, step in self._steps():
            self._write(batch, block.forward(self._read(batch), step))
            self._advance(len(batch.ids))
        model.store.held = {}

    def in_groups(self, groups: Sequence[Sequence[int]], between: _Between) -> None:
        """With so many experts in memory as a group has."""
        moe = self._block.experts
        self._model.source.fill(None)
        for batch, step in self._steps():
            streams = self._block.attend(self._read(batch), step)
            self._write(batch, streams)
            _, x, _, _ = self._block.enter_experts(streams)
            between.inputs.write(batch.first, x)
            rows = slice(batch.first, batch.first + len(batch.ids))
            between.ids[rows], between.weights[rows] = moe.choose(x, step)
        for group in groups:
            self._serve(group, between)
        k = self._config.num_experts_per_tok
        for batch in self._batches:
            streams, count = self._read(batch), len(batch.ids)
            _, x, post, comb = self._block.enter_experts(streams)
            outputs = between.outputs.read(k * batch.first, k * count).reshape(count, k, -1)
            weights = between.weights[batch.first : batch.first + count]
            _, out = moe.join(x, outputs, weights)
            self._write(batch, expand(streams, out, post, comb))
            self._advance(count)

    def _serve(self, group: Sequence[int], between: _Between) -> None:
        """Compute a group of experts for all tokens that chose one of them."""
        experts = self._model.experts(self._layer, group)
        self._model.source.fill(None)
        limit, k = self._config.swiglu_limit, self._config.num_experts_per_tok
        flat = between.ids.ravel()
        for number, expert in experts.items():
            chosen = np.flatnonzero(flat == number)
            for at in range(0, len(chosen), BATCH_TOKENS):
                places = chosen[at : at + BATCH_TOKENS]
                x = between.inputs.gather(places // k)
                ids = np.full((len(places), 1), number)
                weights = between.weights.reshape(-1, 1)[places]
                self._collector(self._layer, ids, weights, x, {number: expert})
                out = self._model.backend.experts(x, ids, {number: expert}, limit)
                between.outputs.scatter(places, out)

    def _steps(self) -> Iterator[tuple[_Batch, Step]]:
        """Each batch with the step that takes it on; a window begins with empty caches."""
        config, layer = self._config, self._layer
        ratio = config.compress_ratios[layer]
        frequencies = {ratio: layer_frequencies(config, layer)}
        caches: list[LayerCache] = []
        for batch in self._batches:
            if not batch.position:  # a step finds its layer's cache by number
                caches = [LayerCache(config, layer, BATCH_TOKENS, None)] * (layer + 1)
            span = Span(slice(0, len(batch.ids)), batch.position, caches)
            yield batch, Step.of(batch.ids, [span], frequencies, observer=self._collector)

    def _read(self, batch: _Batch) -> F32:
        rows = self._streams.read(batch.first, len(batch.ids))
        return rows.reshape(len(rows), self._config.hc_mult, -1)

    def _write(self, batch: _Batch, streams: F32) -> None:
        self._streams.write(batch.first, streams)


def _batches(windows: Sequence[npt.NDArray[np.integer[Any]]]) -> Iterator[_Batch]:
    first = 0
    for window in windows:
        for position in range(0, len(window), BATCH_TOKENS):
            ids = window[position : position + BATCH_TOKENS].astype(np.int64)
            yield _Batch(first, position, ids)
            first += len(ids)


def _groups(records: Sequence[Record], most_bytes: int) -> list[list[int]]:
    """The experts of a layer, cut into runs of at most ``most_bytes``, each of one at least."""
    groups: list[list[int]] = [[]]
    held = 0
    for record in records:
        if groups[-1] and held + record.nbytes > most_bytes:
            groups.append([])
            held = 0
        groups[-1].append(record.key.expert)
        held += record.nbytes
    return groups


def _dense_bytes(reader: Reader, expert_bytes: Sequence[int]) -> list[int]:
    """Bytes of each layer without its routed experts."""
    by_layer = [-nbytes for nbytes in expert_bytes]
    for name, entry in reader.tensors.items():
        kind, number, *_ = [*name.split("."), ""]
        if kind == "layers" and number.isdecimal() and int(number) < len(by_layer):
            by_layer[int(number)] += entry.nbytes
    return by_layer


def _own_bytes(config: ModelConfig, tokens: int) -> int:
    """Bytes of activations, of the statistics and of the routers' choices."""
    widths = config.hidden_size + config.moe_intermediate_size
    means = 4 * config.num_hidden_layers * config.n_routed_experts * widths
    sums = 8 * config.n_routed_experts * widths
    routes = 12 * tokens * config.num_experts_per_tok
    return working_bytes(config, BATCH_TOKENS) + means + sums + routes
