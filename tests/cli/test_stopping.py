"""Rounds of mixed stop signals, close together, at random moments of commands that write."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from tests.cli.stopping import Commands
from tests.cli.test_write_faults import CALIBRATE, CASES, EXPORT, PULL, RUN, sources
from tests.quantize import models

__all__ = ["sources"]  # the fixture

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GAPS_S = (0, 0, 0.0005, 0.002, 0.01)
HUNG_S = 60.0
ROUNDS = {
    "quantize": (300, CASES["quantize-mix"].words),
    "pull": (60, PULL),
    "export": (60, EXPORT),
    "calibrate": (30, CALIBRATE),
    "trace": (30, RUN + " --trace {F}/t --stats {F}/s"),
}


BEGUN = {"quantize": "x.hfq.journal", "pull": "m", "export": "x.partial", "trace": "t.partial"}


def stop_often(pid: int, random_: random.Random, longest_s: float, begun: Path) -> None:
    """Two to four signals, the first at a random moment, mostly once ``begun`` is there."""
    if random_.random() < 0.75:
        until = time.monotonic() + longest_s
        while time.monotonic() < until and not begun.exists():
            time.sleep(0.001)
        longest_s *= 0.3
    time.sleep(random_.random() * longest_s)
    for _ in range(random_.randint(2, 4)):
        with suppress(ProcessLookupError):
            os.kill(pid, random_.choice(SIGNALS))
        time.sleep(random_.choice(GAPS_S))


@pytest.mark.slow
@pytest.mark.parametrize("name", ROUNDS)
def test_no_round_of_signals_loses_or_hangs(name: str, sources: Path, tmp_path: Path) -> None:
    rounds, words = ROUNDS[name]
    place, log = tmp_path / "f", tmp_path / "log"
    line = [w.replace("{F}", str(place)).replace("{S}", str(sources)) for w in words.split()]
    r, ends, wrong = random.Random(name), Counter[int | None](), []
    with Commands() as commands:

        def whole(*more: str) -> float:
            began = time.monotonic()
            pid = commands.start([*line, *more], log)
            assert commands.end(pid, HUNG_S) == 0, log.read_text()
            return time.monotonic() - began

        place.mkdir()
        whole()
        expected = models.digests_below(place)
        shutil.rmtree(place)
        place.mkdir()
        longest_s = whole()  # the first loads more
        for number in range(rounds):
            shutil.rmtree(place)
            place.mkdir()
            pid = commands.start(line, log)
            stop_often(pid, r, longest_s, place / BEGUN.get(name, "none"))
            status = commands.end(pid, HUNG_S)
            ends[status] += 1
            left, said = models.digests_below(place), log.read_text()
            if status not in (0, 130, 143) or "error" in said or "Traceback" in said:
                wrong.append(f"{number}: {status}: {said[-300:]}")
            if status and name in ("quantize", "pull") and left:  # what can be continued is
                whole(*(["--resume"] if name == "quantize" else []))
                left = models.digests_below(place)
            final = {k: v for k, v in left.items() if "/.verified/" not in f"/{k}"}
            if name == "quantize":
                good = not final or final == expected
            else:
                names = {k for k in expected if "/.verified/" not in f"/{k}"}
                good = final.keys() <= names if status else final.keys() == names
            if not good:
                wrong.append(f"{number}: {status}: left {sorted(final)}: {said[-200:]}")
    print(name, dict(ends))
    assert not wrong, "\n".join(wrong)
