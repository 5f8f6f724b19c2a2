"""Owns what a hub answers about a repo, for tests that serve one themselves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "owner/name"


def hub_page(
    files: Mapping[str, tuple[int | None, str | None]], commit: str | None = COMMIT
) -> Any:
    """The hub's answer about a repo, as its API gives it."""
    siblings = []
    for name, (size, sha256) in files.items():
        sibling: dict[str, Any] = {"rfilename": name, "size": size}
        if sha256:
            sibling["lfs"] = {"sha256": sha256, "size": size, "pointerSize": 134}
        siblings.append(sibling)
    body = json.dumps({"id": REPO, "sha": commit, "siblings": siblings}).encode()
    return lambda request: (200, {"Content-Type": "application/json"}, body)
