"""Both ends of the model: embedding rows of every type, and the head against the trace."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ds4q.artifact.formats import codec_for
from tests.runtime.artifacts import DATA, pack
from tests.runtime.model.conftest import Operators, Trace


def test_embedding_copies_rows_to_all_streams(
    operators: Operators, prompt: npt.NDArray[np.int64]
) -> None:
    kind, shape, payload = pack(DATA / "ds4-random")["embed.weight"]
    rows = codec_for(kind.id).decode(payload, shape)
    streams = operators.embedding.forward(prompt[:9])
    assert streams.shape == (9, 4, 256)
    assert streams.dtype == np.float32
    for k in range(4):
        assert np.array_equal(streams[:, k], rows[prompt[:9]])


def test_trace_of_the_head(path: str, operators: Operators, trace: Trace) -> None:
    seen: dict[str, Any] = {}
    logits = operators.head.forward(trace["l5.streams_tail"], seen.__setitem__)
    assert np.abs(seen["hc_head_out"] - trace["hc_head_out"][-32:]).max() < 2e-4
    assert np.abs(seen["final_norm"] - trace["final_norm"][-32:]).max() < 2e-4
    expected = np.load(DATA / "ds4-random" / "logits.npy")[-32:]
    assert np.abs(logits - expected).max() == pytest.approx(0, abs=2e-3)
