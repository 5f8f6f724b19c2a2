"""Which files of a folder are shards, and which shard holds each tensor. Opens no shard."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ds4q.quantize.errors import JsonFileError, ShardNameError
from ds4q.quantize.safetensors import parse_json

INDEX = "model.safetensors.index.json"
SUFFIX = ".safetensors"
MAX_NAME_BYTES = 255  # of a file or folder
MAX_FOLDERS = 8  # on the way to a shard, the shard counted
# aria2, axel and lftp allocate a file in full under its final name. One of these files lies beside
# it until the download is complete; the header may be whole while most of the data is zeros.
UNFINISHED = (".aria2", ".st", ".lftp-pget-status")

_OF_MANY = re.compile(r"-\d{5}-of-(\d{5})\.safetensors$", re.ASCII)


def shard_names(names: Iterable[str]) -> list[str]:
    """The shards among the names of a folder, sorted; hidden files are not among them.

    Other programs leave hidden files beside those of the user: ``._model.safetensors`` is what
    macOS puts on a foreign file system, ``.#model.safetensors`` the lock of an editor.
    """
    return sorted(name for name in names if name.endswith(SUFFIX) and not name.startswith("."))


def absent_of_many(present: list[str]) -> list[str]:
    """Names missing from a ``model-00001-of-00048.safetensors`` series."""
    matches = [(name, _OF_MANY.search(name)) for name in present]
    series = {(name[: m.start()], m.group(1)) for name, m in matches if m}
    whole = {
        f"{stem}-{i:05d}-of-{count}{SUFFIX}"
        for stem, count in series
        for i in range(1, int(count) + 1)
    }
    return sorted(whole - set(present))


def like(names: Iterable[str], wanted: str) -> str:
    """Words that name what resembles a missing file, as an unfinished download does; or none."""
    found = sorted(name for name in names if wanted.lower() in name.lower())
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return f"; there is {found[0]}{more}" if found else ""


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
