"""Comparing the tensors that are loaded with the artifact's receipt. Reads no payload itself."""

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
from ds4q.artifact.receipt import find_receipt, receipt_path
from ds4q.artifact.report import Check
from ds4q.artifact.walk import ReceiptDigests
from ds4q.runtime.errors import DigestError

U8 = npt.NDArray[np.uint8]

_REMEDY = (
    "put the receipt of this very file beside it, remove the one that is there, or go without "
    "comparing (--no-check-reads)"
)
_EARLIER_REMEDY = "ds4q verify compares the whole file; or leave out --require-receipt"
_NONE_REMEDY = "put the receipt of this very file beside it, or leave out --require-receipt"


class _Partial:
    """A tensor that arrives in pieces, in any order, and is hashed from its first byte on."""

    def __init__(self) -> None:
        self.hasher = xxhash.xxh3_128()
        self.hashed_bytes = 0
        self.waiting: dict[int, U8] = {}  # by the place of their first byte
        self.busy = False  # a thread is hashing, and takes what comes meanwhile


class Digests:
    """The payload digests of a receipt that belongs to an artifact.

    A large model's receipt takes a second to parse, so it is parsed in the background while
    weights are read. Tensors that arrive before it is parsed are compared by ``finish``.

    Parameters
    ----------
    look_up : xxh3-128 by tensor name; None where there is no receipt. Raises ``ReceiptError`` where
        it cannot be used
    path : the artifact; named in errors
    notes : gets a line where there is no receipt
    """

    def __init__(
        self, look_up: Callable[[], Mapping[str, bytes] | None], path: object, notes: list[str]
    ) -> None:
        self._path = path
        self._notes = notes
        self._lock = threading.Lock()
        self._parts: dict[str, _Partial] = {}
        self._found: dict[str, bytes] = {}  # not compared yet
        self._settling = threading.Lock()
        self._digests: Mapping[str, bytes] | None = None
        worker = ThreadPoolExecutor(1, thread_name_prefix="ds4q-receipt")
        self._pending: Future[Mapping[str, bytes] | None] | None = worker.submit(look_up)
        worker.shutdown(wait=False)

    @classmethod
    def of(cls, reader: Reader, notes: list[str], *, require: bool = False) -> Digests:
        """Those of the receipt beside an open artifact.

        Length, header, index, metadata and the list of tensors are compared first. A receipt that
        is damaged, unreadable or another file's raises ``ReceiptError`` when it is first needed;
        without a receipt there is nothing to compare with, and one line in ``notes`` says so.

        Raises
        ------
        ReceiptError : ``require`` is set, and there is no receipt of this file, or one of an
            earlier version, which does not cover the metadata
        """
        if require:
            earlier: list[str] = []
            found = _belonging(reader, earlier)
            if found is None:
                raise ReceiptError(
                    "no receipt: what is loaded cannot be compared",
                    path=reader.path,
                    remedy=_NONE_REMEDY,
                )
            if earlier:
                raise ReceiptError(earlier[0], path=reader.path, remedy=_EARLIER_REMEDY)
            return cls(lambda: found, reader.path, notes)
        return cls(partial(_belonging, reader, notes), reader.path, notes)

    def settle(self) -> Mapping[str, bytes] | None:
        """Wait for the receipt: digests by tensor, or None where there is no receipt.

        Raises
        ------
        ReceiptError : it cannot be used
        """
        with self._settling:
            if self._pending is not None:
                self._digests = self._pending.result()
                self._pending = None
                if self._digests is None:
                    self._notes.append(
                        f"{self._path}: no receipt, so damage in the weights would not be noticed; "
                        "put its receipt beside it"
                    )
            return self._digests

    def wait(self) -> None:
        """Wait until nothing reads the receipt any more, whatever came of it."""
        if (pending := self._pending) is not None:
            pending.exception()

    def check(self, entry: TensorEntry, data: U8) -> bool:
        """Whether ``data``, contiguous, could be compared with the whole payload of ``entry``.

        Raises
        ------
        DigestError : it was, and differs
        ReceiptError : as ``settle``
        """
        digests = self.settle()
        if digests is None:
            return False
        self._compare(digests, entry.name, xxhash.xxh3_128(data.data).digest())
        return True

    def add(self, entry: TensorEntry, start: int, part: U8) -> None:
        """Take bytes of ``entry`` from byte ``start`` of its payload on; call for each piece once.

        Pieces may come in any order and from any thread. A piece that comes before the bytes in
        front of it is kept, unchanged, until those have come.

        Raises
        ------
        DigestError : the tensor is whole, and differs from the receipt
        ReceiptError : as ``settle``
        """
        pending = self._pending
        if (pending is None or pending.done()) and self.settle() is None:
            return
        if start == 0 and part.nbytes == entry.nbytes:
            self._whole(entry.name, xxhash.xxh3_128(part.data).digest())
            return
        with self._lock:
            whole = self._parts.setdefault(entry.name, _Partial())
            whole.waiting[start] = part
            if whole.busy:
                return
            whole.busy = True
        while True:
            with self._lock:
                following = whole.waiting.pop(whole.hashed_bytes, None)
                if following is None:
                    whole.busy = False
                    if whole.hashed_bytes < entry.nbytes:
                        return
                    del self._parts[entry.name]
                    break
            whole.hasher.update(following.data)
            whole.hashed_bytes += following.nbytes
        self._whole(entry.name, whole.hasher.digest())

    def finish(self) -> None:
        """All tensors have come: compare those that came before the receipt was parsed.

        Raises
        ------
        DigestError : the first, by name, that differs
        ReceiptError : as ``settle``
        """
        digests = self.settle()
        with self._lock:
            found, self._found = self._found, {}
            cut = sorted(self._parts)
        if digests is None:
            return
        if cut:
            raise RuntimeError(f"only a part of {cut[0]} was compared with the receipt")
        for name, digest in sorted(found.items()):
            self._compare(digests, name, digest)

    def _whole(self, name: str, found: bytes) -> None:
        if self._pending is None and self._digests is not None:
            self._compare(self._digests, name, found)
            return
        with self._lock:
            self._found[name] = found

    def _compare(self, digests: Mapping[str, bytes], name: str, found: bytes) -> None:
        expected = digests[name]
        if found != expected:
            raise DigestError(
                path=self._path, tensor=name, expected=expected.hex(), found=found.hex()
            )


def _belonging(reader: Reader, notes: list[str]) -> dict[str, bytes] | None:
    """Digests by tensor of the receipt of an open artifact; None if there is none.

    ``notes`` gets a line where the receipt does not cover the metadata.

    Raises
    ------
    ReceiptError : there is one, and it cannot be read, or is another file's
    """
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
        return None
    path, receipt = found
    check = Check("receipt")
    ReceiptDigests(check, receipt).compare_front(reader)
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
    if receipt.metadata_note is not None:
        notes.append(f"{path}: {receipt.metadata_note}")
    return digests
