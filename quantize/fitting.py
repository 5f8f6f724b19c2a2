"""Owns the codebooks of a job: fitted when the first tensor that needs them is packed, once.

Gate and up of an expert share one pair of books, fitted on both; down has its own. Nothing here
knows how a fit is done (``books.py``) or where its result is stored (``artifact/tables.py``).
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING

from ds4q.artifact.tables import KINDS, expert_name
from ds4q.artifact.types import TensorType, row_runs
from ds4q.quantize.audit import Audit, Unit
from ds4q.quantize.books import BookFit, FittedBooks
from ds4q.quantize.checkpoint import Checkpoint
from ds4q.quantize.convert import fp4_views
from ds4q.quantize.errors import MissingTensorError
from ds4q.quantize.grid import PROJECTIONS
from ds4q.quantize.plan import importance_of
from ds4q.quantize.recipe import ExpertPart, part_of
from ds4q.quantize.rows import CHUNK_BYTES, Buffers, RowReader

if TYPE_CHECKING:
    from ds4q.quantize.imatrix import Imatrix

Key = tuple[int, int, ExpertPart]


def books_text(fitted: FittedBooks | None) -> str:
    """Books as a journal line holds them; empty for None."""
    if fitted is None:
        return ""
    return f"{fitted.repairs} {fitted.row.mode} {fitted.row.books.hex()}"


class Fitting:
    """Fits the books of experts on demand; any thread may ask, each fit is done once.

    Parameters
    ----------
    imatrix : weighs the columns; None weighs all alike
    """

    def __init__(self, checkpoint: Checkpoint, audit: Audit, imatrix: Imatrix | None) -> None:
        self._checkpoint = checkpoint
        self._audit = audit
        self._imatrix = imatrix
        self._units: dict[str, Unit] = {unit.name: unit for unit in audit.units}
        self._lock = threading.Lock()
        self._done: dict[tuple[Key, int], Future[FittedBooks]] = {}
        self._local = threading.local()

    def books(self, unit: Unit, kind: TensorType) -> FittedBooks:
        """The books of the expert part that ``unit`` belongs to, for a mixed type.

        Raises ``MissingTensorError`` where the other half of gate and up is not in the source.
        """
        info = unit.info
        if info.layer is None or info.expert is None:
            raise MissingTensorError("not a routed expert", tensor=unit.name)
        key: Key = info.layer, info.expert, part_of(info.projection)
        levels = KINDS[kind.id].levels
        with self._lock:
            mine = (key, levels) not in self._done
            future = self._done.setdefault((key, levels), Future())
        if mine:
            try:
                future.set_result(self._fit(key, levels))
            except BaseException as error:
                future.set_exception(error)
        return future.result()

    def _fit(self, key: Key, levels: int) -> FittedBooks:
        layer, expert, part = key
        fit = BookFit(levels)
        buffers = self._local.__dict__.setdefault("buffers", Buffers())
        for projection in (w for w in PROJECTIONS if part_of(w) == part):
            name = expert_name(layer, expert, projection)
            unit = self._units.get(name)
            if unit is None:
                raise MissingTensorError(
                    "gate and up share their books, and one of them is not there", tensor=name
                )
            importance = importance_of(self._imatrix, unit.info)
            reader = RowReader(self._checkpoint, self._audit, unit, buffers)
            rows, k = unit.info.logical_shape
            for first, count in row_runs(rows, k // 2, CHUNK_BYTES):
                codes, scales = fp4_views(reader.read(first, count)[0])
                fit.add(codes, scales, importance)
        return fit.fit()
