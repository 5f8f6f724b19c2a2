"""Owns one layer of an artifact on a device, without the rest of the model.

The caller keeps the streams and what comes of them: calibration takes all tokens through a layer
before the next is loaded. Kernels and launches are those of a whole model.

T tokens, K experts per token, n streams, d hidden size, w width of an expert.
"""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from ds4q.artifact.hfq import Reader
from ds4q.runtime.backend.hip import HipBackend
from ds4q.runtime.config import ModelConfig
from ds4q.runtime.device.block import Run, StepBlock
from ds4q.runtime.device.layer import LayerProgram
from ds4q.runtime.device.layout import Layout, Place
from ds4q.runtime.device.model import plan_layer
from ds4q.runtime.device.room import Asked, allocate, check_room
from ds4q.runtime.device.scratch import Scratch
from ds4q.runtime.device.state import Caches, DeviceState
from ds4q.runtime.device.weights import DeviceSource
from ds4q.runtime.digests import Digests
from ds4q.runtime.model.rope import layer_frequencies

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]

REMEDY = "free the device's memory, or leave out --device hip"


class Passed(NamedTuple):
    """What came of a batch in a layer.

    Attributes
    ----------
    streams : f32 [T, n, d], behind the layer
    inputs : f32 [T, d], of the routed experts
    ids, weights : int64 and f32 [T, K], what the router chose
    hidden : f32 [T, K, w], the inputs of the chosen experts' down projections
    """

    streams: F32
    inputs: F32
    ids: I64
    weights: F32
    hidden: F32


class LayerAlone:
    """A layer's weights on a device, and the rows of one sequence; use it as a context.

    Parameters
    ----------
    backend : an open device; it stays open
    layer : number of the layer
    batch_tokens, context_tokens : most tokens of a batch, and of a sequence
    digests : what every tensor that is read is compared with

    Raises
    ------
    ArtifactError, RunError : the layer cannot be run, or differs from its receipt
    DeviceMemoryError : it does not fit on the device
    """

    def __init__(
        self,
        backend: HipBackend,
        reader: Reader,
        config: ModelConfig,
        layer: int,
        *,
        batch_tokens: int,
        context_tokens: int,
        digests: Digests | None = None,
    ) -> None:
        self._config = c = config.shortened([layer])
        self._backend, device = backend, backend.device
        source, work = DeviceSource(reader, digests), Layout()
        self._scratch = Scratch(work, c, batch_tokens, context_tokens)
        weights = plan_layer(c, source, reader.path)
        frequencies = {weights.ratio: layer_frequencies(c, 0)}
        self._block = StepBlock(device, work, c, frequencies, batch_tokens)
        self._program = LayerProgram(c, weights, 0, source, self._scratch, "f32")
        caches = Caches(c, batch_tokens, context_tokens, sized=True)
        layouts = [*source.layouts, work]
        asked = Asked(c, source.tensors, None, reader.path, REMEDY)
        check_room(device, layouts, caches.first_bytes, asked)
        with ExitStack() as stack:
            for layout in layouts:
                stack.callback(layout.free)
            allocate(device, layouts, asked)
            self._state = stack.enter_context(DeviceState(backend, caches))
            staging = source.fill(device, backend.copies, None)
            backend.copies.synchronize()
            staging.free()
            self._held = stack.pop_all()

    def forward(self, streams: F32, ids: I64, position: int) -> Passed:
        """Take token ids [T] with ``streams`` [T, n, d] through the layer.

        They stand at ``position`` of a sequence, behind the tokens of the calls before; 0 begins
        another one.
        """
        s, tokens = self._scratch, len(ids)
        stream, run = self._backend.stream, self._backend.run
        self._block.send(stream, [Run(position, tokens)], ids, [self._state.table])
        stream.upload(s.streams.address, np.ascontiguousarray(streams))
        run(self._program.until_route(self._block, tokens, position + tokens, None, traced=False))
        c, hidden = self._config, np.empty(0, np.float32)
        for launch in self._program.experts(s.experts, tokens, shared=True):
            run([launch])
            if launch.kernel == "moe_gate_up":  # before they are rotated in place
                slots = c.num_experts_per_tok + 1
                hidden = self._values(s.hidden, (tokens, slots, c.moe_intermediate_size))[:, :-1]
        run([self._program.mixed(tokens)])
        chosen = tokens, c.num_experts_per_tok
        found = Passed(
            self._values(s.streams, (tokens, c.hc_mult, c.hidden_size)),
            self._values(s.normed, (tokens, c.hidden_size)),
            self._values(s.experts, chosen, "i4").astype(np.int64),
            self._values(s.weights, chosen),
            hidden,
        )
        stream.synchronize()
        return found

    def _values(self, place: Place, shape: tuple[int, ...], dtype: str = "f4") -> npt.NDArray[Any]:
        values: npt.NDArray[Any] = np.empty(shape, dtype)
        self._backend.stream.download(values, place.address)
        return values

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Free the device's memory."""
        self._held.close()
