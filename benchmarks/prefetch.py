"""Whether reading predicted experts ahead pays: recall on held-out text, and what it does to reads.

    python -m benchmarks.prefetch [--tokens N] [--decoded N]

First table: a predictor fitted to the router states of ds4-tiny (and of ds4-random, which has
learned nothing) on one text, judged on another, at several ranks and M, beside three that need no
fit. Second table: the same memory, N slots a layer, once all for demanded experts and once N - Q
of them, with Q for the best M guesses; ds4-tiny decodes held-out text through the real pager, and
two made-up streams of layers of 256 experts, six to a token, are guessed with the recall that was
published for such a model. An oracle, which knows the next layer's experts, shows what the best
guess would gain.

Guesses never displace demanded experts, so beside N - Q slots alone they save exactly the reads
that they made in time ("of slots"); what the slots themselves would have saved counts, too ("of
memory"). Guesses pay where demands wait for fewer reads, and all reads together are at most 1.10
times those without, at equal memory. Results go to ``results/prefetch_recall.csv`` and
``results/prefetch.csv``.
"""

from __future__ import annotations

import argparse
import csv
import math
import queue
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from benchmarks.harness import RESULTS, ROOT, commit, machine
from ds4q import api
from ds4q.runtime.engine import Engine
from ds4q.runtime.experts.adapter import Adapter
from ds4q.runtime.experts.catalogue import Catalogue, Geometry, Key
from ds4q.runtime.experts.evaluation import evaluate
from ds4q.runtime.experts.fit import train
from ds4q.runtime.experts.options import CacheOptions
from ds4q.runtime.experts.paged import PagedExperts
from ds4q.runtime.experts.pager import Pager
from ds4q.runtime.experts.policy import DEFAULT_POLICY
from ds4q.runtime.experts.predict import Guess, Oracle, Prefetcher, best, guess_slots
from ds4q.runtime.experts.reading import Done, Fill, Purpose
from ds4q.runtime.experts.trace import read_trace
from ds4q.runtime.text.corpus import bos_id, read_windows
from ds4q.runtime.text.tokenizer import Tokenizer

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]

DATA = ROOT / "tests" / "data"
TEXTS = DATA / "text"
THREADS = 2
MOST_READS = 1.10
TOPS = (1, 2, 3, 4, 6)
PREFILLED = 64
TINY_SLOTS = (6, 8, 10, 12)
LAYERS, EXPERTS, CHOSEN = 6, 256, 6
STREAM_TOKENS = 400
SHARES = (0.05, 0.10, 0.20, 0.40)
PUBLISHED_RECALL = 0.756  # of 6 by the best 6, at rank 128


@dataclass(frozen=True)
class Row:
    """Reads of a run, over its guessed layers; ``memory`` counts all slots, ``aside`` is Q."""

    source: str
    memory: int
    share: float
    guess: str
    m: int
    aside: int
    hit: float
    waits: int  # reads that a demand began
    used: int
    issued: int
    waits_of_memory: float
    reads_of_slots: float
    reads_of_memory: float


# ---------------------------------------------------------------- predictors


def windows(artifact: Path, text: str, tokens: int) -> list[I64]:
    with Engine.load(artifact, threads=THREADS) as engine:
        tokenizer = Tokenizer.from_metadata(engine.metadata, path=artifact)
        if tokenizer is None:  # ds4-random: bytes are ids as good as any
            raw = np.frombuffer((TEXTS / text).read_bytes()[:tokens], np.uint8)
            return [part.astype(np.int64) for part in np.array_split(raw, -(-tokens // 512))]
        return read_windows(
            [TEXTS / text],
            tokenizer=tokenizer,
            bos=bos_id(engine.metadata, tokenizer),
            vocab_size=engine.vocab_size,
            limit_tokens=tokens,
        )


def record(artifact: Path, trace: Path, text: str, tokens: int) -> Path:
    parts = windows(artifact, text, tokens)
    options = CacheOptions(trace=trace, trace_states=True)
    with Engine.load(artifact, threads=THREADS, cache=options) as engine:
        for part in parts:
            engine.forward(engine.new_state(), part)
    return trace


def predictors(folder: Path, name: str, tokens: int) -> tuple[Path, Adapter, list[dict[str, Any]]]:
    """An artifact, a predictor of full rank for it, and what it is worth on another text."""
    artifact = folder / f"{name}.hfq"
    api.quantize(DATA / name, artifact, recipe="fp4", threads=THREADS)
    fitted_to = record(artifact, folder / "fit.trace", "calibration.txt", tokens)
    held_out = record(artifact, folder / "eval.trace", "scored.txt", tokens // 2)
    adapter = train([fitted_to], rank=None)
    found = evaluate(adapter, read_trace(held_out), ranks=[4, 8, 12, adapter.rank])
    if not found.held_out:
        raise SystemExit("the text was in the fit")
    rows: list[dict[str, Any]] = [
        {"model": name, "tokens": found.tokens, "predictor": each.name, "rank": each.rank or ""}
        | asdict(top)
        for each in found.predictors
        for top in each.top
    ]
    for row in rows:
        print(
            f"{name:10} {row['predictor']:18} {row['rank']!s:>3} M {row['m']}  recall "
            f"{row['recall']:.1%}  covers {row['covers']:.2f}  wasted {row['wasted']:.2f}  "
            f"late {row['late']:.2f}  fetches {row['fetches']:.2f}x",
            flush=True,
        )
    return artifact, adapter, rows


# ---------------------------------------------------------------- ds4-tiny, paged


def tiny(folder: Path, artifact: Path, adapter: Adapter, decoded: int) -> Iterator[Row]:
    file = folder / "tiny.adapter"
    file.write_bytes(adapter.encode())
    ids = windows(artifact, "scored.txt", PREFILLED + decoded)
    text = np.concatenate([part[1:] for part in ids])
    truth = folder / "truth.trace"
    reads(artifact, CacheOptions(trace=truth), text)
    for memory in TINY_SLOTS:
        plain = CacheOptions(slots=memory, trace=folder / "run.trace")
        without = reads(artifact, plain, text)
        yield row("ds4-tiny", memory, memory / 16, "none", 0, without, without)
        for m in (top for top in TOPS if memory - guess_slots(top) >= 4):
            options = CacheOptions(
                slots=memory - guess_slots(m),
                adapter=file,
                prefetch_top=m,
                trace=folder / "run.trace",
            )
            for name in ("adapter", "oracle"):
                guess = Oracle(read_trace(truth).bands()) if name == "oracle" else None
                found = reads(artifact, options, text, guess)
                yield row("ds4-tiny", memory, memory / 16, name, m, found, without)


@dataclass(frozen=True)
class Reads:
    """Of the guessed layers, while decoding."""

    distinct: int
    waits: int
    used: int
    issued: int


def reads(artifact: Path, options: CacheOptions, text: I64, guess: Guess | None = None) -> Reads:
    """Decode ``text`` token by token behind a short prompt; guesses are never given up."""
    with Engine.load(artifact, threads=THREADS, cache=options) as engine:
        cache = engine._cache
        paged = cache.store if cache and isinstance(cache.store, PagedExperts) else None
        if paged is not None and isinstance(paged.predictor, Prefetcher):
            made = paged.predictor
            paged.predictor._most_waste = math.inf
            if guess is not None:
                paged.predictor = Prefetcher(paged.pager, made._tables, guess, most_waste=math.inf)
        state = engine.new_state()
        engine.forward(state, text[:PREFILLED])
        for token in text[PREFILLED:]:
            engine.forward(state, [int(token)])
        counters = engine.cache_counters()
        first = engine.config.num_hash_layers
    outcomes = [0] * 5
    for band in read_trace(cast(Path, options.trace)).bands():
        if band.phase == "decode" and band.layer >= first:
            for outcome in band.outcomes.tolist():
                outcomes[outcome] += 1
    issued = 0 if counters is None else counters["speculative"]["issued"]
    return Reads(sum(outcomes), outcomes[1] + outcomes[2], outcomes[4], issued)


# ---------------------------------------------------------------- made-up streams


class Instant:
    """A transport that brings nothing, at once, from a thread of its own."""

    def __init__(self) -> None:
        self._line: queue.SimpleQueue[tuple[Fill, Done] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def start(self, fills: Sequence[Fill], done: Done) -> None:
        for fill in fills:
            self._line.put((fill, done))

    def hurry(self, keys: Sequence[Key]) -> None:
        """All is served in order."""

    def counters(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        self._line.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (item := self._line.get()) is not None:
            item[1](item[0], None)


@contextmanager
def pager(slots: int, quarantine: int) -> Iterator[Pager]:
    """The real one, over experts of a byte."""
    part = SimpleNamespace(nbytes=1)
    layer = tuple(SimpleNamespace(gate=part, up=part, down=part, nbytes=1) for _ in range(EXPERTS))

    class Made:
        path, experts = "made up", EXPERTS
        records = (layer,) * LAYERS
        geometry = (Geometry(1, 1, 1),) * LAYERS

        def __getitem__(self, key: Key) -> Any:
            return layer[key.expert]

    made = Pager(
        cast(Catalogue, Made()),
        slots,
        Instant(),
        policy=DEFAULT_POLICY,
        quarantine=[quarantine] * LAYERS,
    )
    try:
        yield made
    finally:
        made.close()


def scores(name: str, rng: np.random.Generator) -> F64:
    """Router scores [T, LAYERS, EXPERTS] of a stream; the best six are chosen."""
    shape = (STREAM_TOKENS, LAYERS, EXPERTS)
    rank = rng.permuted(np.tile(np.arange(1, EXPERTS + 1), (LAYERS, 1)), axis=1)
    gumbel = rng.gumbel(size=shape)
    if name == "static":
        return -1.25 * np.log(rank) + 0.6 * rng.standard_normal((LAYERS, EXPERTS)) + gumbel
    topics = rng.standard_normal((-(-STREAM_TOKENS // 90), LAYERS, EXPERTS)).repeat(90, axis=0)
    v = np.empty(shape)
    v[0] = rng.standard_normal(shape[1:])
    for t in range(1, STREAM_TOKENS):
        v[t] = 0.85 * v[t - 1] + math.sqrt(1 - 0.85**2) * rng.standard_normal(shape[1:])
    return -0.8 * np.log(rank) + 1.9 * topics[:STREAM_TOKENS] + 1.6 * v + gumbel


def choose(merit: F64, m: int) -> I64:
    flat = best(merit.reshape(-1, EXPERTS).astype(np.float32), m)
    return flat.reshape(*merit.shape[:2], m)


def guessed(merit: F64, chosen: I64, rng: np.random.Generator) -> I64:
    """Guesses, best first: the scores under as much noise as leaves the published recall."""
    noise = rng.standard_normal(merit.shape)
    low, high = 0.0, 20.0
    for _ in range(20):
        middle = (low + high) / 2
        named = choose(merit + middle * noise, CHOSEN)
        recall = (named[..., None] == chosen[..., None, :]).any(axis=-1).mean()
        low, high = (middle, high) if recall > PUBLISHED_RECALL else (low, middle)
    return choose(merit + low * noise, max(TOPS))


def stream(name: str) -> Iterator[Row]:
    rng = np.random.default_rng(17)
    merit = scores(name, rng)
    chosen = choose(merit, CHOSEN)
    guesses = {"published recall": guessed(merit, chosen, rng), "oracle": chosen}
    for share in SHARES:
        memory = int(share * EXPERTS)
        without = drive(memory, 0, chosen, chosen)
        yield row(name, memory, share, "none", 0, without, without)
        for m in (top for top in TOPS if memory - guess_slots(top) >= CHOSEN):
            for guess, named in guesses.items():
                aside = guess_slots(m)
                found = drive(memory - aside, aside, chosen, named[..., :m])
                yield row(name, memory, share, guess, m, found, without)


def drive(slots: int, aside: int, chosen: I64, named: I64) -> Reads:
    """The stream through the pager; each layer's guesses are there before it asks."""
    with pager(slots, aside) as made:
        for t in range(STREAM_TOKENS):
            for layer in range(LAYERS):
                made.acquire(layer, chosen[t, layer].tolist(), "decode").release()
                if aside and layer + 1 < LAYERS:
                    ahead = named[t, layer + 1].tolist()
                    made.prefetch(layer + 1, ahead, Purpose.SPECULATIVE)
        counts = made.counters()
    demand, ahead = counts["decode"], counts["speculative"]
    waits = demand["compulsory"] + demand["misses"]
    return Reads(demand["distinct"], waits, demand["prefetched"], ahead["issued"])


# ---------------------------------------------------------------- both


def row(
    source: str, memory: int, share: float, guess: str, m: int, found: Reads, without: Reads
) -> Row:
    made = Row(
        source,
        memory,
        share,
        guess,
        m,
        guess_slots(m) if m else 0,
        1 - (found.waits + found.used) / found.distinct,
        found.waits,
        found.used,
        found.issued,
        found.waits / without.waits,
        (found.waits + found.issued) / (found.waits + found.used),
        (found.waits + found.issued) / without.waits,
    )
    print(
        f"{source:9} {memory:3} slots ({share:3.0%})  {guess:16} M {m} Q {made.aside}  "
        f"resident {made.hit:5.1%}  "
        f"waits {made.waits:5} ({made.waits_of_memory:.2f}x)  issued {made.issued:5}, "
        f"used {made.used:5}  reads {made.reads_of_slots:.2f}x of slots, "
        f"{made.reads_of_memory:.2f}x of memory",
        flush=True,
    )
    return made


def verdicts(rows: Sequence[Row]) -> list[str]:
    """Per source and memory, the M that pays most, if one does."""
    lines = []
    for source, memory in dict.fromkeys((r.source, r.memory) for r in rows):
        mine = [r for r in rows if (r.source, r.memory) == (source, memory)]
        fair = [
            r
            for r in mine
            if r.guess not in ("none", "oracle")
            and r.reads_of_memory <= MOST_READS
            and r.waits_of_memory < 1
        ]
        says = "no M pays: it stays off"
        if fair:
            least = min(fair, key=lambda r: r.waits)
            says = (
                f"M {least.m} pays: {1 - least.waits_of_memory:.1%} fewer waits, "
                f"{least.reads_of_memory:.2f}x the reads"
            )
        lines.append(f"{source}, {memory} slots: {says}")
    return lines


def write(name: str, rows: Sequence[dict[str, Any]]) -> None:
    fixed = {"commit": commit(), "machine": machine()}
    with (RESULTS / f"{name}.csv").open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, [*fixed, *rows[0]], lineterminator="\n")
        writer.writeheader()
        for each in rows:
            told = {k: f"{v:.4f}" if isinstance(v, float) else v for k, v in each.items()}
            writer.writerow(fixed | told)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=65_536, help="of the fit; half to judge on")
    parser.add_argument("--decoded", type=int, default=400)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ds4q-prefetch-") as place:
        folder = Path(place)
        _, _, random_rows = predictors(folder, "ds4-random", options.tokens // 8)
        artifact, adapter, tiny_rows = predictors(folder, "ds4-tiny", options.tokens)
        write("prefetch_recall", tiny_rows + random_rows)
        rows = list(tiny(folder, artifact, adapter, options.decoded))
    for name in ("static", "topic"):
        rows += stream(name)
    write("prefetch", [{f.name: getattr(r, f.name) for f in fields(Row)} for r in rows])
    print("\n".join(verdicts(rows)))
    more = [r for r in rows if r.used + r.waits < 0 or r.reads_of_slots < 1]
    if more:
        raise SystemExit("guesses cost or saved reads that they cannot; the counts are wrong")


if __name__ == "__main__":
    main()
