"""Owns the life of a server: its socket, its signals, its end. Knows no paths and no options."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from ds4q.runtime.serve.service import Service
from ds4q.runtime.serve.wire import Protocol

DRAIN_S = 30.0
AFTER_DRAIN_S = 5.0  # that clients have to read what their cancelled requests are answered with
SWEEP_S = 0.5
KEEP_ALIVE_S = 65.0  # longer than common proxies keep an idle connection

log = logging.getLogger("ds4q.serve")


class Server(uvicorn.Server):
    """Serves until a signal: the first lets requests end, the second does not wait for them.

    Parameters
    ----------
    service : drained at the end; when it fails to load, the server ends
    swept : called twice a second

    Attributes
    ----------
    forced : a second signal has come
    """

    def __init__(
        self, app: ASGIApp, service: Service, swept: Callable[[], None] = lambda: None
    ) -> None:
        quiet = logging.getLogger("uvicorn")
        quiet.setLevel(
            logging.CRITICAL
        )  # what it says of bad requests is answered to their senders
        super().__init__(
            uvicorn.Config(
                app,
                http=Protocol,
                ws="none",
                loop="asyncio",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=int(KEEP_ALIVE_S),
                timeout_graceful_shutdown=int(DRAIN_S + AFTER_DRAIN_S),
            )
        )
        self._service = service
        self._swept = swept

    @property
    def forced(self) -> bool:
        """Whether nobody waits for requests any more."""
        return self.force_exit

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal ends the server, another one at once."""
        if self.should_exit:
            self.force_exit = True
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and look after connections to the end."""
        await super().startup(sockets)
        self._sweeping = asyncio.create_task(self._sweep())

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self._swept()
            now = time.monotonic()
            for connection in list(self.server_state.connections):
                if isinstance(connection, Protocol):
                    connection.drop_if_stuck(now)

    async def on_tick(self, counter: int) -> bool:
        """End as well where there is nothing to serve."""
        return await super().on_tick(counter) or self._service.state == "failed"

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no connection any more, and let those end that there are."""
        if self.server_state.tasks:
            log.warning(
                "%d requests may end, within %g s; a second signal does not wait for them",
                len(self.server_state.tasks),
                DRAIN_S,
            )
        drain = threading.Thread(target=self._service.drain, args=(DRAIN_S,), daemon=True)
        drain.start()
        await super().shutdown(sockets)
        self._sweeping.cancel()
