"""The step block: what kernels find at its fixed places."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ds4q.hipkern.sim.control import Control
from ds4q.hipkern.streams import Stream
from ds4q.runtime.backend.hip import HipBackend
from ds4q.runtime.config import parse_config
from ds4q.runtime.device.block import TOKEN, Run, StepBlock
from ds4q.runtime.device.layout import Layout
from ds4q.runtime.device.state import LAYER_STATE
from ds4q.runtime.model.rope import layer_frequencies, tables
from tests.runtime.device.micro import CONFIG

MODEL = parse_config(CONFIG | {"compress_ratios": [0, 4, 128], "num_hidden_layers": 3})
FREQUENCIES = {r: layer_frequencies(MODEL, n) for n, r in enumerate(MODEL.compress_ratios)}
TABLES = [bytes([number]) * LAYER_STATE.size * 3 for number in range(9)]


@pytest.mark.parametrize("foreseen", [False, True])
@pytest.mark.parametrize(
    "runs",
    [
        [(0, 1)],
        [(3, 1)],
        [(1_000_003, 1)],
        [(2, 7)],
        [(120, 9)],
        [(3, 1), (127, 1), (0, 1)],
        [(2, 5), (1_000_000, 1), (126, 3)],
    ],
)
def test_places_hold_the_step(sim: Control, runs: list[tuple[int, int]], foreseen: bool) -> None:
    with HipBackend.open() as backend:
        layout = Layout()
        block = StepBlock(backend.device, layout, MODEL, FREQUENCIES, 9)
        layout.allocate(backend.device)
        tokens = sum(count for _, count in runs)
        ids, step = np.arange(50, 50 + tokens), [Run(*run) for run in runs]
        # Something to overwrite, of as many sequences as there may be.
        block.send(backend.stream, [Run(77, 1)] * 9, np.full(9, 7), TABLES[::-1])
        if foreseen:
            block.foresee(step)
        block.send(backend.stream, step, ids, TABLES[: len(step)])

        def held(address: int, count: int, dtype: str) -> np.ndarray:
            found = np.empty(count, dtype)
            backend.stream.download(found, address)
            return found

        assert held(block.ids, tokens, "i4").tolist() == ids.tolist()
        states = held(block.layer(0), len(step) * len(TABLES[0]), "u1").tobytes()
        assert states == b"".join(TABLES[: len(step)])
        assert block.layer(2) - block.layer(0) == 2 * LAYER_STATE.size
        row = 0
        for number, (first, count) in enumerate(runs):
            stand = held(block.stand(row), 4 * count, "i4").reshape(-1, 4).tolist()
            assert stand == [[first + t, row, 3 * number, 0] for t in range(count)]
            for ratio, frequencies in FREQUENCIES.items():
                at = block.turns(ratio)
                wanted = tables(frequencies, first, count)
                for address, values in zip((at.cos, at.sin), wanted, strict=True):
                    assert address % 16 == 0
                    found = held(address + row * values[0].nbytes, values.size, "f4")
                    assert np.array_equal(found, values.reshape(-1))
                for t in (t for t in range(count) if ratio and (first + t + 1) % ratio == 0):
                    begins = tables(frequencies, first + t + 1 - ratio, 1)
                    places = at.window_cos, at.window_sin
                    for address, values in zip(places, begins, strict=True):
                        found = held(address + (row + t) * values.nbytes, values.size, "f4")
                        assert np.array_equal(found, values[0])
            row += count


def test_a_step_copies_the_tables_of_its_own_sequences(
    sim: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    upload = Stream.upload

    def count(self: Stream, address: int, source: Any, nbytes: int | None = None) -> None:
        sent.append(source.nbytes if nbytes is None else nbytes)
        upload(self, address, source, nbytes)

    monkeypatch.setattr(Stream, "upload", count)
    with HipBackend.open() as backend:
        layout = Layout()
        block = StepBlock(backend.device, layout, MODEL, FREQUENCIES, 9)
        layout.allocate(backend.device)
        for sequences in (1, 2, 9):
            runs = [Run(5, 1)] * sequences
            block.send(backend.stream, runs, np.zeros(sequences, np.int64), TABLES[:sequences])
    assert [more - sent[0] for more in sent] == [0, len(TABLES[0]), 8 * len(TABLES[0])]


def test_structs_have_the_kernels_sizes() -> None:
    assert (TOKEN.size, LAYER_STATE.size) == (16, 72)
