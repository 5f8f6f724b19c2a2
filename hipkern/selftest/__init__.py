"""Owns the self-test of kernels: fixed inputs, digests of what comes back, and those expected.

Every kernel that differs from the digests in ``kernels/hashes.json`` computes other bits than the
simulated device did, whose results are held to float64 by the tests. Knows no model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ds4q.hipkern.driver import Device
from ds4q.hipkern.kernels import Kernels
from ds4q.hipkern.selftest.dense import dense_cases
from ds4q.hipkern.selftest.packed import packed_cases
from ds4q.hipkern.selftest.rig import Case
from ds4q.hipkern.source import FOLDER

HASHES = FOLDER / "hashes.json"

__all__ = ["HASHES", "Case", "Result", "cases", "expected_digests", "run"]


class Result(NamedTuple):
    """What one kernel gave with one decoder ("" where it has none); ``expected`` may be unknown."""

    kernel: str
    decoder: str
    digest: str
    expected: str | None

    @property
    def ok(self) -> bool:
        """Whether it is what was expected."""
        return self.digest == self.expected


def cases() -> list[Case]:
    """Every kernel with every decoder that it can be built for."""
    return [*packed_cases(), *dense_cases()]


def expected_digests() -> dict[str, dict[str, str]]:
    """The committed digests, by kernel and decoder."""
    found: dict[str, dict[str, str]] = json.loads(HASHES.read_text("utf-8"))
    return found


def run(
    device: Device,
    kernels: Kernels | None = None,
    only: Sequence[Case] | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> list[Result]:
    """Run the cases on ``device``, one after the other; what is not built yet is built first.

    Parameters
    ----------
    kernels : with their sources in another folder, say
    only : the cases; all of them if None
    advance : hears of every case that is done

    Raises
    ------
    HipError : a kernel could not be built or run
    """
    chosen = cases() if only is None else only
    kernels = kernels or Kernels(device)
    kernels.prepare(
        {(c.file, *sorted(c.defines.items())): (c.file, c.defines) for c in chosen}.values()
    )
    expected = expected_digests()
    results = []
    for case in chosen:
        digest = case.digest(device, kernels)
        said = expected.get(case.kernel, {}).get(case.decoder)
        results.append(Result(case.kernel, case.decoder, digest, said))
        advance(1)
    return results
