"""The neutrality gate over real paging: green as it is, red for each way that it could be wrong."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds4q.hipkern.sim.control import Control
from ds4q.runtime.backend.weights import Expert
from ds4q.runtime.errors import ExpertReadError
from ds4q.runtime.experts.catalogue import Record
from ds4q.runtime.experts.paged import PagedExperts
from ds4q.runtime.experts.reading import Done, ExpertReader, Fill
from ds4q.runtime.experts.slots import LayerSlots
from ds4q.runtime.experts.transport import HostTransport
from ds4q.runtime.gates import Neutrality
from tests.runtime.gates.tiny import Measure

TOKENS = 12
Mutant = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture
def gate(tmp_path: Path) -> Neutrality:
    """Two short prompts: one that is one band a layer, one that is several."""
    return Neutrality(prompts=written(tmp_path / "prompts.jsonl", 1, 40), tokens=TOKENS)


def written(path: Path, *lengths: int) -> Path:
    """A file of prompts of so many tokens each."""
    draws = np.random.default_rng(5)
    lines = (json.dumps({"ids": draws.integers(512, size=length).tolist()}) for length in lengths)
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_paging_changes_nothing(gate: Neutrality, lossless: Path, measure: Measure) -> None:
    check = measure(gate, lossless)
    assert check.ok, check.lines()
    assert check.figures["equal"] == check.figures["of"] == 2 * 2 * TOKENS
    fits, thrashes = (check.figures["arms"][name] for name in ("fits", "thrashes"))
    assert fits["evictions"] == 0 < thrashes["evictions"]
    assert (fits["slots"], thrashes["slots"]) == (16, 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "tokens"), [("auto", 192), ("lru", 32), ("lfu", 32), ("slru", 32)]
)
def test_paging_changes_nothing_on_the_simulated_device(
    policy: str, tokens: int, tmp_path: Path, lossless: Path, measure: Measure, sim: Control
) -> None:
    prompts = written(tmp_path / "prompts.jsonl", 30)
    gate = Neutrality(prompts=prompts, tokens=tokens, policies=(policy,))
    check = measure(gate, lossless, device="hip")
    assert check.ok, check.lines()
    assert check.figures["equal"] == check.figures["of"] == 2 * tokens
    assert check.figures["arms"][f"thrashes ({policy})"]["evictions"] > 0


# ---------------------------------------------------------------- mutants


def stale_pointer(patch: pytest.MonkeyPatch) -> None:
    """An expert that comes back is looked for where it was before."""
    honest = PagedExperts._expert

    def stale(self: PagedExperts, layer: int, expert: int, slot: int) -> Expert:
        held = self._made[layer].get(expert)
        return honest(self, layer, expert, slot) if held is None else held[1]

    patch.setattr(PagedExperts, "_expert", stale)


def resident_before_the_read(patch: pytest.MonkeyPatch) -> None:
    """An expert that takes another's slot is given out at once, and read when others are."""
    honest = HostTransport.start
    late: list[Fill] = []
    used: set[tuple[HostTransport, int, int]] = set()

    def early(self: HostTransport, fills: Sequence[Fill], done: Done) -> None:
        honest(self, late[:], lambda fill, error: None)
        late[:] = [fill for fill in fills if (self, fill.key.layer, fill.slot) in used]
        used.update((self, fill.key.layer, fill.slot) for fill in fills)
        honest(self, [fill for fill in fills if fill not in late], done)
        for fill in late:
            done(fill, None)

    patch.setattr(HostTransport, "start", early)


def evicted_lease(patch: pytest.MonkeyPatch) -> None:
    """In place of the victim's slot, one that is in use is taken."""
    honest = LayerSlots._evict

    def evict(self: LayerSlots) -> None:
        honest(self)
        leased = next((entry for entry in self._residents.values() if entry.pins), None)
        if leased is not None:
            self._free[-1] = leased.slot

    patch.setattr(LayerSlots, "_evict", evict)


def slot_of_a_neighbour(patch: pytest.MonkeyPatch) -> None:
    """One read of many goes to another slot."""
    honest, calls = HostTransport.start, itertools.count()

    def astray(self: HostTransport, fills: Sequence[Fill], done: Done) -> None:
        if next(calls) % 20 == 19 and len(fills) > 1:
            a, b, *rest = fills
            fills = [a._replace(slot=b.slot), b._replace(slot=a.slot), *rest]
        honest(self, fills, done)

    patch.setattr(HostTransport, "start", astray)


@pytest.mark.parametrize(
    "mutant", [stale_pointer, resident_before_the_read, evicted_lease, slot_of_a_neighbour]
)
def test_paging_that_is_wrong_is_red(
    mutant: Mutant,
    gate: Neutrality,
    lossless: Path,
    measure: Measure,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mutant(monkeypatch)
    check = measure(gate, lossless)
    assert not check.ok
    assert any("than with all experts in memory" in line for line in check.lines())
    assert all(failure.layer is not None for failure in check.failures)


# ---------------------------------------------------------------- reads that fail


@pytest.mark.parametrize(
    ("layer", "number", "ahead"),
    [(2, 3, False), (3, 40, False), (0, 0, True)],
    ids=["first prompt", "in mid-run", "read ahead of its use"],
)
def test_a_read_that_fails_never_changes_a_token(
    layer: int,
    number: int,
    ahead: bool,
    gate: Neutrality,
    lossless: Path,
    measure: Measure,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A demand that fails ends the run; what a hash layer reads ahead may be asked for again."""
    honest, calls = ExpertReader.read, itertools.count()

    def read(self: ExpertReader, record: Record, *views: Any) -> None:
        if record.key.layer == layer and next(calls) == number:
            raise ExpertReadError(tensor=record.gate.name, found="Input/output error")
        honest(self, record, *views)

    monkeypatch.setattr(ExpertReader, "read", read)
    check = measure(gate, lossless)
    assert next(calls) > number
    if check.ok:
        assert ahead
        assert check.figures["equal"] == check.figures["of"]
    else:
        (failure,) = check.failures
        assert failure.found == "Input/output error"
        assert f"layers.{layer}.ffn.experts." in failure.line()
