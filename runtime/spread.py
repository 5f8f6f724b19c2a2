"""Owns how a model is spread over ranks and devices, and the refusal of what cannot be done yet."""

from __future__ import annotations

from dataclasses import dataclass

from ds4q.runtime.errors import SpreadError


@dataclass(frozen=True, slots=True)
class Spread:
    """What a model runs on.

    Parameters
    ----------
    tensor_parallel : ranks that share every matrix
    devices : kinds of devices that layers are routed over
    """

    tensor_parallel: int = 1
    devices: tuple[str, ...] = ("cpu",)

    def check(self, *, paged: bool) -> None:
        """Refuse what is not there yet; ``paged``: experts are read on demand.

        Raises
        ------
        SpreadError : more than one rank or device
        """
        if len(self.devices) > 1:
            raise SpreadError(
                f"layers routed over several devices ({', '.join(self.devices)})",
                expected="one device for all layers",
                remedy="name one device; missing are a copy of the streams from device to device "
                "and, for paged experts, a pager of each device's own layers",
            )
        ranks = self.tensor_parallel
        if ranks == 1:
            return
        if ranks < 1:
            raise SpreadError("number of ranks", expected="1 or more", found=ranks)
        if not paged:
            raise SpreadError(
                "tensor parallelism: there are no ranks yet",
                expected="--tensor-parallel 1",
                found=ranks,
                remedy="run on one; missing are processes that each hold their part of every "
                "matrix, and the sum over them",
            )
        raise SpreadError(
            "tensor parallelism with a paged expert cache",
            expected="--tensor-parallel 1",
            found=ranks,
            remedy="run on one rank; missing are (1) ranks, and the sum of their parts in the "
            "order of k, (2) a fill transform for every tensor type of the artifact, given to each "
            "rank's pager, (3) a neutrality gate over ranks. This guard goes when all three are "
            "there",
        )
