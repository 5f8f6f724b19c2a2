"""Owns ds4-tiny as hipfire's recipe packs it: experts in MQ2G256Lloyd, dense matrices in Q8F16.

The metadata is upstream's, with no object of ds4q's; there is no receipt.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ds4q.artifact.formats import codec_for
from ds4q.artifact.tables import expert_of
from ds4q.artifact.types import F32, MQ2_LLOYD, Q8F16
from tests.artifact import mq2
from tests.runtime.artifacts import DATA, Packed, config_of, pack, write

TINY = DATA / "ds4-tiny"
LLOYD_STEPS = 2


def metadata() -> dict[str, Any]:
    """What upstream's packer says of itself and of the model."""
    return {
        "architecture": "deepseek_v4",
        "hipfire_quant_recipe": "mq2lloyd",
        "tokenizer": (TINY / "tokenizer.json").read_text("utf-8"),
        "tokenizer_config": json.loads((TINY / "tokenizer_config.json").read_text("utf-8")),
        "generation_config": json.loads((TINY / "generation_config.json").read_text("utf-8")),
    }


def packed() -> dict[str, Packed]:
    """The tensors of the trunk."""
    made = pack(TINY, Q8F16)
    for name, (kind, shape, payload) in made.items():
        if expert_of(name) is not None:
            values = codec_for(kind.id).decode(payload, shape)
            made[name] = MQ2_LLOYD, shape, mq2.encode(values, LLOYD_STEPS)
    return made


def unpacked(tensors: dict[str, Packed]) -> dict[str, Packed]:
    """The same weights, those in MQ2G256Lloyd as F32."""
    plain = dict(tensors)
    for name, (kind, shape, payload) in tensors.items():
        if kind is MQ2_LLOYD:
            values = codec_for(kind.id).decode(payload, shape)
            plain[name] = F32, shape, codec_for(F32.id).encode(values)
    return plain


def write_trunk(path: Path, tensors: dict[str, Packed]) -> Path:
    """As an artifact with upstream's metadata."""
    return write(path, config_of(TINY), tensors, **metadata())
