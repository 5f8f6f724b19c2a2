"""Writes a whole ds4-tiny, with the metadata and digests of an artifact of ds4q."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ds4q.artifact.hfq import ARCH_DEEPSEEK4
from ds4q.artifact.metadata import BLANK_DIGEST, canonical, front_digest, seal
from ds4q.artifact.report import Check
from ds4q.artifact.types import PRIVATE
from ds4q.artifact.writer import TensorSpec, layout
from tests.runtime import artifacts

TINY = artifacts.DATA / "ds4-tiny"
FINGERPRINT = "f" * 64

Made = Callable[..., Path]
Measure = Callable[..., Check]


def write(
    path: Path,
    tensors: dict[str, artifacts.Packed],
    config: dict[str, Any],
    others: dict[str, Any],
    ours: dict[str, Any],
) -> Path:
    """Write ``tensors``; the other three go over the config, the metadata and its ``ds4q``."""
    kinds = Counter(kind.name for kind, _, _ in tensors.values())
    private = any(kind.id >= PRIVATE for kind, _, _ in tensors.values())
    blank: dict[str, Any] = {"metadata_xxh3": BLANK_DIGEST, "index_xxh3": BLANK_DIGEST}
    blank |= {"k256": True, "private_qt": private}
    metadata: dict[str, Any] = {
        "config": artifacts.config_of(TINY) | config,
        "tokenizer": (TINY / "tokenizer.json").read_text("utf-8"),
        "generation_config": json.loads((TINY / "generation_config.json").read_text("utf-8")),
        "hipfire_recipe_census": dict(kinds),
        "ds4q": blank | {"recipe": "fp4", "source_fingerprint": FINGERPRINT} | ours,
    }
    metadata |= others
    names = sorted(tensors)
    specs = [TensorSpec(name, tensors[name][0].id, tensors[name][1]) for name in names]
    plan = layout(specs, len(canonical(metadata)), arch_id=ARCH_DEEPSEEK4)
    metadata["ds4q"]["index_xxh3"] = front_digest(plan.header, plan.index)
    payloads = b"".join(tensors[name][2].tobytes() for name in names)
    path.write_bytes(plan.front(seal(metadata)) + payloads)
    return path
