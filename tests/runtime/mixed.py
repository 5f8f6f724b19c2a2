"""Owns an artifact whose experts carry every ROCmFPX type, mixed within a layer and an expert.

Two layers are re-encoded from the checkpoint's own values; the rest stays lossless.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from ds4q.artifact.codings import rocmfpx_metadata
from ds4q.artifact.formats import Coding, MixRow, codec_for
from ds4q.artifact.tables import KINDS, Table, expert_name, expert_of
from ds4q.artifact.types import (
    F32,
    HFP4G32,
    RAW,
    ROCMFP2,
    ROCMFP2_MIX,
    ROCMFP3,
    ROCMFP3_MIX,
    ROCMFP4,
    ROCMFP4_FAST,
    ROCMFP6,
    ROCMFP8,
    TensorType,
)
from tests.runtime.artifacts import Packed
from tests.runtime.backend.packs import THREE_BIT, TWO_BIT

LAYERS = (2, 3)
EXPERTS = 16
Choice = tuple[TensorType, Coding | None]


def choices(variant: str, code32: str, mixed: tuple[Choice, ...]) -> list[Choice]:
    """A type for each of ``EXPERTS`` experts, in turn; ``mixed`` are those with tables."""
    plain: list[Choice] = [
        (HFP4G32, None),
        (ROCMFP4, None),
        (ROCMFP2, variant),
        (ROCMFP4_FAST, None),
        (ROCMFP6, code32),
        (ROCMFP8, None),
        (ROCMFP3, None),
    ]
    cycle = [*plain, *mixed]
    return [cycle[number % len(cycle)] for number in range(EXPERTS)]


def plan(variant: str, code32: str) -> Iterator[tuple[str, Choice]]:
    """Name and type of every matrix to be re-encoded; downs are shifted against gates."""
    two: tuple[Choice, ...] = ((ROCMFP2_MIX, MixRow(0, b"")), (ROCMFP2_MIX, TWO_BIT))
    three: tuple[Choice, ...] = ((ROCMFP3_MIX, MixRow(0, b"")), (ROCMFP3_MIX, THREE_BIT))
    for layer, down in zip(LAYERS, (three, two), strict=True):
        gates, downs = choices(variant, code32, two), choices(variant, code32, down)
        for number in range(EXPERTS):
            for part in ("w1", "w3"):
                yield expert_name(layer, number, part), gates[number]
            yield expert_name(layer, number, "w2"), downs[(number + 5) % EXPERTS]


def encode(
    tensors: dict[str, Packed], variant: str, code32: str
) -> tuple[dict[str, Packed], dict[str, Packed], dict[str, Any]]:
    """``tensors`` with re-encoded experts, the same values as F32, and the metadata object."""
    made, plain = dict(tensors), dict(tensors)
    rows: dict[tuple[int, str], dict[int, MixRow]] = {}
    for name, (kind, coding) in plan(variant, code32):
        source, shape, payload = tensors[name]
        codec = codec_for(kind.id, coding)
        if kind is not source:
            payload = codec.encode(codec_for(source.id).decode(payload, shape))
        made[name] = (kind, shape, payload)
        values = codec.decode(payload, shape)
        plain[name] = (F32, shape, codec_for(F32.id).encode(values))
        if isinstance(coding, MixRow):
            layer, number, part = expert_of(name) or (0, 0, "")
            rows.setdefault((layer, part), {})[number] = coding
    digests = {}
    for (layer, part), own in rows.items():
        kind, (out, in_), _ = made[expert_name(layer, min(own), part)]
        every = tuple(own.get(number) for number in range(EXPERTS))
        table = Table(KINDS[kind.id].name, layer, part, out, in_, every)
        raw = table.encode()
        made[table.name] = (RAW, (len(raw),), np.frombuffer(raw, dtype=np.uint8))
        digests[table.name] = hashlib.sha256(raw).hexdigest()
    metadata = rocmfpx_metadata(
        {name: packed[0].id for name, packed in made.items()},
        calibration="absmax",
        variant_107=variant,
        fp6_code32=code32,
        digests=digests,
    )
    return made, plain, metadata
