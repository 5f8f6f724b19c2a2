"""The index of a sharded checkpoint: which shard holds each tensor. Opens no shard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ds4q.quantize.errors import JsonFileError, ShardNameError
from ds4q.quantize.safetensors import parse_json

INDEX = "model.safetensors.index.json"
SUFFIX = ".safetensors"
MAX_NAME_BYTES = 255  # of a file or folder
MAX_FOLDERS = 8  # on the way to a shard, the shard counted


def parse_index(raw: bytes, path: Path) -> tuple[dict[str, str], int | None]:
    """``weight_map`` with every shard name checked, and ``total_size`` where it is given.

    A leading ``./`` of a shard name is dropped.
    """
    index = parse_json(raw, path)
    weight_map, metadata = index.get("weight_map"), index.get("metadata", {})
    if not isinstance(weight_map, dict) or not weight_map:
        raise JsonFileError("weight_map must be an object that names tensors", path=path)
    checked: set[str] = set()
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or shard not in checked:
            check_shard_name(shard, path, name)
            checked.add(shard)
    places = {name: shard.removeprefix("./") for name, shard in weight_map.items()}
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return places, int(total) if isinstance(total, (int, float)) else None


def check_shard_name(shard: Any, path: object, tensor: str) -> None:
    """Refuse what is not a file in the folder or below; where links lead does not matter."""
    parts = shard.removeprefix("./").split("/") if isinstance(shard, str) else []
    if (
        not isinstance(shard, str)
        or not shard.endswith(SUFFIX)
        or not shard.isprintable()
        or any(part in ("", ".", "..") or len(part.encode()) > MAX_NAME_BYTES for part in parts)
        or len(parts) > MAX_FOLDERS
        or "\\" in shard
    ):
        raise ShardNameError(path=path, tensor=tensor, found=repr(shard))
