"""Owns sending an answer: whole, or as server-sent events while it grows. Knows no endpoint's JSON.

The status of a stream is sent with its first piece, or when a client should hear that it is still
waited for; so a request that cannot be served gets its true status wherever that is known in time.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ds4q.runtime.serve.follow import ClientLeftError, Follower, Waiting, while_connected
from ds4q.runtime.serve.metrics import CLIENT_CLOSED_REQUEST, Metrics, outcome_of
from ds4q.runtime.serve.refusal import Refusal
from ds4q.runtime.serve.serving import usage
from ds4q.runtime.serve.transcript import Piece

Item = Piece | Waiting
Object = dict[str, Any]


class Form(Protocol):
    """How an endpoint writes an answer."""

    endpoint: str

    def opening(self) -> Object | None:
        """The chunk before the first piece."""

    def chunk(self, piece: Piece, finish_reason: str | None) -> Object:
        """The chunk of a piece; the last one has the reason of the end."""

    def usage_chunk(self, counts: Object) -> Object | None:
        """The chunk of the counts, which follows the last one; None where nobody asked for it."""

    def whole(self, piece: Piece, finish_reason: str | None, counts: Object) -> Object:
        """The answer in one."""


_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def json_bytes(value: Any) -> bytes:
    """Compact JSON in UTF-8."""
    return _JSON.encode(value).encode()


class JsonResponse(Response):
    """An object as JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json_bytes(content)


def refused(refusal: Refusal) -> Response:
    """The response that a refusal is."""
    return JsonResponse(refusal.body, refusal.status, headers=refusal.headers)


async def respond(
    request: Request,
    follower: Follower,
    form: Form,
    metrics: Metrics,
    *,
    stream: bool,
) -> Response:
    """The response to a request whose job is being followed.

    Raises ``Refusal`` as long as no byte has been sent.
    """
    pieces = follower.pieces()
    ending = _Ending(follower, form.endpoint, metrics)
    try:
        if not stream:
            body = await while_connected(request.receive, _whole(pieces, follower, form))
            ending.reach(follower.transcript.finish_reason or "failed")
            return JsonResponse(body)
        first = await while_connected(request.receive, _next(pieces))
        return _EventStream(first, pieces, follower, form, ending)
    except ClientLeftError:
        ending.reach("cancelled")
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    except Refusal:  # counted by whoever answers with it
        ending.reach(None)
        raise
    except BaseException:
        ending.reach("failed")
        raise


class _Ending:
    """Counts an answer once, and lets the model drop it."""

    def __init__(self, follower: Follower, endpoint: str, metrics: Metrics) -> None:
        self._follower = follower
        self._endpoint = endpoint
        self._metrics = metrics
        self._reached = False

    def reach(self, outcome: str | None) -> None:
        self._follower.cancel()
        if self._reached:
            return
        self._reached = True
        self._metrics.time(self._follower)
        if outcome is not None:
            self._metrics.count(self._endpoint, outcome)


async def _next(pieces: AsyncIterator[Item]) -> Item:
    return await anext(pieces)


async def _whole(pieces: AsyncIterator[Item], follower: Follower, form: Form) -> Object:
    answer = Piece()
    async for each in pieces:
        if isinstance(each, Piece):
            answer.add(each)
    return form.whole(answer, follower.transcript.finish_reason, usage(follower))


class _EventStream(Response):
    """Server-sent events: the chunks of an answer, and comments where there is nothing to send."""

    media_type = "text/event-stream"

    def __init__(
        self,
        first: Item,
        rest: AsyncIterator[Item],
        follower: Follower,
        form: Form,
        ending: _Ending,
    ) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(headers=headers)
        del self.headers["content-length"]
        self._first = first
        self._rest = rest
        self._follower = follower
        self._form = form
        self._ending = ending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        outcome = "failed"
        try:
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            outcome = await while_connected(receive, self._write(send))
        except (ClientLeftError, asyncio.CancelledError) as error:
            outcome = "cancelled"
            if isinstance(error, asyncio.CancelledError):
                raise
        finally:
            self._ending.reach(outcome)

    async def _write(self, send: Send) -> str:
        """Send all there is; how the answer ended."""

        async def put(data: bytes, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        opening = self._form.opening()
        data = b"" if opening is None else _event(opening)
        try:
            async for each in self._items():
                if isinstance(each, Waiting):
                    data += f": keep-alive, {each.done} of {each.total} prompt tokens\n\n".encode()
                elif not each.empty:
                    data += _event(self._form.chunk(each, None))
                if data:
                    await put(data)
                data = b""
        except Refusal as refusal:
            outcome = outcome_of(refusal.status)
            self._ending.reach(outcome)  # before the client can ask for the counts
            await put(data + _event(refusal.body), more=False)
            return outcome
        reason = self._follower.transcript.finish_reason
        data = _event(self._form.chunk(Piece(), reason))
        if (counts := self._form.usage_chunk(usage(self._follower))) is not None:
            data += _event(counts)
        outcome = reason or "failed"
        self._ending.reach(outcome)
        await put(data + b"data: [DONE]\n\n", more=False)
        return outcome

    async def _items(self) -> AsyncIterator[Item]:
        yield self._first
        async for each in self._rest:
            yield each


def _event(value: Mapping[str, Any]) -> bytes:
    return b"data: " + json_bytes(value) + b"\n\n"
