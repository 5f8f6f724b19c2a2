"""Owns recording what routers see and say into a trace. Changes nothing on the way."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ds4q.artifact.formats import codec_for
from ds4q.runtime.backend.weights import Weight
from ds4q.runtime.errors import TraceError
from ds4q.runtime.experts.trace import Phase, Recorder
from ds4q.runtime.model.moe import Router, scores

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]


class StateRecorder:
    """Writes the states of each layer that predicts one, or is predicted, as they come.

    What is written is at once out of memory; one batch's rows are the most that is held.

    Parameters
    ----------
    recorder : of the run; stays open
    routers : of all layers; those that choose by score are written now
    """

    def __init__(self, recorder: Recorder, routers: Sequence[Router]) -> None:
        self._recorder = recorder
        learned = [layer for layer, router in enumerate(routers) if router.bias is not None]
        self._first = max(learned[0] - 1, 0) if learned else len(routers)
        for layer in learned:
            bias = routers[layer].bias
            if bias is not None and layer > self._first:
                recorder.router(layer, decoded(routers[layer].gate), bias)
        self._batch = -1
        self._sequence = self._position = 0
        self._tokens: I64 = np.zeros(0, np.int64)
        self._phase: Phase = "prefill"

    def begin(self, sequence: int, position: int, ids: I64, phase: Phase) -> None:
        """A batch of token ids [T] begins at ``position`` of a sequence."""
        self._batch += 1
        self._sequence, self._position = sequence, position
        self._tokens, self._phase = ids, phase

    def see(self, layer: int, ids: I64, logits: F32, x: F32) -> None:
        """Write a layer's choice ``ids`` [T, K] from ``logits`` [T, E] of its input ``x`` [T, d].

        Raises
        ------
        TraceError : an input that float16 cannot hold
        """
        if layer < self._first:
            return
        if not float(abs(x).max()) <= float(np.finfo(np.float16).max):
            raise TraceError("a router's input is too large to record", found=f"layer {layer}")
        self._recorder.states(
            self._batch, self._sequence, self._phase, self._position, layer,
            self._tokens, ids, x, scores(logits),
        )  # fmt: skip


def decoded(weight: Weight) -> F32:
    """A matrix's values, [rows, cols]."""
    codec = codec_for(weight.type_id, weight.coding)
    return np.ascontiguousarray(codec.decode(weight.data, (weight.rows, weight.cols)), np.float32)
