"""Owns products of packed matrices as a step launches them: those of one decoder in one launch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from ds4q.hipkern import matrix as packing
from ds4q.runtime.backend.hip import Launch, Shown
from ds4q.runtime.device.layout import Place
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
    """Products of one decoder that one launch computes."""

    decoder: int
    jobs: Place
    count: int
    blocks: int


def linear_groups(source: DeviceSource, jobs: Sequence[Job]) -> list[Group]:
    """Products with their tables, those of one decoder together."""
    by_decoder: dict[int, list[Job]] = {}
    for job in jobs:
        by_decoder.setdefault(job.matrix.decoder, []).append(job)
    groups = []
    for decoder, own in by_decoder.items():
        table = source.table(packing.JOB_BYTES * len(own), partial(_packed_jobs, own))
        blocks = sum(job.matrix.blocks for job in own)
        groups.append(Group(decoder, table, len(own), blocks))
    return groups


def linear(groups: Sequence[Group], tokens: int, shows: tuple[Shown, ...] = ()) -> Iterator[Launch]:
    """The launches of ``groups``; ``shows`` is for the last."""
    for group in groups:
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
