"""What can be asked of an expert store: contradictions are refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ds4q.runtime.errors import CacheError
from ds4q.runtime.experts.options import CacheOptions
from tests.checks import check_refused

FILE = Path("file")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"budget": -1}, "negative budget"),
        ({"budget": 1, "slots": 4}, "exclude each other"),
        ({"budget": 1, "owner": (2, 2)}, "found 2/2"),
        ({"budget": 1, "owner": (-1, 2)}, "expected RANK/RANKS"),
        ({"owner": (0, 2)}, "--cold none"),
        ({"cold": "none"}, "--expert-owner"),
        ({"policy": "lru"}, "--expert-cache"),
        ({"owner": (0, 2), "cold": "none", "policy": "lru"}, "--expert-cache"),
        ({"profile": FILE}, "--expert-cache"),
        ({"adapter": FILE}, "--expert-cache"),
        ({"budget": 1, "prefetch_top": 3}, "--prefetch"),
        ({"budget": 1, "require_receipt": True, "check_reads": False}, "--no-check-reads"),
        ({"budget": 1, "trace_states": True}, "--trace"),
    ],
)
def test_contradictions_are_refused(given: dict[str, Any], says: str) -> None:
    check_refused(CacheError, lambda: CacheOptions(**given), says=[says])


@pytest.mark.parametrize(
    ("given", "paged"),
    [
        ({"budget": 0}, True),  # the artifact tells the minimum
        ({"budget": "auto", "policy": "lru", "require_receipt": True}, True),
        ({"slots": 4, "adapter": FILE, "prefetch_top": 1}, True),
        ({"budget": 1, "owner": (1, 2)}, True),
        ({"owner": (1, 2), "cold": "none"}, False),
        ({"owner": (1, 2), "cold": "none", "budget": 1}, False),
        ({"trace": FILE, "trace_states": True}, False),
    ],
)
def test_what_pages(given: dict[str, Any], paged: bool) -> None:
    assert CacheOptions(**given).paged is paged
