"""Owns which routed experts a rank holds. Neither places nor reads them.

Ranks hold contiguous ranges, as even as their number allows: 7 experts over 4 ranks are 2, 2, 2, 1.
So every expert belongs to exactly one rank, also where the division leaves a rest.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds4q.runtime.errors import OwnershipError


@dataclass(frozen=True, slots=True)
class ExpertOwnership:
    """The experts ``start`` to ``stop - 1`` of every layer; the others contribute zero here."""

    start: int
    stop: int

    @classmethod
    def all(cls, experts: int) -> ExpertOwnership:
        """Every expert, of one rank alone."""
        return cls.of_rank(0, 1, experts)

    @classmethod
    def of_rank(cls, rank: int, ranks: int, experts: int) -> ExpertOwnership:
        """The part of ``rank``; nothing where there are no experts.

        Raises
        ------
        OwnershipError : no such rank
        """
        if not 0 <= rank < ranks:
            raise OwnershipError(expected=f"0 to {ranks - 1}", found=rank)
        share, rest = divmod(max(experts, 0), ranks)
        start = rank * share + min(rank, rest)
        return cls(start, start + share + (rank < rest))

    def owns(self, expert: int) -> bool:
        """Whether this rank holds ``expert``."""
        return self.start <= expert < self.stop

    @property
    def owned(self) -> tuple[int, ...]:
        """Ids that this rank holds, ascending."""
        return tuple(range(self.start, self.stop))
