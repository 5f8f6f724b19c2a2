"""Owns products of packed matrices as a step launches them: those of one decoder in one launch.

Where weights are rotated, so are the activations before, into a place that all such products share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ds4q.hipkern import matrix as packing
from ds4q.runtime.backend.hip import Launch, Shown
from ds4q.runtime.device.layout import Place
from ds4q.runtime.device.scratch import Scratch
from ds4q.runtime.device.weights import DeviceSource, Matrix


@dataclass(frozen=True, slots=True)
class Job:
    """One product: y [T, rows] of x [T, stride], both f32.

    ``x_first``, ``y_first``: floats of a row before what the matrix reads and writes. ``y_stride``
    0 is the matrix's own rows.
    """

    matrix: Matrix
    x: Place
    x_stride: int
    y: Place
    x_first: int = 0
    y_first: int = 0
    y_stride: int = 0


@dataclass(frozen=True, slots=True)
class Group:
    """Products of one decoder that one launch computes; ``rotation`` goes before it."""

    decoder: int
    jobs: Place
    count: int
    blocks: int
    rotation: Rotation | None


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotated rows ``to`` [T, cols] of rows ``x`` [T, cols], both f32."""

    x: Place
    to: Place
    cols: int

    def launch(self, tokens: int) -> Launch:
        """Of ``tokens`` rows."""
        return Launch(
            "rotate.hip",
            "rotate",
            packing.rotate_grid(self.cols, tokens),
            (self.x.address, self.to.address, self.cols),
        )


def linear_groups(source: DeviceSource, jobs: Sequence[Job], scratch: Scratch) -> list[Group]:
    """Products with their tables, those of one decoder together.

    Where weights are rotated, all jobs read rows of one and the same ``x``.
    """
    by_decoder: dict[int, list[Job]] = {}
    for job in jobs:
        by_decoder.setdefault(job.matrix.decoder, []).append(job)
    groups = []
    for decoder, own in by_decoder.items():
        rotation = None
        if decoder in packing.ROTATED:
            rotation = Rotation(own[0].x, scratch.rotated, own[0].x_stride)
            own = [replace(job, x=scratch.rotated) for job in own]
        table = source.table(packing.JOB_BYTES * len(own), partial(_packed_jobs, own))
        blocks = sum(job.matrix.blocks for job in own)
        groups.append(Group(decoder, table, len(own), blocks, rotation))
    return groups


def linear(groups: Sequence[Group], tokens: int, shows: tuple[Shown, ...] = ()) -> Iterator[Launch]:
    """The launches of ``groups``; ``shows`` is for the last."""
    for group in groups:
        if group.rotation is not None:
            yield group.rotation.launch(tokens)
        yield Launch(
            "linear.hip",
            packing.linear_kernel(tokens),
            (group.blocks, 1, 1),
            (group.jobs.address, group.count, tokens),
            {"DS4Q_DECODER": group.decoder},
            shows if group is groups[-1] else (),
        )


def _packed_jobs(jobs: Sequence[Job]) -> bytes:
    packed, first_block = [], 0
    for job in jobs:
        packed.append(
            packing.pack_job(
                job.matrix.packed(),
                job.x.address + 4 * job.x_first,
                job.y.address + 4 * job.y_first,
                job.x_stride,
                job.y_stride or job.matrix.rows,
                first_block,
            )
        )
        first_block += job.matrix.blocks
    return b"".join(packed)
