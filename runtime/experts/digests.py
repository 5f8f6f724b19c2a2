"""Owns comparing the experts that were read with the artifact's receipt. Reads no payload."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np
import numpy.typing as npt
import xxhash

from ds4q.artifact.errors import ReceiptError
from ds4q.artifact.hfq import Reader, TensorEntry
from ds4q.artifact.metadata import front_digest
from ds4q.artifact.receipt import find_receipt, receipt_path
from ds4q.artifact.report import Check
from ds4q.artifact.walk import ReceiptDigests
from ds4q.runtime.errors import ExpertDigestError

_REMEDY = "put the receipt of this very file beside it, or verify it (ds4q verify FILE.hfq)"


class Digests:
    """The payload digests of a receipt that belongs to an artifact.

    A large model's receipt takes a second to parse, which a load spends better on reading weights:
    it is parsed in the background, and whoever needs it first waits.

    Parameters
    ----------
    look_up : xxh3-128 by tensor name; ``ReceiptError`` where there is nothing to compare with
    path : the artifact; named in errors
    notes : gets a line where there is nothing to compare with
    """

    def __init__(
        self, look_up: Callable[[], Mapping[str, bytes]], path: object, notes: list[str]
    ) -> None:
        self._path = path
        self._notes = notes
        self._lock = threading.Lock()
        self._digests: Mapping[str, bytes] | None = None
        worker = ThreadPoolExecutor(1, thread_name_prefix="ds4q-receipt")
        self._pending: Future[Mapping[str, bytes]] | None = worker.submit(look_up)
        worker.shutdown(wait=False)

    @classmethod
    def of(cls, reader: Reader, notes: list[str], *, require: bool = False) -> Digests:
        """Those of the receipt beside an open artifact, if it is this very file's.

        Length, header, index, metadata and the list of tensors are compared first. A receipt of
        another file, or none, leaves nothing to compare with: one line in ``notes`` says so.

        Raises
        ------
        ReceiptError : there is none, and ``require`` is set
        """
        if require:
            found = _belonging(reader)
            return cls(lambda: found, reader.path, notes)
        return cls(partial(_belonging, reader), reader.path, notes)

    def settle(self) -> Mapping[str, bytes] | None:
        """Wait for the receipt: digests by tensor, or None where there is nothing to compare."""
        with self._lock:
            if self._pending is not None:
                try:
                    self._digests = self._pending.result()
                except ReceiptError as error:
                    self._notes.append(f"experts are read without being checked: {error}")
                self._pending = None
            return self._digests

    def check(self, entry: TensorEntry, data: npt.NDArray[np.uint8]) -> bool:
        """Whether ``data``, contiguous, could be compared with the payload of ``entry``.

        Raises
        ------
        ExpertDigestError : it was, and differs
        """
        digests = self.settle()
        if digests is None:
            return False
        found = xxhash.xxh3_128(data.data).digest()
        expected = digests[entry.name]
        if found != expected:
            raise ExpertDigestError(
                path=self._path, tensor=entry.name, expected=expected.hex(), found=found.hex()
            )
        return True


def _belonging(reader: Reader) -> dict[str, bytes]:
    """Digests by tensor of the receipt of an open artifact; ``ReceiptError`` if there is none."""
    try:
        found = find_receipt(reader)
    except OSError as error:
        raise ReceiptError(
            "the receipt cannot be read",
            path=receipt_path(reader.path),
            found=error.strerror,
            remedy=_REMEDY,
        ) from error
    except ReceiptError as error:
        raise ReceiptError(
            error.what,
            path=error.path,
            tensor=error.tensor,
            expected=error.expected,
            found=error.found,
            remedy=error.remedy or _REMEDY,
        ) from error
    if found is None:
        raise ReceiptError(
            "no receipt: experts that are read cannot be checked", path=reader.path, remedy=_REMEDY
        )
    path, receipt = found
    check = Check("receipt")
    ReceiptDigests(check, receipt).compare_front(
        reader, front_digest(reader.header_raw, reader.index_raw)
    )
    if check.failures:
        first = check.failures[0]
        raise ReceiptError(
            f"the receipt belongs to another file: {first.message}",
            path=path,
            tensor=first.tensor,
            expected=first.expected,
            found=first.found,
            remedy=_REMEDY,
        )
    digests = {record.name: bytes.fromhex(record.xxh3) for record in receipt.tensors}
    missing = next((name for name in reader.tensors if name not in digests), None)
    if missing is not None:
        raise ReceiptError("the receipt lacks a tensor", path=path, tensor=missing, remedy=_REMEDY)
    return digests
