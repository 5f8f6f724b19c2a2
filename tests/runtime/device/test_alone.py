"""One layer on the device: the bits of a whole model there, the CPU's values, and its memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds4q.artifact.hfq import Reader
from ds4q.hipkern.errors import DeviceMemoryError
from ds4q.hipkern.sim.control import Control
from ds4q.quantize.imatrix import LayerStatistics
from ds4q.runtime import layerwise
from ds4q.runtime.backend.hip import HipBackend
from ds4q.runtime.config import checked_config
from ds4q.runtime.device.alone import LayerAlone
from ds4q.runtime.device.engine import HipEngine
from ds4q.runtime.digests import Digests
from ds4q.runtime.errors import DigestError
from ds4q.runtime.layerwise import observe_layers
from tests.checks import check_refused, same_bits
from tests.quantize.damage import flip
from tests.runtime import upstream
from tests.runtime.artifacts import put_receipt
from tests.runtime.device.conftest import Load

IDS = np.random.default_rng(5).integers(96, size=70)
WINDOWS = [IDS[:40], IDS[40:41], IDS[41:]]
PARTS = ("gain", "gate_up", "down")


@pytest.fixture
def backend(sim: Control) -> Iterator[HipBackend]:
    with HipBackend.open() as opened:
        yield opened


def observed(path: Path, backend: HipBackend | None, threads: int = 1) -> list[LayerStatistics]:
    with Reader(path) as reader:
        return observe_layers(
            reader,
            checked_config(reader),
            WINDOWS,
            expert_bytes=1 << 40,
            threads=threads,
            backend=backend,
        )


def test_streams_are_those_of_a_whole_model(
    micro_path: Path, backend: HipBackend, load: Load
) -> None:
    """Both layers, in two batches, against what a model on the device shows."""
    seen: dict[str, list[Any]] = {}
    engine: HipEngine = load(micro_path, batch_tokens=24)
    state = engine.new_state()
    engine.forward(
        state, IDS[:40], "all", trace=lambda name, a: seen.setdefault(name, []).append(a)
    )
    with Reader(micro_path) as reader:
        config = checked_config(reader)
        model = layerwise._Model(reader, config, 1, None)
        embedding = layerwise.Embedding(model.parts)
        model.source.fill(None)
        streams = [embedding.forward(IDS[:24]), embedding.forward(IDS[24:40])]
        for layer in range(2):
            with LayerAlone(
                backend, reader, config, layer, batch_tokens=24, context_tokens=40
            ) as alone:
                first = alone.forward(streams[0], IDS[:24], 0)
                second = alone.forward(streams[1], IDS[24:40], 24)
                again = alone.forward(streams[0], IDS[:24], 0)  # another sequence
            for number, passed in enumerate((first, second)):
                shown = seen[f"l{layer}.streams"][number]  # the head shows those of its tokens
                assert len(shown) >= 16
                same_bits(passed.streams[: len(shown)], shown)
                same_bits(passed.weights, seen[f"l{layer}.route_w"][number])
                assert passed.ids.tolist() == seen[f"l{layer}.route_idx"][number].tolist()
            same_bits(again.streams, first.streams)
            streams = [first.streams, second.streams]


def test_statistics_are_the_cpus_but_for_rounding(micro_path: Path, backend: HipBackend) -> None:
    found, expected = observed(micro_path, backend), observed(micro_path, None)
    assert len(found) == 2
    for a, b in zip(found, expected, strict=True):
        assert a.tokens.tolist() == b.tokens.tolist()
        for name in PARTS:
            values, wanted = getattr(a, name), getattr(b, name)
            np.testing.assert_allclose(values, wanted, rtol=1e-4, atol=1e-4 * wanted.max())


def test_they_depend_neither_on_the_batch_nor_on_threads(
    micro_path: Path, backend: HipBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = observed(micro_path, backend)
    monkeypatch.setattr(layerwise, "BATCH_TOKENS", 7)
    for a, b in zip(observed(micro_path, backend, threads=2), found, strict=True):
        for name in PARTS:
            same_bits(getattr(a, name), getattr(b, name))


def test_memory_holds_one_layer_and_is_given_back(
    micro_path: Path, backend: HipBackend, sim: Control
) -> None:
    free = backend.device.free_bytes()
    observed(micro_path, backend)
    assert backend.device.free_bytes() == free


def test_a_device_without_room_is_refused_before_reading(
    micro_path: Path, backend: HipBackend, sim: Control
) -> None:
    device = backend.device
    sim.set(memory_bytes=device.total_bytes - device.free_bytes() + 1000)
    free = device.free_bytes()
    check_refused(
        DeviceMemoryError,
        lambda: observed(micro_path, backend),
        says=["leave out --device hip"],
    )
    assert device.free_bytes() == free


def test_damage_is_seen(micro_path: Path, backend: HipBackend, tmp_path: Path) -> None:
    path = tmp_path / "m.hfq"
    path.write_bytes(micro_path.read_bytes())
    put_receipt(path)
    name = "layers.1.ffn.experts.3.w2.weight"
    with Reader(path) as reader:
        offset = reader.entry(name).offset
    flip(path, offset)
    free = backend.device.free_bytes()
    with Reader(path) as reader:
        config, digests = checked_config(reader), Digests.of(reader, [])
        sizes = {"batch_tokens": 8, "context_tokens": 8}
        with LayerAlone(backend, reader, config, 0, digests=digests, **sizes):
            pass
        check_refused(
            DigestError,
            lambda: LayerAlone(backend, reader, config, 1, digests=digests, **sizes),
            path=path,
            says=[name],
        )
    assert backend.device.free_bytes() == free


@pytest.fixture(scope="module")
def rotated_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose experts multiply rotated rows; the kernels rotate the hidden ones in place."""
    path = tmp_path_factory.mktemp("rotated") / "m.hfq"
    return upstream.write_trunk(path, upstream.packed())


def test_hidden_values_are_taken_before_they_are_rotated(
    rotated_path: Path, backend: HipBackend
) -> None:
    with Reader(rotated_path) as reader:
        config = checked_config(reader)
        ids = IDS[:12]
        found, expected = (
            observe_layers(reader, config, [ids], expert_bytes=1 << 40, threads=2, backend=where)[0]
            for where in (backend, None)
        )
    assert found.tokens.tolist() == expected.tokens.tolist()
    np.testing.assert_allclose(
        found.down, expected.down, rtol=1e-4, atol=1e-4 * expected.down.max()
    )
