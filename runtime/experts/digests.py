"""Owns comparing the experts that were read with the artifact's receipt. Reads no payload."""

from __future__ import annotations

from collections.abc import Mapping

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

    Parameters
    ----------
    digests : xxh3-128 by tensor name
    path : the artifact; named in errors
    """

    def __init__(self, digests: Mapping[str, bytes], path: object) -> None:
        self._digests = digests
        self._path = path

    @classmethod
    def of(cls, reader: Reader, notes: list[str], *, require: bool = False) -> Digests | None:
        """Those of the receipt beside an open artifact, if it is this very file's.

        Length, header, index, metadata and the list of tensors are compared first. A receipt of
        another file, or none, leaves nothing to compare with: a line in ``notes`` says so.

        Raises
        ------
        ReceiptError : there is none, and ``require`` is set
        """
        try:
            return cls(_belonging(reader), reader.path)
        except ReceiptError as error:
            if require:
                raise
            notes.append(f"experts are read without being checked: {error}")
            return None

    def check(self, entry: TensorEntry, data: npt.NDArray[np.uint8]) -> None:
        """Refuse ``data``, contiguous, unless it is the payload of ``entry``.

        Raises
        ------
        ExpertDigestError : it is not
        """
        found = xxhash.xxh3_128(data.data).digest()
        expected = self._digests[entry.name]
        if found != expected:
            raise ExpertDigestError(
                path=self._path, tensor=entry.name, expected=expected.hex(), found=found.hex()
            )


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
