"""Owns what a server does with connections that are no use: bytes that are no request, or too slow
to become one, and clients that do not read. No paths.

uvicorn answers the first in plain text, and waits for the others for ever.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from ds4q.runtime.serve.refusal import Refusal
from ds4q.runtime.serve.respond import json_bytes

STALLED_READER_S = 60.0  # without any progress, while the connection is open
FLUSH_S = 5.0  # the same, once it is being closed
HEAD_S = 30.0  # from the first byte of a request, or the connection's start, to the head's end


class Protocol(H11Protocol):
    """A connection."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_timer: asyncio.TimerHandle | None = None
        self._unsent_bytes = 0
        self._stuck_since: float | None = None

    def drop_if_stuck(self, now: float) -> None:
        """End the connection where its client has stopped reading; asked for now and then.

        Nothing is written while a transport is full or is being closed, so that what is unsent gets
        less, or nobody reads.
        """
        closing, unsent = self.transport.is_closing(), self.transport.get_write_buffer_size()
        waits = closing or self.flow.write_paused
        if not waits or self._stuck_since is None or unsent < self._unsent_bytes:
            self._stuck_since = now if waits else None
        elif now - self._stuck_since >= (FLUSH_S if closing else STALLED_READER_S):
            self.transport.abort()
        self._unsent_bytes = unsent

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._await_head()
        super().data_received(data)
        if self._in_request:
            self._stop_timer()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP request, as every error is answered."""
        self._end_with(Refusal(400, "this is not a valid HTTP request", code="invalid_http"))

    @property
    def _in_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_head(self) -> None:
        if self._head_timer is None and not self._in_request:
            self._head_timer = self.loop.call_later(HEAD_S, self._too_slow)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _too_slow(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self._end_with(
                Refusal(408, f"no whole request within {HEAD_S:g} s", code="request_timeout")
            )

    def _end_with(self, refusal: Refusal) -> None:
        """Answer outside of any request, where the connection's state allows it, and close."""
        body = json_bytes(refusal.body)
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
        }
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            head = h11.Response(
                status_code=refusal.status,
                headers=list(headers.items()),
                reason=HTTPStatus(refusal.status).phrase,
            )
            events = (head, h11.Data(data=body), h11.EndOfMessage())
            self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
        self.transport.close()
