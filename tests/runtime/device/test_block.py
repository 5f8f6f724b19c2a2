"""The step block: what kernels find at its fixed places."""

from __future__ import annotations

import numpy as np
import pytest

from ds4q.hipkern.sim.control import Control
from ds4q.runtime.backend.hip import HipBackend
from ds4q.runtime.config import parse_config
from ds4q.runtime.device.block import STEP, StepBlock
from ds4q.runtime.device.layout import Layout
from ds4q.runtime.device.state import LAYER_STATE
from ds4q.runtime.model.parts import Places
from ds4q.runtime.model.rope import layer_frequencies
from tests.runtime.device.micro import CONFIG

MODEL = parse_config(CONFIG | {"compress_ratios": [0, 4, 128], "num_hidden_layers": 3})
FREQUENCIES = {r: layer_frequencies(MODEL, n) for n, r in enumerate(MODEL.compress_ratios)}
TABLE = bytes(range(LAYER_STATE.size)) * 3


@pytest.mark.parametrize("foreseen", [False, True])
@pytest.mark.parametrize(("first", "tokens"), [(0, 1), (3, 1), (1_000_003, 1), (2, 7), (120, 9)])
def test_places_hold_the_step(sim: Control, first: int, tokens: int, foreseen: bool) -> None:
    with HipBackend.open() as backend:
        layout = Layout()
        block = StepBlock(backend.device, layout, MODEL, FREQUENCIES, 9)
        layout.allocate(backend.device)
        ids = np.arange(50, 50 + tokens)
        block.send(backend.stream, 77, ids[:1] + 1, bytes(len(TABLE)))  # something to overwrite
        if foreseen:
            block.foresee(first, tokens)
        block.send(backend.stream, first, ids, TABLE)

        def held(address: int, count: int, dtype: str) -> np.ndarray:
            found = np.empty(count, dtype)
            backend.stream.download(found, address)
            return found

        assert held(block.step, 2, "i4").tolist() == [first, tokens]
        assert held(block.ids, tokens, "i4").tolist() == ids.tolist()
        assert held(block.layer(0), len(TABLE), "u1").tobytes() == TABLE
        assert block.layer(2) - block.layer(0) == 2 * LAYER_STATE.size
        for ratio, frequencies in FREQUENCIES.items():
            wanted, at = Places.of(frequencies, ratio, first, tokens), block.turns(ratio)
            pairs = (
                (at.cos, wanted.cos),
                (at.sin, wanted.sin),
                (at.window_cos, wanted.window_cos),
                (at.window_sin, wanted.window_sin),
            )
            for address, values in pairs:
                assert address % 16 == 0
                assert np.array_equal(held(address, values.size, "f4"), values.reshape(-1))


def test_structs_have_the_kernels_sizes() -> None:
    assert (STEP.size, LAYER_STATE.size) == (16, 72)
