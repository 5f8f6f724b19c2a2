"""Owns what can be asked of an expert store: how much memory, which policy, whose experts.

It opens nothing and keeps nothing; a store checks the files that are named here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ds4q.runtime.errors import CacheError

Budget = int | Literal["auto"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """How routed experts are kept.

    Parameters
    ----------
    budget : bytes of slots over all layers, or "auto" for what memory leaves; None keeps all
        experts that are owned in memory
    policy : name of the rule that chooses what is evicted; None takes the default
    profile : a warm-start profile of the same artifact
    adapter : an expert predictor of the same artifact; turns speculative prefetch on
    prefetch_top : experts that a prediction may ask for, per layer and token; None takes the
        predictor's own
    owner : (rank, ranks): only this rank's experts are held, the others contribute zero
    cold : "none": experts that are not in memory are nowhere, so all that are owned must fit
    check_reads : compare what is read with the digests of the artifact's receipt
    require_receipt : an artifact without a receipt of its own is an error
    trace : file that every dispatch is recorded in
    trace_states : the trace holds the routers' inputs and scores, too

    Raises
    ------
    CacheError : options that contradict each other
    """

    budget: Budget | None = None
    policy: str | None = None
    profile: Path | None = None
    adapter: Path | None = None
    prefetch_top: int | None = None
    owner: tuple[int, int] | None = None
    cold: Literal["none"] | None = None
    check_reads: bool = True
    require_receipt: bool = False
    trace: Path | None = None
    trace_states: bool = False

    def __post_init__(self) -> None:
        if self.budget != "auto" and self.budget is not None and self.budget < 1:
            raise CacheError("an expert cache of no bytes", expected="1 or more", found=self.budget)
        if self.owner is not None:
            rank, ranks = self.owner
            if not 0 <= rank < ranks:
                raise CacheError(
                    "expert owner out of range",
                    expected=f"0/{ranks} and up",
                    found=f"{rank}/{ranks}",
                )
        for missing, says in self._contradictions():
            if missing:
                raise CacheError(says)

    def _contradictions(self) -> tuple[tuple[bool, str], ...]:
        paged = self.budget is not None and self.cold is None
        return (
            (
                self.budget is None and self.cold is None,
                "no expert cache is asked for: give a budget, or an owner without cold experts",
            ),
            (
                self.cold is not None and self.owner is None,
                "no cold experts (--cold none) belongs to a rank's own experts (--expert-owner)",
            ),
            (
                not paged and self.profile is not None,
                "a warm-start profile belongs to a paged expert cache (--expert-cache)",
            ),
            (
                not paged and self.adapter is not None,
                "prefetch belongs to a paged expert cache (--expert-cache)",
            ),
            (
                self.prefetch_top is not None and self.adapter is None,
                "how many experts to prefetch (--prefetch-top) belongs to a predictor (--prefetch)",
            ),
            (
                not self.check_reads and self.require_receipt,
                "a required receipt is for checking reads: it excludes leaving the checks out",
            ),
            (
                self.trace_states and self.trace is None,
                "router states (--trace-states) are recorded in a trace (--trace)",
            ),
        )
