"""Owns what can be asked of an expert store: how much memory, which policy, whose experts.

It opens nothing and keeps nothing; whoever loads a model checks the files that are named here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ds4q.runtime.errors import CacheError

Budget = int | Literal["auto"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """How routed experts are kept; without ``budget`` and ``slots`` all are held in memory.

    Parameters
    ----------
    budget : bytes of slots over all layers, or "auto" for what memory leaves
    slots : in place of a budget: experts of a layer that are in memory at a time; as many as there
        are still page
    policy : name of the rule that chooses what is evicted; None takes the default
    profile : a warm-start profile of the same artifact
    adapter : an expert predictor of the same artifact; turns speculative prefetch on
    prefetch_top : experts that a prediction may ask for, per layer and token; None takes the
        predictor's own
    owner : (rank, ranks): only this rank's experts are held, the others contribute zero
    cold : "none": experts that are not in memory are nowhere, so all that are owned are held, and
        ``budget`` only says how much that may be
    check_reads : compare every tensor that is read with the digests of the artifact's receipt
    require_receipt : an artifact without a receipt of its own is an error
    trace : file that every dispatch is recorded in
    trace_states : the routers' inputs and scores are recorded beside it

    Raises
    ------
    CacheError : options that contradict each other
    """

    budget: Budget | None = None
    slots: int | None = None
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
        if isinstance(self.budget, int) and self.budget < 0:
            raise CacheError("negative budget", expected="bytes", found=self.budget)
        if self.owner is not None and not 0 <= self.owner[0] < self.owner[1]:
            raise CacheError(
                "expert owner out of range",
                expected="RANK/RANKS with RANK from 0 to RANKS - 1",
                found="/".join(map(str, self.owner)),
            )
        for forbidden, says in (
            (
                self.budget is not None and self.slots is not None,
                "a budget and a number of slots exclude each other",
            ),
            (
                self.cold is not None and self.owner is None,
                "'cold none' belongs to a rank's own experts: name the owner (--expert-owner)",
            ),
            (
                self.owner is not None and self.cold is None and not self.paged,
                "an expert owner holds all of its experts (--cold none) or pages them "
                "(--expert-cache): choose one",
            ),
            (
                not self.paged and bool(self.policy or self.profile or self.adapter),
                "policy, profile and prefetch belong to a paged expert cache (--expert-cache)",
            ),
            (
                self.prefetch_top is not None and self.adapter is None,
                "how many experts to prefetch belongs to a predictor (--prefetch)",
            ),
            (
                self.require_receipt and not self.check_reads,
                "a required receipt (--require-receipt) is there to check reads with "
                "(--no-check-reads)",
            ),
            (
                self.trace_states and self.trace is None,
                "router states are recorded beside a trace (--trace)",
            ),
        ):
            if forbidden:
                raise CacheError(says)

    @property
    def plain(self) -> bool:
        """Whether all experts are simply held in memory, and nothing is recorded."""
        checks = CacheOptions(check_reads=self.check_reads, require_receipt=self.require_receipt)
        return self == checks

    @property
    def paged(self) -> bool:
        """Whether experts are read on demand, where not all of them fit."""
        return self.cold is None and (self.budget is not None or self.slots is not None)
