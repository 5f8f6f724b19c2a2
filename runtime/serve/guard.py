"""Owns what is checked of every request before anything else: key, origin, size, pace.

A layer around the application (ASGI). What it refuses never reaches an endpoint, and a body that is
too large is never read as a whole.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
from collections.abc import Callable
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ds4q.artifact.errors import one_line
from ds4q.runtime.serve.limits import Limits, is_loopback
from ds4q.runtime.serve.refusal import Refusal, cut, shutting_down
from ds4q.runtime.serve.respond import refused

OPEN_PATHS = ("/", "/health", "/openapi.json", "/docs")
"""What needs no key: it holds nothing secret and costs nothing. Everything else does."""

PAGE_PATHS = "/page/"
HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([0-9A-Za-z._-]+))(?::[0-9]*)?")
"""An address in brackets or a name, and a port; user, path and fragment belong to no host."""

LINGER_BYTES = 64 << 20
LINGER_S = 2.0

log = logging.getLogger("ds4q.serve")


class Guard:
    """Lets requests through to ``app``, or answers them itself.

    Parameters
    ----------
    api_key : what ``Authorization: Bearer`` must say; None: no key is needed
    count : called with path and status of what is refused here
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        limits: Limits,
        api_key: str | None,
        count: Callable[[str, int], None],
    ) -> None:
        self._app = app
        self._limits = limits
        self._key = None if api_key is None else api_key.encode()
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = _origin_form(scope)
        started, status = time.monotonic(), 0
        body = _Body(receive, send, self._limits)

        async def tell(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await body.send(message)

        headers = Headers(scope=scope)
        try:
            refusal = self._refusal(scope["method"], scope["path"], headers)
            if refusal is not None:
                refusal.headers["Connection"] = "close"  # its body, if it has one, is not wanted
                self._count(scope["path"], refusal.status)
                await refused(refusal)(scope, body.receive, tell)
            else:
                await self._app(scope, body.receive, tell)
        except asyncio.CancelledError:  # the server does not wait any longer
            if not status:
                await refused(shutting_down())(scope, body.receive, tell)
            raise
        finally:
            seconds = time.monotonic() - started
            path = one_line(scope["path"])
            log.info("%s %s %d, %.3f s", scope["method"], path, status, seconds)

    def _refusal(self, method: str, path: str, headers: Headers) -> Refusal | None:
        if "content-length" in headers and "transfer-encoding" in headers:
            # A proxy in front may believe the other one, and take its end for a request's begin.
            return Refusal(400, "both Content-Length and Transfer-Encoding", code="invalid_http")
        is_open = path in OPEN_PATHS or path.startswith(PAGE_PATHS)
        if self._key is None:
            if (refusal := self._foreign(method, headers)) is not None:
                return refusal
        elif not is_open and not self._authorized(headers):
            given = "authorization" in headers
            return Refusal(
                401,
                "wrong API key" if given else "an API key is needed: Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        length = headers.get("content-length", "0")
        if length.isdecimal() and (len(length) > 18 or int(length) > self._limits.body_bytes):
            return too_large(self._limits)
        return None

    def _authorized(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        matches = hmac.compare_digest(key.strip().encode(), self._key or b"")
        return scheme.lower() == "bearer" and matches

    def _foreign(self, method: str, headers: Headers) -> Refusal | None:
        """Refuse what a browser sends for a page of another site, before any key is asked for.

        A browser sends no Origin with a GET for an image or a script, but Sec-Fetch-Site. A user
        may still follow a link to here: what is shown as a page is out of the other page's reach.
        """
        host = headers.get("host", "")
        if self._limits.local_only and not is_loopback(_name(host)):
            return Refusal(
                403,
                f"host {cut(host)!r} is not this machine; "
                "without an API key no other name is answered",
                code="host_not_allowed",
            )
        origin = headers.get("origin")
        own = (f"http://{host}".lower(), f"https://{host}".lower())
        site = headers.get("sec-fetch-site", "none").lower()
        follows_link = (
            method in ("GET", "HEAD")
            and headers.get("sec-fetch-mode") == "navigate"
            and headers.get("sec-fetch-dest") == "document"
        )
        if origin is not None and origin.lower() not in own:
            who = repr(cut(origin))
        elif site not in ("none", "same-origin") and not follows_link:
            who = "another site"
        else:
            return None
        return Refusal(
            403,
            f"a page of {who} may not use this server; set an API key",
            code="origin_not_allowed",
        )


def _origin_form(scope: Scope) -> Scope:
    """A request whose target is a whole URL, as one for its path at its host (RFC 9112, 3.2.2)."""
    scheme, separator, rest = scope["path"].partition("://")
    if not separator or scheme.lower() not in ("http", "https"):
        return scope
    host, _, path = rest.partition("/")
    headers = [each for each in scope["headers"] if each[0] != b"host"]
    headers.append((b"host", host.encode()))
    raw_path = b"/" + scope["raw_path"].partition(b"://")[2].partition(b"/")[2]
    return {**scope, "path": f"/{path}", "raw_path": raw_path, "headers": headers}


def _name(host: str) -> str:
    """The name or address in a Host header; "" where there is none."""
    found = HOST.fullmatch(host)
    return "" if found is None else found[1] or found[2]


def too_large(limits: Limits) -> Refusal:
    """The refusal of a body; its connection cannot be used again."""
    return Refusal(
        413,
        f"the request's body is larger than {limits.body_bytes:,} bytes",
        code="request_too_large",
        headers={"Connection": "close"},
    )


class _Body:
    """A request's body on its way in, and the answer on its way out.

    A client that still sends when the answer is there would lose it with the connection; so what it
    sends is dropped for a while.
    """

    def __init__(self, receive: Receive, send: Send, limits: Limits) -> None:
        self._receive = receive
        self._send = send
        self._limits = limits
        self._seen = 0
        self._complete = False
        self._closes = False

    async def receive(self) -> Message:
        """The next piece; raises ``Refusal`` for one too many, and for none in time."""
        if self._complete:
            return await self._receive()  # waits for the client to leave
        try:
            async with asyncio.timeout(self._limits.body_idle_s):
                message = await self._receive()
        except TimeoutError:
            raise Refusal(
                408,
                f"the request's body has not come within {self._limits.body_idle_s:g} s",
                code="request_timeout",
                headers={"Connection": "close"},
            ) from None
        self._seen += len(message.get("body", b""))
        self._complete = not message.get("more_body", False)
        if self._seen > self._limits.body_bytes:
            raise too_large(self._limits)
        return message

    async def send(self, message: Message) -> None:
        """Pass on; where the connection ends before the request has, linger."""
        if message["type"] == "http.response.start":
            self._closes = Headers(raw=message["headers"]).get("connection") == "close"
        last = message["type"] == "http.response.body" and not message.get("more_body", False)
        if not (last and self._closes and not self._complete):
            await self._send(message)
            return
        await self._send({**message, "more_body": True})
        await self._drop()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _drop(self) -> None:
        dropped = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while dropped < LINGER_BYTES:
                    message = await self._receive()
                    dropped += len(message.get("body", b""))
                    if not message.get("more_body", False):
                        return
