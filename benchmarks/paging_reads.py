"""How fast experts are read that no cache holds, against plain readers of the same bytes.

    python -m benchmarks.paging_reads [--folder DIR] [--experts N] [--repeats N]

An artifact of true Flash experts (13.5 MB each, FP4) is written. Every side reads all of it, expert
by expert in one shuffled order, as many at a time; before each the file is driven out of the page
cache and seen to be gone (the storage's own cache stays warm). Plain readers are ``O_DIRECT``
preads of the enclosing aligned ranges into one buffer a thread, buffered preads, and copies out of
a map with and without ``WILLNEED``. Ours fill slots, with and without comparing digests, and with
every expert cut to a rank's half; they have more threads than read at a time, so one plain reader
reads with as many. A second table reads what the page cache holds.

Exit status 1 where ours, without digests, is below 0.9 times the plain ``O_DIRECT`` reader.
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import xxhash

from benchmarks.harness import Recorder, Times, alternate
from ds4q.artifact.hfq import ARCH_DEEPSEEK4, Reader
from ds4q.artifact.metadata import canonical
from ds4q.artifact.types import HFP4G32
from ds4q.artifact.writer import TensorSpec, layout
from ds4q.runtime.config import parse_config
from ds4q.runtime.digests import Digests
from ds4q.runtime.experts.catalogue import Catalogue
from ds4q.runtime.experts.reading import (
    FILLERS,
    READS,
    ExpertReader,
    Fill,
    Purpose,
    helpers_for,
)
from ds4q.runtime.experts.runs import Run, runs
from ds4q.runtime.experts.slots import HostSlots
from ds4q.runtime.experts.transform import WidthSlice
from ds4q.runtime.experts.transport import HostTransport
from ds4q.runtime.gates.pagecache import cached_bytes, drop
from ds4q.runtime.source import Tensors
from tests.quantize.builders import FLASH

TARGET = 0.9
SLOTS = 16  # more than fillers, so that none waits for a slot
CHUNK_BYTES = 16 << 20
SETTLING, SETTLING_S = 50, 0.05


def write_experts(path: Path, experts: int) -> None:
    """An artifact of one layer that holds nothing but random experts."""
    config = {key: value for key, value in FLASH.items() if not key.startswith("dspark")} | {
        "compress_ratios": [0],
        "n_routed_experts": experts,
        "num_hash_layers": 0,
        "num_hidden_layers": 1,
        "num_nextn_predict_layers": 0,
    }
    d, width = config["hidden_size"], config["moe_intermediate_size"]
    specs = [
        TensorSpec(f"layers.0.ffn.experts.{expert}.{role}.weight", HFP4G32.id, shape)
        for expert in range(experts)
        for role, shape in (("w1", (width, d)), ("w2", (d, width)), ("w3", (width, d)))
    ]
    front = canonical({"config": config})
    plan = layout(specs, len(front), arch_id=ARCH_DEEPSEEK4)
    rng = np.random.default_rng(0)
    with path.open("wb") as out:
        out.write(plan.front(front))
        left = sum(entry.nbytes for entry in plan.entries)
        while left:
            left -= out.write(rng.bytes(min(left, CHUNK_BYTES)))
        out.flush()
        os.fsync(out.fileno())


class Plain:
    """Readers that do nothing but read: each thread takes the next range."""

    def __init__(self, path: Path, ranges: Sequence[Run], threads: int) -> None:
        self.path = path
        self.ranges = ranges
        self.threads = threads
        longest = max(run.aligned[1] for run in ranges)
        # O_DIRECT wants pages, and is faster into large ones: private memory has them.
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self.buffers = [mmap.mmap(-1, longest, flags=private) for _ in range(threads)]
        for buffer in self.buffers:
            buffer.madvise(mmap.MADV_HUGEPAGE)

    def shared(self, read: Callable[[Run, memoryview], None]) -> None:
        """``read`` every range, with the thread's own buffer."""
        left = iter(self.ranges)
        lock = threading.Lock()

        def take() -> Run | None:
            with lock:
                return next(left, None)

        def work(buffer: memoryview) -> None:
            while (run := take()) is not None:
                read(run, buffer)

        with ThreadPoolExecutor(self.threads) as pool:
            list(pool.map(work, map(memoryview, self.buffers)))

    def preads(self, flags: int) -> None:
        """``flags`` of open: O_DIRECT reads whole pages, 0 the bytes asked for."""
        fd = os.open(self.path, os.O_RDONLY | flags)

        def read(run: Run, buffer: memoryview) -> None:
            at, nbytes = run.aligned if flags else run[:2]
            done = 0
            while done < run.offset + run.nbytes - at:
                done += os.preadv(fd, [buffer[done:nbytes]], at + done)

        try:
            self.shared(read)
        finally:
            os.close(fd)

    def mapped(self, advise: bool) -> None:
        """Copies out of a map; ``advise`` asks for each expert before it is copied."""
        with (
            self.path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view,
        ):

            def read(run: Run, buffer: memoryview) -> None:
                if advise:
                    view.madvise(mmap.MADV_WILLNEED, *run.aligned)
                part = np.frombuffer(buffer, dtype=np.uint8)[: run.nbytes]
                np.copyto(part, np.frombuffer(view, np.uint8, run.nbytes, run.offset))

            self.shared(read)


class Ours:
    """A transport that fills slots with every expert in turn."""

    def __init__(
        self,
        reader: Reader,
        order: Sequence[int],
        digests: Digests | None,
        ranks: int,
    ) -> None:
        self.order = order
        config = parse_config(reader.metadata["config"], path=reader.path)
        transform = WidthSlice(0, ranks) if ranks > 1 else None
        self.catalogue = Catalogue(config, Tensors(reader), path=reader.path, transform=transform)
        experts = ExpertReader(
            reader,
            self.catalogue,
            digests=digests,
            bounces=0 if transform else FILLERS,
            helpers=helpers_for(READS),
        )
        slots = HostSlots(self.catalogue.geometry, [SLOTS])
        self.transport = HostTransport(self.catalogue, experts, slots, threads=FILLERS)

    def fill(self) -> None:
        """Every expert once; the next one into the slot that was filled last."""
        ended = threading.Event()
        errors: list[BaseException] = []
        left = [self.catalogue.records[0][expert].key for expert in reversed(self.order)]
        waiting = len(left)
        lock = threading.Lock()

        def done(fill: Fill, error: BaseException | None) -> None:
            nonlocal waiting
            if error is not None:
                errors.append(error)
            with lock:
                waiting -= 1
                following = left.pop() if left else None
            if following is not None:
                self.transport.start([fill._replace(key=following)], done)
            elif not waiting:
                ended.set()

        with lock:
            first = [Fill(left.pop(), n, Purpose.DEMAND) for n in range(min(SLOTS, len(left)))]
        self.transport.start(first, done)
        ended.wait()
        if errors:
            raise errors[0]


def digests_of(reader: Reader) -> Digests:
    """Those of the artifact's payloads, as a receipt would tell them."""
    found = {name: xxhash.xxh3_128(reader.read(name).data).digest() for name in reader.tensors}
    return Digests(lambda: found, reader.path, [])


def take_turns(
    sides: Mapping[str, Callable[[], object]], repeats: int, before: Callable[[], None]
) -> dict[str, Times]:
    """All sides in turn, ``repeats`` times after one unmeasured time; ``before`` is not timed.

    Each turn has an order of its own: what a disk gives depends on what it gave just before.
    """
    times = {name: Times() for name in sides}
    orders = random.Random(1)
    for turn in range(repeats + 1):
        for name, side in orders.sample([*sides.items()], len(sides)):
            before()
            cpu, wall = time.process_time(), time.perf_counter()
            side()
            took = time.perf_counter() - wall, time.process_time() - cpu
            if turn:
                times[name].wall.append(took[0])
                times[name].cpu.append(took[1])
    return times


def cold(path: Path) -> None:
    """Drive the file out of the page cache; reads ahead of the side before may still come in."""
    for _ in range(SETTLING):
        gone = drop(path)
        time.sleep(SETTLING_S)
        if gone and cached_bytes(path) == 0:
            return
    raise SystemExit(f"{path}: the page cache keeps it; nothing cold can be measured")


def sides_of(
    reader: Reader, order: Sequence[int]
) -> tuple[dict[str, Callable[[], object]], dict[str, Ours]]:
    checked = digests_of(reader)
    ours = {
        "ours": Ours(reader, order, None, 1),
        "ours, digests": Ours(reader, order, checked, 1),
        "ours, digests, a rank's half": Ours(reader, order, checked, 2),
    }
    records = ours["ours"].catalogue.records[0]
    ranges = [run for e in order for run in runs(records[e])]
    plain = Plain(reader.path, ranges, READS)
    more = Plain(reader.path, ranges, FILLERS)
    sides: dict[str, Callable[[], object]] = {
        "plain O_DIRECT": partial(plain.preads, os.O_DIRECT),
        f"plain O_DIRECT, {FILLERS} at a time": partial(more.preads, os.O_DIRECT),
        **{name: one.fill for name, one in ours.items()},
        "plain buffered": partial(plain.preads, 0),
        "mmap": partial(plain.mapped, False),
        "mmap, WILLNEED": partial(plain.mapped, True),
    }
    return sides, ours


def transform_alone(reader: Reader, catalogue: Catalogue) -> tuple[Times, int]:
    """Times of cutting one expert that is in memory, and the bytes that are cut."""
    whole, part = catalogue.records[0][0], catalogue.packed[0][0]
    gate, up, down = (reader.read(entry.name) for entry in whole.entries)
    to_gate, to_up, to_down = (np.zeros(entry.nbytes, np.uint8) for entry in part.entries)
    if catalogue.transform is None:
        raise SystemExit("nothing is cut")
    cut = partial(catalogue.transform.apply, whole, (gate, up, down), (to_gate, to_up, to_down))
    return alternate({"cut": cut}, repeats=31)["cut"], whole.nbytes


def kinds(ours: Mapping[str, Ours]) -> Iterator[tuple[int, int]]:
    """Direct and buffered reads so far."""
    for one in ours.values():
        counts = one.transport.counters()
        yield counts["reads_direct"], counts["reads_buffered"]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="where the artifact is written")
    parser.add_argument("--experts", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args(arguments)
    recorder = Recorder("paging_reads", arguments)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder) / "experts.hfq"
        write_experts(path, options.experts)
        order = random.Random(0).sample(range(options.experts), options.experts)
        with Reader(path) as reader:
            sides, ours = sides_of(reader, order)
            nbytes = ours["ours"].catalogue.file_bytes / 1e9
            found = take_turns(sides, options.repeats, partial(cold, path))
            direct = list(kinds(ours))
            if any(buffered for _, buffered in direct):
                raise SystemExit(f"cold experts were read through the page cache: {direct}")
            for name, times in found.items():
                recorder.add(f"cold, {name}", times, "GB/s", nbytes)
            sides["plain buffered"]()
            warm = take_turns(sides, options.repeats, lambda: None)
            if [d for d, _ in kinds(ours)] != [d for d, _ in direct]:
                raise SystemExit("cached experts were read past the page cache")
            for name, times in warm.items():
                if not name.startswith("plain O_DIRECT"):
                    recorder.add(f"cached, {name}", times, "GB/s", nbytes)
            cut = transform_alone(reader, ours["ours, digests, a rank's half"].catalogue)
            recorder.add("transform alone", cut[0], "GB/s", cut[1] / 1e9)
            recorder.add("transform alone, per CPU", cut[0], "GB/s", cut[1] / 1e9, per_cpu=True)
            for one in ours.values():
                one.transport.close()
    recorder.write()
    ratio = statistics.median(
        plain / mine
        for plain, mine in zip(found["plain O_DIRECT"].wall, found["ours"].wall, strict=True)
    )
    print(f"ours / plain O_DIRECT: {ratio:.3f}, target {TARGET}")
    return int(ratio < TARGET)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
