"""Owns what paging of routed experts costs on a GPU, and what reading ahead can gain there.

    DS4Q_HIP=cuda python -m benchmarks.paging_gpu [--record] [--cold] [--slots S ...] [--tokens N]

A random model of a few layers of true Flash shapes is written to a temporary folder and run with
all experts on the device, with a slot for each, and with few slots. All must give the same greedy
ids, or nothing is reported. Then, a decode step at a time:

- copies to the device, from pinned and from pageable memory;
- what the host waits for a router's choice: on an idle device, behind the work of a layer, and in
  steps that read nothing;
- the share of reads and copies that is hidden: 1 - (step - step without a read) / time in which at
  least one read or copy was under way (below 0: reads cost more than their own time);
- reading ahead: none, the certain experts of hash layers, an adapter's guesses, an oracle's (the
  true next experts: no predictor gains more; under 5 % the question is closed).

Reads come from wherever TMPDIR is: from /dev/shm at the speed of memory, from a disk with --cold at
the disk's. The routing of random weights is close to uniform, so hit rates say nothing of a trained
model's.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import flash_model
from benchmarks.harness import Recorder, Times
from benchmarks.paging_reads import digests_of
from ds4q.artifact.hfq import Reader
from ds4q.hipkern.driver import Device
from ds4q.hipkern.streams import TO_DEVICE
from ds4q.runtime import digests
from ds4q.runtime.config import checked_config
from ds4q.runtime.device import transport
from ds4q.runtime.device.engine import HipEngine
from ds4q.runtime.device.paging import DevicePaging
from ds4q.runtime.experts.adapter import NORMALISATION, STATE, TARGET, About, Adapter
from ds4q.runtime.experts.fit import RANK, RIDGE, Pair, Sums
from ds4q.runtime.experts.options import CacheOptions
from ds4q.runtime.experts.predict import AdapterGuess, Guess, Oracle, Prefetcher
from ds4q.runtime.experts.trace import StatesRecord, artifact_identity, read_trace
from ds4q.runtime.gates.pagecache import drop
from ds4q.runtime.model.moe import scores
from ds4q.runtime.source import Tensors

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]

RATIOS = (4, 128, 4, 128)
HASH_LAYERS = 1
Prepare = Callable[[HipEngine], None]

PROMPT_TOKENS = 8
WARM_STEPS = 8  # before steps are timed
COPY_BYTES = (4_489_216, 13_500_416)  # one matrix of an expert in HFP4G32, and a whole one
READBACKS = 50
ROUNDS = 3
ZIPF = 1.2  # exponent of the tokens that are fed
CLOSED = 0.05  # gain of an oracle below which no predictor is worth having


@dataclass
class Run:
    """Steps of one engine: the ids, seconds of each timed step, and what was counted in them.

    ``busy_s``: time in which at least one expert was being read or copied.
    """

    ids: list[int]
    steps: Times
    counts: dict[str, float]
    busy_s: float

    def told(self, name: str) -> float:
        """A count for each timed step."""
        return self.counts[name] / len(self.steps.wall)


class Busy:
    """When experts are being read or copied; installed for as long as it is a context."""

    def __init__(self) -> None:
        self.spans: list[tuple[float, float]] = []

    def total(self, since: float) -> float:
        """Seconds after ``since`` covered by at least one span."""
        covered, end = 0.0, since
        for first, last in sorted(self.spans):
            covered += max(0.0, last - max(first, end))
            end = max(end, last)
        return covered

    @contextmanager
    def watching(self) -> Iterator[None]:
        fill = transport._Lane.fill

        def timed(lane: Any, wanted: Any) -> None:
            first = time.perf_counter()
            fill(lane, wanted)
            self.spans.append((first, time.perf_counter()))

        transport._Lane.fill = timed  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            transport._Lane.fill = fill  # type: ignore[method-assign]


class Collector:
    """In the place of a predictor: keeps what every router sees of a long prompt."""

    needs_state = True

    def __init__(self, layers: int) -> None:
        self.seen: list[list[F32]] = [[] for _ in range(layers)]

    def begin(self, ids: I64, phase: str) -> None:
        pass

    def see(self, layer: int, ids: I64, logits: F32, x: F32) -> None:
        self.seen[layer].append(x)

    def issue(self, layer: int, phase: str) -> None:
        pass


class Bench:
    """The model, how it is run, and what is recorded of it."""

    def __init__(self, path: Path, folder: Path, options: argparse.Namespace, name: str) -> None:
        self.path, self.folder, self.options = path, folder, options
        self.record = Recorder("paging_gpu", sys.argv[1:], name)
        with Reader(path) as reader:
            self.config = checked_config(reader)
            self.identity = artifact_identity(reader)
            vouched = digests_of(reader)  # every expert that is read is compared, as with a receipt
        digests.Digests.of = lambda *_, **options: vouched  # type: ignore[method-assign]
        random = np.random.default_rng(5)
        vocab = self.config.vocab_size
        self.prompt = random.integers(2, vocab, PROMPT_TOKENS).tolist()
        count = WARM_STEPS + options.tokens
        self.fed = ((random.zipf(ZIPF, count) + 1) % vocab).tolist()

    def value(self, measure: str, value: float, unit: str) -> None:
        """A row for one figure."""
        self.record.add(measure, Times([value], [value]), unit)

    def run(
        self,
        cache: CacheOptions | None,
        prepare: Prepare = lambda engine: None,
    ) -> Run:
        """Feed the prompt, then token by token; only later steps are timed.

        What is fed is drawn beforehand: greedy ids of random weights soon repeat. They are what is
        compared.
        """
        busy = Busy()
        if self.options.cold and not drop(self.path):
            raise SystemExit(f"{self.path}: the page cache keeps it")
        with (
            busy.watching(),
            HipEngine.load(self.path, max_context=self._context(), cache=cache) as engine,
        ):
            prepare(engine)
            state = engine.new_state()
            ids = [engine.next_id(state, self.prompt)]
            ids += [engine.next_id(state, [token]) for token in self.fed[:WARM_STEPS]]
            before, times = _counts(engine), Times()
            began = time.perf_counter()
            for token in self.fed[WARM_STEPS:]:
                wall, cpu = time.perf_counter(), time.process_time()
                ids.append(engine.next_id(state, [token]))
                times.wall.append(time.perf_counter() - wall)
                times.cpu.append(time.process_time() - cpu)
            after = _counts(engine)
        counts = {name: after[name] - before[name] for name in after}
        return Run(ids, times, counts, busy.total(began))

    def _context(self) -> int:
        return max(PROMPT_TOKENS + WARM_STEPS + self.options.tokens + 1, self.options.fit + 1)

    # ---------------------------------------------------------------- parts

    def copies(self, device: Device) -> None:
        """Gigabytes a second to the device."""
        stream = device.stream()
        for nbytes in COPY_BYTES:
            with device.alloc(nbytes) as target, device.pinned(nbytes) as pinned:
                plain = np.ones(nbytes, np.uint8)
                address = plain.__array_interface__["data"][0]
                sides: dict[str, int] = {"pinned": pinned.address, "pageable": address}
                for name, source in sides.items():
                    times = Times()
                    for _ in range(READBACKS):
                        wall, cpu = time.perf_counter(), time.process_time()
                        device.copy(target.address, source, nbytes, TO_DEVICE, stream.handle)
                        stream.synchronize()
                        times.wall.append(time.perf_counter() - wall)
                        times.cpu.append(time.process_time() - cpu)
                    measure = f"copy to the device, {name}, {nbytes:,} bytes"
                    self.record.add(measure, times, "GB/s", nbytes / 1e9)
        stream.free()

    def readbacks(self) -> None:
        """Microseconds until the host knows a router's choice."""
        with HipEngine.load(self.path, max_context=64, cache=self._all_hit()) as engine:
            state = engine.new_state()
            _read_all(engine)
            token = engine.next_id(state, self.prompt)
            engine.next_id(state, [token])
            paging, stream, layer = _paging(engine), engine.backend.stream, HASH_LAYERS
            segment = engine._steps.graphs[1][layer]
            idle, queued, alone = Times(), Times(), Times()
            for _ in range(READBACKS):
                for times, work in ((idle, False), (queued, True)):
                    stream.synchronize()
                    cpu = time.process_time()
                    if work:
                        segment.launch(stream)
                    wall = time.perf_counter()
                    paging._chosen(layer, np.array([token]), "decode")
                    times.wall.append(1e6 * (time.perf_counter() - wall))
                    times.cpu.append(1e6 * (time.process_time() - cpu))
                stream.synchronize()
                with stream.record() as first:
                    segment.launch(stream)
                    with stream.record() as last:
                        last.synchronize()
                        alone.wall.append(1000 * first.elapsed_ms(last))
                        alone.cpu.append(alone.wall[-1])
            self.record.add("router read back, idle", idle, "us")
            self.record.add("router read back, a layer's work queued", queued, "us")
            self.record.add("a layer's work up to its router, device time", alone, "us")

    def all_hit(self) -> tuple[Run, Run]:
        """Steps that read nothing, and those of a resident model."""
        resident, hit = self.run(None), self.run(self._all_hit(), _read_all)
        self.record.add("decode step, all experts on the device", _ms(resident.steps), "ms")
        self.record.add("decode step, a slot for every expert", _ms(hit.steps), "ms")
        layers, backs = self.config.num_hidden_layers, hit.told("readbacks")
        extra = (hit.steps.median - resident.steps.median) / layers
        self.value("what paging costs a layer when nothing is read", 1e6 * extra, "us")
        waited = 1e6 * hit.told("compute_s") / backs
        self.value("router read back, steps that read nothing", waited, "us")
        return resident, hit

    def paged(self, name: str, runs: Sequence[Run], hit: Run) -> None:
        """Rows of runs that read."""

        def add(measure: str, value: Callable[[Run], float], unit: str) -> None:
            values = [value(run) for run in runs]
            self.record.add(f"{name}: {measure}", Times(values, values), unit)

        def read_bytes(run: Run) -> float:
            return run.counts["demand_bytes"] + run.counts["ahead_bytes"]

        def exposed_s(run: Run) -> float:
            return sum(run.steps.wall) - len(run.steps.wall) * _mean(hit.steps)

        add("decode step, mean", lambda run: 1000 * _mean(run.steps), "ms")
        add("read and copied a step", lambda run: read_bytes(run) / self.options.tokens / 1e6, "MB")
        add("demand misses a step", lambda run: run.told("missed"), "experts")
        add("hits of distinct", lambda run: run.counts["hit"] / run.counts["distinct"], "x")
        add("read and copied while busy", lambda run: read_bytes(run) / run.busy_s / 1e9, "GB/s")
        hidden = "hidden share of reads and copies"
        add(hidden, lambda run: 1 - exposed_s(run) / run.busy_s, "x")

    def prefetch(self, slots: int, hit: Run, ids: Sequence[int], adapter: Adapter) -> None:
        """Steps with few slots, by what is read ahead; all at the same memory."""
        trace, top = self.folder / f"run{slots}.trace", self.options.top
        cache = CacheOptions(
            slots=slots,
            adapter=self.folder / "adapter.hfadpt",
            prefetch_top=2 * self.config.num_experts_per_tok,  # room for a whole layer's experts
        )

        def ahead(guess: Callable[[], Guess | None], *, certain: bool = True) -> Prepare:
            def prepare(engine: HipEngine) -> None:
                paging = _paging(engine)
                tables = paging._by_token if certain else {}
                paging._predictor = Prefetcher(paging._pager, tables, guess(), most_waste=np.inf)

            return prepare

        nothing, biases = ahead(lambda: None, certain=False), self._biases()
        self.run(replace(cache, trace=trace), nothing)
        arms = {
            "nothing": nothing,
            "hash layers": ahead(lambda: None),
            f"adapter, M {top}": ahead(lambda: AdapterGuess(adapter, biases, top)),
            "oracle": ahead(lambda: Oracle(read_trace(trace).bands())),
        }
        runs: dict[str, list[Run]] = {name: [] for name in arms}
        for _ in range(ROUNDS):  # in turns: what else the machine does changes with time
            for name, prepare in arms.items():
                runs[name].append(self.run(cache, prepare))
                _same(f"{slots} slots, {name}", runs[name][-1].ids, ids)
        for name, found in runs.items():
            label = f"{slots} slots, read ahead: {name}"
            self.paged(label, found, hit)
            gains = [
                100 * (_mean(without.steps) / _mean(run.steps) - 1)
                for without, run in zip(runs["nothing"], found, strict=True)
            ]
            self.record.add(f"{label}, faster", Times(gains, gains), "%")
        gain = statistics.median(gains)
        print(f"  can a predictor pay at {slots} slots: {'yes' if gain >= 100 * CLOSED else 'no'}")

    def adapter(self) -> Adapter:
        """Fitted to what routers see of random tokens, on the device."""
        config, count = self.config, self.options.fit
        ids = np.random.default_rng(6).integers(2, config.vocab_size, count)
        collector = Collector(config.num_hidden_layers)
        with HipEngine.load(self.path, max_context=count + 1, cache=self._all_hit()) as engine:
            paging = _paging(engine)
            paging._predictor = collector  # type: ignore[assignment]
            paging._seen = engine.backend.device.pinned(engine._scratch.normed.nbytes)
            engine.next_id(engine.new_state(), ids)
        seen = [np.concatenate(parts) for parts in collector.seen]
        entries, begin = {}, time.perf_counter()
        with Reader(self.path) as reader:
            tensors, d, e = Tensors(reader), config.hidden_size, config.n_routed_experts
            for layer in range(HASH_LAYERS, config.num_hidden_layers):
                gate = tensors.values(f"layers.{layer}.ffn.gate.weight", e, d)
                sums = Sums(d, e)
                sums.add(_pair(seen[layer - 1], scores(seen[layer] @ gate.T)))
                entries[layer - 1] = sums.solve(RIDGE, min(RANK, e, d))
        print(
            f"fitted {len(entries)} layers to {count} tokens in {time.perf_counter() - begin:.1f} s"
        )
        about = About(self.identity, STATE, TARGET, NORMALISATION, RIDGE, count, ())
        return Adapter(entries, about)

    def _all_hit(self) -> CacheOptions:
        return CacheOptions(slots=self.config.n_routed_experts)

    def _biases(self) -> dict[int, F32]:
        with Reader(self.path) as reader:
            tensors = Tensors(reader)
            return {
                layer: tensors.values(f"layers.{layer}.ffn.gate.bias", self.config.n_routed_experts)
                for layer in range(HASH_LAYERS, self.config.num_hidden_layers)
            }


def _read_all(engine: HipEngine) -> None:
    """Have every expert in its slot."""
    for layer in range(engine.config.num_hidden_layers):
        experts = range(engine.config.n_routed_experts)
        _paging(engine)._pager.acquire(layer, experts, "prefill").release()


def _pair(hidden: F32, found: F32) -> Pair:
    """Neighbouring layers' states; a fit asks for nothing else of them."""
    none = np.empty(0, np.uint32), np.empty((0, 0), np.uint16)
    states = hidden.astype(np.float16)
    record = StatesRecord(0, 0, "prefill", 0, 0, *none, states, found)
    return Pair(record, record)


def _counts(engine: HipEngine) -> dict[str, float]:
    """What is told of steps, so far."""
    counts = engine.cache_counters()
    if counts is None:
        return {}
    decode, ahead = counts["decode"], counts["prefetch"]
    return {
        "readbacks": counts["readbacks"],
        "compute_s": decode["compute_s"],
        "demand_bytes": decode["bytes"],
        "ahead_bytes": ahead["bytes"],
        "missed": decode["compulsory"] + decode["misses"],
        "hit": decode["hits"],
        "distinct": decode["distinct"],
    }


def _paging(engine: HipEngine) -> DevicePaging:
    if engine._paging is None:
        raise SystemExit("this engine holds all experts")
    return engine._paging


def _mean(times: Times) -> float:
    return sum(times.wall) / len(times.wall)


def _ms(times: Times) -> Times:
    return Times([1000 * each for each in times.wall], [1000 * each for each in times.cpu])


def _same(what: str, found: Iterable[int], wanted: Iterable[int]) -> None:
    """Refuse to time what gives other tokens."""
    if list(found) != list(wanted):
        raise SystemExit(f"{what}: other ids than the resident model's")


def measure(path: Path, folder: Path, options: argparse.Namespace) -> None:
    """All parts."""
    with Device.open() as device:
        bench = Bench(path, folder, options, device.name)
        bench.copies(device)
    resident, hit = bench.all_hit()
    _same("a slot for every expert", hit.ids, resident.ids)
    bench.readbacks()
    adapter = bench.adapter()
    (folder / "adapter.hfadpt").write_bytes(adapter.encode())
    for slots in options.slots:
        bench.prefetch(slots, hit, resident.ids, adapter)
    bench.value("ids equal to the resident model's", len(resident.ids), "tokens")
    if options.record:
        bench.record.write()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--artifact", type=Path, help="in place of a random model")
    parser.add_argument("--slots", type=int, nargs="+", default=[13, 64], help="of a layer")
    parser.add_argument("--tokens", type=int, default=128, help="timed steps")
    parser.add_argument("--fit", type=int, default=8192, help="tokens of the adapter's fit")
    parser.add_argument("--top", type=int, default=6, help="guesses of the adapter")
    parser.add_argument(
        "--cold", action="store_true", help="drop the model from the page cache before each run"
    )
    parser.add_argument("--record", action="store_true", help="append to results/paging_gpu.csv")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        path = options.artifact
        if path is None:
            path, begin = Path(place) / "model.hfq", time.perf_counter()
            config = flash_model.flash_config(RATIOS, HASH_LAYERS)
            nbytes = flash_model.write(path, "fp4", config).layout.file_bytes
            print(f"wrote {nbytes / 1e9:.1f} GB in {time.perf_counter() - begin:.1f} s")
        measure(path, Path(place), options)


if __name__ == "__main__":
    main()
