"""Owns small registry documents for tests: two DeepSeek entries and an alias, to be broken."""

from __future__ import annotations

import copy
import json
from typing import Any

SHA_A = "a" * 64
SHA_B = "b" * 64
TIME = "2026-08-14T08:32:49Z"


def entry(**changes: Any) -> dict[str, Any]:
    """An entry of 1 GB that every check accepts; ``None`` as a value takes a key away."""
    made: dict[str, Any] = {
        "repo": "owner/name",
        "file": "flash.fp4",
        "desc": "a model",
        "size_gb": 1,
        "min_vram_gb": 2,
        "sha256": SHA_A,
        "size_bytes": 10**9,
        "arch_id": 9,
        "quant": "fp4",
    } | changes
    return {key: value for key, value in made.items() if value is not None}


def document(
    models: dict[str, Any] | None = None, aliases: dict[str, str] | None = None, **changes: Any
) -> dict[str, Any]:
    """A document of these entries, else of one."""
    return copy.deepcopy(
        {
            "schema_version": 1,
            "generated_at": TIME,
            "models": models if models is not None else {"deepseek-v4-flash": entry()},
            "aliases": aliases or {},
        }
        | changes
    )


def raw(value: Any) -> bytes:
    """JSON text of ``value``."""
    return json.dumps(value).encode()
