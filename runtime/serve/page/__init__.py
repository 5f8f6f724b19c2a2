"""Owns the page that a server shows: its files, and what a browser may do with them. No server."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources

FILES: Mapping[str, str] = {
    "index.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
    **dict.fromkeys(
        ("page.js", "api.js", "chat.js", "heatmap.js", "live.js", "markdown.js", "store.js"),
        "text/javascript; charset=utf-8",
    ),
}
"""Name -> media type of each file; ``index.html`` is the page, the others its parts."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content-Security-Policy: what comes from the server itself, and nothing inline."""

HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": POLICY,
    "Cache-Control": "no-cache",  # a server that was updated shows its own page
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
"""What goes with each file, beside its media type."""


def read(name: str) -> bytes:
    """The bytes of a file of ``FILES``; ``KeyError`` for any other name."""
    if name not in FILES:
        raise KeyError(name)
    return resources.files(__name__).joinpath(name).read_bytes()
