"""Owns models folders of a few bytes a file, and small artifacts with receipt and draft."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from ds4q.registry.entries import Registry, read_document
from ds4q.registry.store import Store
from tests.quantize import models
from tests.registry.documents import document, entry, raw


def registry_of(
    entries: dict[str, dict[str, Any]], aliases: dict[str, str] | None = None
) -> Registry:
    """A registry of these entries; those without arch and quant get what ``documents`` gives."""
    return read_document(raw(document(entries, aliases)), "a test")


def registered(name: str, data: bytes, **changes: Any) -> dict[str, Any]:
    """An entry for a file of these bytes; ``changes`` are sidecars and whatever else."""
    known = {"file": name, **described(data), "size_gb": len(data) / 1e9}
    return entry(**(known | changes))


def described(data: bytes) -> dict[str, Any]:
    """Digest and length of ``data``, as entries and sidecars carry them."""
    return {"sha256": hashlib.sha256(data).hexdigest(), "size_bytes": len(data)}


def sidecar(name: str, data: bytes) -> dict[str, Any]:
    """A sidecar of these bytes."""
    return {"file": name, **described(data)}


def filled(folder: Path, files: dict[str, bytes]) -> Store:
    """A store whose folder holds these files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return Store(folder)


def made(folder: Path, name: str = "x.hfq", seed: int = 0) -> Path:
    """An artifact of a small checkpoint in ``folder``, with its receipt and its draft beside it."""
    source = models.mini(folder.parent / f"source-{seed}", seed)
    folder.mkdir(parents=True, exist_ok=True)
    models.run(source, folder / name)
    return folder / name
