"""Owns both ends of the model: token ids to streams, streams to logits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ds4q.artifact.formats import codec_for
from ds4q.runtime.model.hyper import head_collapse
from ds4q.runtime.model.parts import Parts, Trace

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]


class Embedding:
    """``embed.weight``: packed; only the rows of the given tokens are decoded."""

    def __init__(self, parts: Parts) -> None:
        c = parts.config
        self._weight = parts.source.matrix("embed.weight", c.vocab_size, c.hidden_size)
        self._rows = self._weight.data.reshape(c.vocab_size, -1)
        self._codec = codec_for(self._weight.type_id, self._weight.coding)
        self._streams = c.hc_mult

    def forward(self, ids: I64) -> F32:
        """Streams [T, n, d]: n equal copies of each token's row. ``ids`` are in range."""
        shape = (len(ids), self._weight.cols)
        rows = self._codec.decode(self._rows[ids].reshape(-1), shape)
        return np.repeat(rows[:, None], self._streams, axis=1)


class Head:
    """``hc_head_*``, ``norm.weight`` and ``head.weight``."""

    def __init__(self, parts: Parts) -> None:
        c, source = parts.config, parts.source
        self._config = c
        self._backend = parts.backend
        self._fn = source.matrix("hc_head_fn", c.hc_mult, c.hc_mult * c.hidden_size)
        self._base = source.values("hc_head_base", c.hc_mult)
        self._scale = source.values("hc_head_scale", 1)
        self._norm = source.values("norm.weight", c.hidden_size)
        self._weight = source.matrix("head.weight", c.vocab_size, c.hidden_size)

    def forward(self, streams: F32, trace: Trace | None) -> F32:
        """Logits [T, vocab] of the final streams [T, n, d]."""
        c = self._config
        mix = self._backend.linear(self._fn, streams.reshape(len(streams), -1))
        collapsed, normed = head_collapse(
            streams, mix, self._scale, self._base, self._norm, c.hc_eps, c.rms_norm_eps
        )
        if trace is not None:
            trace("hc_head_out", collapsed)
            trace("final_norm", normed)
        return self._backend.linear(self._weight, normed)
