"""Owns the socket that a server listens on. Knows nothing of what is served."""

from __future__ import annotations

import socket
from typing import Any

from ds4q.runtime.errors import ServeError

BACKLOG = 1024


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on ``host``; port 0 takes a free one.

    Raises ``ServeError`` where the address cannot be had.
    """
    family, kind, protocol, address = resolve(host, port)
    try:
        found = socket.socket(family, kind, protocol)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
            found.listen(BACKLOG)
        except OSError:
            found.close()
            raise
    except OSError as error:
        raise ServeError(
            f"cannot listen on {host} port {port}",
            found=error.strerror,
            remedy="choose another --port or --host",
        ) from None
    return found


def resolve(host: str, port: int) -> tuple[int, int, int, Any]:
    """Family, type, protocol and address of a socket for ``host``; ``ServeError`` without any."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:  # the second for what can be no name at all
        raise ServeError(
            f"cannot listen on {host}: the name cannot be resolved",
            found=error.strerror if isinstance(error, OSError) else "what is no host's name",
            remedy="choose another --host",
        ) from None
    return family, kind, protocol, address


def url(listening: socket.socket) -> str:
    """The address of a listening socket, as a client writes it."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
