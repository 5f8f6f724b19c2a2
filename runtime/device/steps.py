"""Owns queueing a step on a device: its block, its launches, by graph or one by one, paged or not.

A step is tokens of one or several sequences that go through the layers together. Knows no artifact,
and neither checks ids nor moves a position.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from ds4q.hipkern.streams import Graph
from ds4q.runtime.backend.hip import HipBackend, Launch
from ds4q.runtime.device.block import Run, StepBlock
from ds4q.runtime.device.paging import DevicePaging, Step
from ds4q.runtime.device.program import Program
from ds4q.runtime.device.scratch import HEAD_TOKENS
from ds4q.runtime.device.state import DeviceState
from ds4q.runtime.experts.store import Phase
from ds4q.runtime.model.parts import Trace

I64 = npt.NDArray[np.int64]
Part = tuple[DeviceState, I64]  # a sequence and what it gets: ids [T]


class Steps:
    """Queues the steps of a model.

    Parameters
    ----------
    blocks : of which the first that holds a step's tokens is used
    context : most tokens of a sequence
    replay : run steps of one token a sequence as a graph; else by the same launches, one by one
    paging : of the routed experts; None: all of them are on the device

    Attributes
    ----------
    graphs : of steps of one token a sequence, by sequences: one graph, or where experts are paged
        one up to each router, and the end
    """

    def __init__(
        self,
        backend: HipBackend,
        program: Program,
        blocks: Sequence[StepBlock],
        *,
        context: int,
        replay: bool,
        paging: DevicePaging | None = None,
    ) -> None:
        self._backend = backend
        self._program = program
        self._blocks = sorted(blocks, key=lambda block: block.tokens)
        self._context = context
        self._replay = replay
        self._paging = paging
        self.graphs: dict[int, list[Graph]] = {}

    def queue(self, parts: Sequence[Part], phase: Phase, number: int, trace: Trace | None) -> bool:
        """Queue one step through all layers; whether the logits of every token are queued, too.

        They are, and the id of the largest where there is one, in a step of one token a sequence.

        Parameters
        ----------
        number : that records tell the step's sequence by
        trace : called with names and arrays of intermediate values
        """
        runs = [Run(state.position, len(ids)) for state, ids in parts]
        for (state, _), run in zip(parts, runs, strict=True):
            state.reserve(run.first + run.tokens)
        ids = parts[0][1] if len(parts) == 1 else np.concatenate([own for _, own in parts])
        block = self._block(len(ids))
        block.send(self._backend.stream, runs, ids, [state.table for state, _ in parts])
        single = _is_single(runs)
        end = self._context if single else max(run.first + run.tokens for run in runs)
        if self._paging is not None:
            first = runs[0].first if len(runs) == 1 else 0
            self._page(self._paging, Step(ids, phase, number, first), block, end, single, trace)
        elif single and self._replay and trace is None:
            self._graphs(block, len(ids))[0].launch(self._backend.stream)
        else:
            self._run(self._program.body(block, len(ids), end, traced=trace is not None), trace)
            if single:
                self.queue_head(0, len(ids), trace)
        if single:
            block.foresee([Run(run.first + 1, 1) for run in runs])
        return single

    def queue_head(self, first: int, tokens: int, trace: Trace | None = None) -> None:
        """Queue the logits of ``tokens`` tokens of a step; of one alone also the best id."""
        self._run(self._program.head(first, tokens, traced=trace is not None), trace)

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

    def _page(
        self,
        paging: DevicePaging,
        step: Step,
        block: StepBlock,
        end: int,
        single: bool,
        trace: Trace | None,
    ) -> None:
        """Queue a step layer by layer: what follows a router waits for its experts."""
        paging.begin(step)
        program, traced, tokens = self._program, trace is not None, len(step.ids)
        if single and self._replay and not traced:
            *segments, last = self._graphs(block, tokens)
            for number, segment in enumerate(segments):
                segment.launch(self._backend.stream)
                paging.serve(number, step)
            last.launch(self._backend.stream)
            return
        for number, layer in enumerate(program.layers):
            self._run(program.until_route(block, number, tokens, end, traced=traced), trace)
            paging.serve(number, step)
            if traced:
                self._run([layer.sums(tokens)], trace)
        if single:
            self.queue_head(0, tokens, trace)

    def _graphs(self, block: StepBlock, tokens: int) -> list[Graph]:
        """What a step of ``tokens`` sequences, one token each, replays."""
        if tokens not in self.graphs:
            program, end = self._program, list(self._program.head(0, tokens))
            if self._paging is None:
                parts = [[*program.body(block, tokens, self._context), *end]]
            else:
                parts = [
                    list(program.until_route(block, number, tokens, self._context))
                    for number in range(len(program.layers))
                ] + [end]
            self.graphs[tokens] = [self._backend.capture(part) for part in parts]
        return self.graphs[tokens]

    def _block(self, tokens: int) -> StepBlock:
        return next(block for block in self._blocks if block.tokens >= tokens)


def block_sizes(batch: int) -> list[int]:
    """Tokens of the blocks of a model whose steps have ``batch`` tokens at most."""
    return sorted({1, min(HEAD_TOKENS, batch), batch})


def _is_single(runs: Sequence[Run]) -> bool:
    """Whether each sequence gets one token, and all logits can be held together."""
    return len(runs) <= HEAD_TOKENS and all(run.tokens == 1 for run in runs)
