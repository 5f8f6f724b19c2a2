"""Owns the proof that a candidate cannot be chosen, whatever the codes of a group are."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ds4q.artifact.fastpath import jit

# A float32 sum of n numbers that are not negative is off by at most (n - 1) 2^-24 of their exact
# sum; n is at most 32. One part in 32 is left over for the float64 arithmetic of the proof.
SUM_ERROR = 32 * 2.0**-24
SAFE_SUM = 2.0**127  # sums below are finite in float32, however they are rounded


@jit
def survivors(
    terms: npt.NDArray[np.float32],
    allowed: npt.NDArray[np.bool_],
    needed: npt.NDArray[np.bool_],
    size: int,
    weighted: bool,
) -> npt.NDArray[np.int64]:
    """The candidates that can be the first with the smallest sum of ``size`` terms, ascending.

    ``terms`` are ``(16 source codes, candidates)`` and not negative: squared errors, or magnitudes
    of errors that are to be weighted. A group has ``allowed`` codes only and at least one of
    those ``needed``, both bool ``(16,)``. Left out is a candidate b if some other a

    - comes before b, and its term is at most b's for each allowed code. Rounding keeps the order
      of sums, and of products with a weight, so that b's sum is at best tied; or
    - has a smaller sum for any such codes, by more than both sums can be off. This is for
      unweighted sums only: a weight could outgrow all others.

    Either way a is better in the order (sum, place), so that the best one is never left out.
    """
    count = terms.shape[1]
    able = np.ones(count, dtype=np.bool_)
    for b in range(count):
        for a in range(count):
            if a != b and _beats(terms, allowed, needed, size, weighted, a, b):
                able[b] = False
                break
    return np.flatnonzero(able)


@jit
def _beats(
    terms: Any, allowed: Any, needed: Any, size: int, weighted: bool, a: int, b: int
) -> bool:
    never_above = a < b
    largest, most, most_needed = 0.0, -np.inf, -np.inf  # of a's term less b's, in the worst case
    for code in range(terms.shape[0]):
        if not allowed[code]:
            continue
        ours, theirs = np.float64(terms[code, a]), np.float64(terms[code, b])
        if ours > theirs:
            never_above = False
        largest = max(largest, ours)
        excess = ours * (1 + SUM_ERROR) - theirs * (1 - SUM_ERROR)
        most = max(most, excess)
        if needed[code]:
            most_needed = max(most_needed, excess)
        # More codes only make it larger.
        if not never_above and (weighted or most_needed + (size - 1) * most >= 0):
            return False
    # A sum is safe only if all its terms are finite.
    return never_above or bool(size * largest < SAFE_SUM)
