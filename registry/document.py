"""Downloads a small document whole, in a few seconds or not at all. Does not know what it holds."""

from __future__ import annotations

import threading

from ds4q.registry.errors import RefusedError, TransferError
from ds4q.registry.remote import Lane, Remote, TryAgain

_PIECE_BYTES = 1 << 16


def read_whole(remote: Remote, *, most_bytes: int, within_s: float) -> bytes:
    """What ``remote`` names, cut behind ``most_bytes`` + 1 bytes.

    Raises
    ------
    TransferError : no whole answer in ``within_s`` seconds, or another than success
    """
    lane = remote.lane()
    reading = _Reading(lane, most_bytes)
    reading.start()
    reading.join(within_s)
    if reading.is_alive():
        lane.abort()
        raise TransferError(f"the server sent no whole answer in {within_s:g} s", path=remote.name)
    if reading.failure is not None:
        raise TransferError(reading.failure, path=remote.name)
    raw, total = bytes(reading.raw), reading.total
    if total is not None and len(raw) < min(total, most_bytes + 1):
        found = f"{len(raw)} of {total} bytes"
        raise TransferError("the answer ends early", path=remote.name, found=found)
    return raw


class _Reading(threading.Thread):
    """Reads a document beside the thread that waits for it.

    The look-up of a host's name has no time-out of its own.
    """

    def __init__(self, lane: Lane, most_bytes: int) -> None:
        super().__init__(daemon=True)
        self.raw = bytearray()
        self.total: int | None = None
        self.failure: str | None = None
        self._lane, self._most_bytes = lane, most_bytes

    def run(self) -> None:
        try:
            answer = self._lane.open(0, self._most_bytes + 1, "")
            self.total = answer.total
            while len(self.raw) <= self._most_bytes and (piece := answer.read(_PIECE_BYTES)):
                self.raw += piece
        except RefusedError as error:
            self.failure = error.what if error.found is None else f"{error.what}: {error.found}"
        except (TryAgain, OSError, ValueError) as error:
            self.failure = str(error) or type(error).__name__
        finally:
            self._lane.reset()
