"""Experts' way from a file into slots on a device."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import xxhash

from ds4q.artifact.hfq import Reader
from ds4q.hipkern.driver import Device
from ds4q.hipkern.sim.control import Control
from ds4q.runtime.config import checked_config
from ds4q.runtime.device.pools import ExpertPools
from ds4q.runtime.device.transport import DeviceTransport
from ds4q.runtime.digests import Digests
from ds4q.runtime.errors import DigestError, ExpertReadError, TransportClosedError
from ds4q.runtime.experts.catalogue import Catalogue, Key
from ds4q.runtime.experts.reading import ExpertReader, Fill, Purpose
from ds4q.runtime.source import Tensors
from tests.runtime.device.micro import CONFIG
from tests.runtime.experts.test_transport import Hang

LAYERS, EXPERTS = CONFIG["num_hidden_layers"], CONFIG["n_routed_experts"]
SLOTS = 3


class Rig:
    """A transport of the micro model's experts, with what it fills."""

    def __init__(self, path: Path, device: Device, wrong: str | None = None) -> None:
        """Of the tensor ``wrong``, if there is to be one, the receipt tells another digest."""
        self.device, self.path = device, path
        with Reader(path) as reader:
            self.catalogue = Catalogue(checked_config(reader), Tensors(reader), path=path)
            told = {n: xxhash.xxh3_128(reader.read(n).data).digest() for n in reader.tensors}
            told |= {} if wrong is None else {wrong: bytes(16)}
            digests = Digests(lambda: told, path, [])
            files = ExpertReader(reader, self.catalogue, digests=digests)
        self.pools = ExpertPools(self.catalogue.geometry)
        self.pools.size([SLOTS] * LAYERS)
        for layout in self.pools.layouts:
            layout.allocate(device)
        self.transport = DeviceTransport(self.catalogue, files, self.pools, device, threads=2)

    def fill(self, fills: Sequence[Fill]) -> dict[Fill, BaseException | None]:
        """What became of ``fills``, once all are done."""
        found: dict[Fill, BaseException | None] = {}
        over = threading.Event()

        def done(fill: Fill, error: BaseException | None) -> None:
            found[fill] = error
            if len(found) == len(fills):
                over.set()

        self.transport.start(fills, done)
        assert over.wait(300)
        return found

    def holds(self, fill: Fill) -> bool:
        """Whether a slot has exactly the expert's bytes."""
        stream, record = self.device.stream(), self.catalogue[fill.key]
        same = []
        with self.path.open("rb") as file:
            for entry, address in zip(
                record.entries, self.pools.addresses(fill.key.layer, fill.slot), strict=True
            ):
                found = np.empty(entry.nbytes, np.uint8)
                stream.download(found, address)
                file.seek(entry.offset)
                same.append(found.tobytes() == file.read(entry.nbytes))
        return all(same)


@pytest.fixture
def rig(sim: Control, micro_path: Path) -> Iterator[Rig]:
    before = sim.live()
    with Device.open() as device:
        rig = Rig(micro_path, device)
        yield rig
        rig.transport.close()
    assert sim.live() == before


def fills_of(seed: int) -> list[Fill]:
    """Every slot of every layer, in random order."""
    random = np.random.default_rng(seed)
    fills = []
    for layer in range(LAYERS):
        for slot, expert in enumerate(random.permutation(EXPERTS)[:SLOTS]):
            fills.append(Fill(Key(layer, int(expert)), slot, Purpose.DEMAND))
    return [fills[i] for i in random.permutation(len(fills))]


@pytest.mark.parametrize("delay_us", [0, 3000])
def test_slots_get_exactly_their_experts_bytes(sim: Control, rig: Rig, delay_us: int) -> None:
    copies = sim.get("pageable_copies")
    nbytes = 0
    for seed in range(3):  # two buffers of staging, and many experts
        fills = fills_of(seed)
        sim.set(delay_us=delay_us, delay_seed=seed)
        assert set(rig.fill(fills).values()) == {None}
        sim.set(delay_us=0)
        assert sim.get("pageable_copies") == copies
        assert all(rig.holds(fill) for fill in fills)
        copies = sim.get("pageable_copies")
        nbytes += sum(rig.catalogue[fill.key].nbytes for fill in fills)
    counts = rig.transport.counters()
    assert counts["bytes_copied"] == counts["bytes_read"] == nbytes
    assert counts["copies"] == 3 * SLOTS * LAYERS


def test_a_copy_that_fails_is_its_fills_error_alone(sim: Control, rig: Rig) -> None:
    fills = fills_of(4)
    sim.set(fail="hipMemcpyAsync:5:1")
    found = rig.fill(fills)
    sim.set(fail="")
    failed = [fill for fill, error in found.items() if error is not None]
    assert len(failed) == 1
    assert all(rig.holds(fill) for fill in fills if fill not in failed)
    assert rig.fill(failed) == {failed[0]: None}
    assert rig.holds(failed[0])


def test_a_closed_transport_takes_nothing(rig: Rig) -> None:
    rig.transport.close()
    with pytest.raises(TransportClosedError):
        rig.transport.start(fills_of(5), lambda fill, error: None)


def test_what_a_read_that_hangs_reads_into_outlives_the_device(
    sim: Control, micro_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, before = set(threading.enumerate()), sim.live()
    with Device.open() as device:
        rig = Rig(micro_path, device)
        hang = Hang(monkeypatch)
        found: list[BaseException | None] = []
        rig.transport.start(fills_of(6)[:1], lambda fill, error: found.append(error))
        assert hang.entered.acquire(timeout=300)
        rig.transport.close()
        assert [type(error) for error in found] == [ExpertReadError]
        pinned = sim.live()["pinned"]
    kept = {"pinned": pinned}
    assert sim.live() == before | kept  # all else is freed
    hang.let_go(threads)
    assert len(found) == 1
    assert any(lane._staging.array.any() for lane in rig.transport._lanes)
    assert sim.live() == before | kept
    for lane in rig.transport._lanes:  # which nobody else does any more
        rig.device.library.hip.hipHostFree(lane._staging.address)


def test_an_expert_that_is_not_the_receipts_is_refused_and_the_others_come(
    sim: Control, micro_path: Path
) -> None:
    before = sim.live()
    with Device.open() as device:
        rig = Rig(micro_path, device, "layers.0.ffn.experts.1.w3.weight")
        sim.set(delay_us=2000)  # the copy is under way when the digest turns out to differ
        fills = [Fill(Key(0, expert), expert, Purpose.DEMAND) for expert in range(SLOTS)]
        found = rig.fill(fills)
        sim.set(delay_us=0)
        assert [type(found[fill]) for fill in fills] == [
            type(None), DigestError, type(None)
        ]  # fmt: skip
        assert "layers.0.ffn.experts.1.w3" in str(found[fills[1]])
        assert rig.holds(fills[0])
        assert rig.holds(fills[2])
        counts = rig.transport.counters()
        assert (counts["copies"], counts["reads"], counts["reads_checked"]) == (2, 3, 2)
        rig.transport.close()
    assert sim.live() == before
