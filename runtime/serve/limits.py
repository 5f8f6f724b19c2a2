"""Owns what a server allows one client to ask of it: sizes, times, addresses. Enforces nothing."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

BODY_BYTES = 16 << 20
DEFAULT_MAX_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Limits:
    """What is allowed.

    Attributes
    ----------
    body_bytes : of a request
    max_context : most tokens of a prompt and its answer; None: what the model was loaded for
    default_max_tokens : most new tokens of a request that names no number
    keep_alive_s : a stream that has nothing to say for so long gets a comment
    body_idle_s : most seconds between two pieces of a request's body
    request_s : most seconds from a request to the end of its answer; None: no limit
    local_only : without a key, answer only requests that name this machine as their host
    """

    body_bytes: int = BODY_BYTES
    max_context: int | None = None
    default_max_tokens: int = DEFAULT_MAX_TOKENS
    keep_alive_s: float = 15.0
    body_idle_s: float = 30.0
    request_s: float | None = None
    local_only: bool = True


def is_loopback(host: str) -> bool:
    """Whether ``host`` names this machine to itself: ``localhost``, 127.0.0.0/8 or ::1."""
    name = host.lower().rstrip(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
