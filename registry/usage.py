"""Owns what a registry says of how a file on disk is run. Opens no artifact and loads no document.

A file is a registered one by its plain name, and by its length where the entry has one: nothing is
hashed for a default.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from ds4q.registry import sources
from ds4q.registry.entries import Entry, Registry, load_registry, local_registry_path


def registry_naming(path: Path) -> Registry | None:
    """The registry to use, had without a connection; None where it does not hold the file's name.

    Raises as ``load_registry``.
    """
    return load_registry(offline=True) if _may_name(path.name) else None


def _may_name(name: str) -> bool:
    """Whether a document at hand holds ``name``: what has no entry need not wait for its check."""
    if sources.configured() is not None or not re.fullmatch(r"[\w.-]+", name, re.ASCII):
        return True
    local = local_registry_path()
    documents = [sources.bundled()]
    if local.exists():
        documents.append(sources.read_file(str(local)))
    return any(name.encode() in document for document in documents)


def entries_of(registry: Registry, path: Path) -> list[Entry]:
    """The entries whose file ``path`` is, by tag. Raises ``OSError`` where there is no file."""
    size_bytes = path.stat().st_size
    return [
        entry
        for _, entry in sorted(registry.entries.items())
        if entry.file == path.name and entry.size_bytes in (None, size_bytes)
    ]


def kv_modes(entries: Sequence[Entry]) -> dict[str, list[str]]:
    """Each ``default_kv_mode`` that entries name -> their tags; empty where none names one."""
    found: dict[str, list[str]] = {}
    for entry in entries:
        mode = entry.raw.get("default_kv_mode")
        if mode is not None:
            found.setdefault(str(mode), []).append(entry.tag)
    return found
