"""Whether ds4q serve keeps its promises under load, and what serving together gains.

    python -m benchmarks.serve [--requests N] [--repeats N] [--leaving N] [--threads N]

ds4-tiny behind the real server, on the CPU. N requests (200), no two the same, are asked one at a
time first: their ids are what is expected later. Then one at a time, 8 and 32 at once take turns;
each answer must have the ids of the same request served alone. Answers that are equal to that of
another request are counted, since mixing those up would not be seen. There is no prefix cache here,
so that asking again is no cheaper.

Then, with a prefix cache, N requests more (2,000) come 32 at once, of which 30 % go away at random:
before anything is read, or after some tokens. Those that stay must get their ids, memory must stay
flat once the prefix cache is full, and afterwards the server must be idle and answer.

Last, the seconds from the start of the process to `/health` 200 take turns with those that
`ds4q run` takes for one token. Exit status 1 where an answer is lost or wrong, memory grows, the
server does not answer afterwards, or 8 at once are less than 2.5 times as fast as one at a time.
"""

from __future__ import annotations

import argparse
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import ROOT, Recorder, Times
from benchmarks.serve_client import (
    LONGEST_TOKENS,
    Answer,
    Process,
    Request,
    ask_all,
    requests,
    serving,
)
from ds4q.api import quantize

TARGET = 2.5
LEAVING = 0.3
SIDES = (1, 8, 32)
FULL_SOON = "16MiB"  # of prefixes: full long before memory is looked at
FLAT_BYTES = 16 << 20
START_TARGET_S = 1.0
MIB = 1 << 20
CHECKPOINTS = 8

Ids = tuple[int, ...] | None


def judge(what: str, answers: Sequence[Answer], expected: Sequence[Ids]) -> list[str]:
    """What is wrong with ``answers``, one line each: lost, or other ids than expected."""
    wrong = []
    for number, (answer, ids) in enumerate(zip(answers, expected, strict=True)):
        if answer.left:
            continue
        if answer.ids is None:
            wrong.append(f"{what}: request {number} is lost: {answer.problem}")
        elif answer.ids != ids:
            wrong.append(f"{what}: request {number} got {answer.ids}, alone {ids}")
    return wrong


def copies(answers: Sequence[Answer]) -> int:
    """Answers whose ids another request got, too."""
    seen = Counter(answer.ids for answer in answers)
    return sum(seen[answer.ids] > 1 for answer in answers)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of them do not exceed."""
    ranked = sorted(values)
    return ranked[max(0, -int(-share * len(ranked) // 1) - 1)]


def one(value: float) -> Times:
    """A figure that was measured once."""
    return Times([value], [0.0])


def compare(
    server: Process, wanted: Sequence[Request], repeats: int, record: Recorder
) -> tuple[list[str], list[Ids]]:
    """One at a time, and many at once; what is wrong, and the ids of each request alone."""
    alone = ask_all(server.port, wanted, 1)
    expected = [answer.ids for answer in alone]
    wrong = [f"alone: {each.problem}" for each in alone if each.ids is None]
    record.add("answers whose ids another request got, too", one(copies(alone)), "answers")
    tokens = sum(len(ids or ()) for ids in expected)
    record.add("answer's tokens, mean", one(tokens / len(wanted)), "tokens")
    prompt = sum(answer.prompt_tokens for answer in alone) / len(wanted)
    record.add("prompt's tokens, mean", one(prompt), "tokens")
    times = {side: Times() for side in SIDES}
    first: dict[int, list[float]] = {side: [] for side in SIDES}
    total: dict[int, list[float]] = {side: [] for side in SIDES}
    for _ in range(repeats):
        for side in SIDES:
            cpu, began = server.cpu_s, time.perf_counter()
            answers = ask_all(server.port, wanted, side)
            times[side].wall.append(time.perf_counter() - began)
            times[side].cpu.append(server.cpu_s - cpu)
            wrong += judge(f"{side} at once", answers, expected)
            equal = sum(answer.ids == ids for answer, ids in zip(answers, expected, strict=True))
            print(f"{side} at once: {equal} of {len(wanted)} as alone")
            first[side] += [answer.first_s for answer in answers]
            total[side] += [answer.total_s for answer in answers]
    for side in SIDES:
        record.add(f"{side} at once", times[side], "tokens/s", tokens)
        record.add(f"{side} at once", times[side], "tokens/CPU s", tokens, per_cpu=True)
        for name, values in (("first token", first[side]), ("request", total[side])):
            for share in (0.50, 0.99):
                label = f"{side} at once: {name}, p{100 * share:.0f}"
                record.add(label, one(1000 * percentile(values, share)), "ms")
    for side in SIDES[1:]:  # each pass against the one beside it: a machine changes its pace
        gains = Times([a / b for a, b in zip(times[1].wall, times[side].wall, strict=True)], [])
        record.add(f"{side} at once over one at a time", gains, "x")
        if side == 8 and gains.median < TARGET:
            wrong.append(f"8 at once are {gains.median:.2f} times as fast as one, not {TARGET}")
    return wrong, expected


def endure(
    server: Process,
    wanted: Sequence[Request],
    expected: Sequence[Ids],
    count: int,
    record: Recorder,
) -> list[str]:
    """Many requests, of which many go away; what is wrong."""
    draw = random.Random(7)
    wrong: list[str] = []
    resident: list[float] = []
    stayed = 0
    for checkpoint in range(CHECKPOINTS + 1):  # the first fills the prefix cache
        places = [draw.randrange(len(wanted)) for _ in range(count // CHECKPOINTS)]
        leaving = [
            draw.randint(0, LONGEST_TOKENS // 2) if draw.random() < LEAVING else None
            for _ in places
        ]
        answers = ask_all(server.port, [wanted[place] for place in places], 32, leaving)
        wrong += judge("of many", answers, [expected[place] for place in places])
        stayed += sum(answer.ids is not None for answer in answers)
        resident.append(server.resident_bytes / MIB)
        print(f"checkpoint {checkpoint}: {resident[-1]:.1f} MiB resident")
    live = server.get("/live?experts=0")
    if live["running"] or live["waiting"]:
        wrong.append(f"afterwards {live['running']} run and {live['waiting']} wait")
    after = ask_all(server.port, wanted[:20], 1)
    wrong += judge("afterwards", after, expected[:20])
    grown = max(resident[1:]) - resident[0]
    asked = count // CHECKPOINTS * CHECKPOINTS
    cached = live["cached_tokens"] / live["prompt_tokens"]
    record.add("prompt tokens that were cached", one(100 * cached), "%")
    record.add(f"{stayed} of {asked + count // CHECKPOINTS} stayed", one(stayed), "answers")
    record.add(f"resident while {asked} requests came", Times(resident[1:], []), "MiB")
    record.add(f"resident grew over {asked} requests", one(grown), "MiB")
    if grown > FLAT_BYTES / MIB:
        wrong.append(f"memory grew by {grown:.1f} MiB over {asked} requests")
    return wrong


def starts(artifact: Path, threads: str, repeats: int, record: Recorder) -> list[str]:
    """From the start of the process to ready, against ``ds4q run`` with one token."""
    run = [sys.executable, "-m", "ds4q", "run", str(artifact), "--prompt-ids", "256", "--quiet"]
    run += ["--max-tokens", "1", "--threads", threads]
    ours, plain = Times(), Times()
    for _ in range(repeats):
        with serving(artifact, "--threads", threads) as server:
            ours.wall.append(server.ready_s)
            ours.cpu.append(server.cpu_s)
        cpu, began = _children_cpu_s(), time.perf_counter()
        subprocess.run(run, stdout=subprocess.DEVNULL, check=True)
        plain.wall.append(time.perf_counter() - began)
        plain.cpu.append(_children_cpu_s() - cpu)
    record.add("start to /health 200", ours, "s")
    record.add("ds4q run, start to its end after one token", plain, "s")
    late = ours.median - plain.median
    if late > START_TARGET_S:
        return [f"/health is ready {late:.1f} s later than ds4q run has ended"]
    return []


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--leaving", type=int, default=2000, help="requests of the second part")
    parser.add_argument("--threads", default="2", help="of the server's model")
    options = parser.parse_args()
    record = Recorder("serve", sys.argv[1:])
    wanted = requests(options.requests, seed=11)
    threads = ("--threads", options.threads)
    with tempfile.TemporaryDirectory() as folder:
        artifact = Path(folder) / "ds4-tiny.hfq"
        quantize(ROOT / "tests" / "data" / "ds4-tiny", artifact)
        with serving(artifact, *threads, "--prefix-cache", "0") as server:
            wrong, expected = compare(server, wanted, options.repeats, record)
        with serving(artifact, *threads, "--prefix-cache", FULL_SOON) as server:
            wrong += endure(server, wanted, expected, options.leaving, record)
        wrong += starts(artifact, options.threads, options.repeats, record)
    record.write()
    for line in wrong[:20]:
        print(f"WRONG: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
