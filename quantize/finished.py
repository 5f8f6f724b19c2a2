"""Recognizing the finished files of a job: those of its plan, compared with their receipts."""

from __future__ import annotations

from collections.abc import Callable

from ds4q.artifact.digest import sha256_stream
from ds4q.artifact.errors import ArtifactError
from ds4q.artifact.hfq import U8, Reader
from ds4q.artifact.locks import WriteError
from ds4q.artifact.receipt import Receipt, read_receipt, receipt_path
from ds4q.artifact.types import TYPES
from ds4q.quantize.checkpoint import Checkpoint
from ds4q.quantize.errors import JobError
from ds4q.quantize.pipeline import ReadBack, source_digest
from ds4q.quantize.plan import Output, Plan

Advance = Callable[[int], None]


class DamagedOutputError(JobError):
    """The output of a finished job is not what its receipt says."""

    rule = "the finished output differs from its receipt"
    cure = "make it again with --force"


def planned_receipts(plan: Plan) -> list[Receipt] | None:
    """Receipts of a plan's outputs; None unless all are there and fit plan and files.

    Payloads are not read.
    """
    receipts = []
    for output in plan.outputs:
        try:
            receipt = read_receipt(receipt_path(output.path))
            with Reader(output.path) as reader:
                if not _is_planned(plan, output, reader, receipt):
                    return None
        except (ArtifactError, OSError):
            return None
        receipts.append(receipt)
    return receipts


def whole_receipts(
    plan: Plan, checkpoint: Checkpoint, receipts: list[Receipt], advance: Advance
) -> tuple[Receipt, ...]:
    """``planned_receipts``, after every byte of the outputs was compared with them.

    Raises ``DamagedOutputError`` for the first file that differs.
    """
    digests: dict[str, str] = {}
    for output, receipt in zip(plan.outputs, receipts, strict=True):
        with Reader(output.path) as reader:
            _compare(reader, receipt, advance)
        digests |= {source.name: source.xxh3 for t in receipt.tensors for source in t.sources}
    known = digests.keys() <= checkpoint.tensors.keys()
    if not known or source_digest(checkpoint, digests) != receipts[0].source_digest:
        raise DamagedOutputError(
            "the receipt's digests of the source contradict each other",
            path=receipt_path(plan.outputs[0].path),
        )
    return tuple(receipts)


def _compare(reader: Reader, receipt: Receipt, advance: Advance) -> None:
    """Read a file whole; ``DamagedOutputError`` where it differs from its receipt."""
    recorded = {(t.name, t.type, t.shape, t.nbytes): t.xxh3 for t in receipt.tensors}
    found = {(e.name, TYPES[e.type_id].name, e.shape, e.nbytes): e for e in reader.tensors.values()}
    if recorded.keys() != found.keys():
        raise DamagedOutputError("the receipt lists other tensors", path=reader.path)
    check = ReadBack(reader.path, [(found[key], xxh3) for key, xxh3 in recorded.items()])

    def seen(offset: int, chunk: U8) -> None:
        check.seen(offset, chunk)
        advance(chunk.nbytes)

    try:
        sha256 = sha256_stream(reader.pread_into, reader.file_bytes, seen=seen)
        check.finish()
    except WriteError as error:
        raise DamagedOutputError(
            path=reader.path, tensor=error.tensor, expected=error.expected, found=error.found
        ) from None
    if sha256 != receipt.sha256:
        raise DamagedOutputError(path=reader.path, expected=receipt.sha256, found=sha256)


def _is_planned(plan: Plan, output: Output, reader: Reader, receipt: Receipt) -> bool:
    """Whether file and receipt are what this plan makes of this source."""
    ours = reader.metadata.get("ds4q", {})
    planned = output.metadata["ds4q"]
    return (
        ours.get("source_fingerprint") == receipt.source_fingerprint == plan.fingerprint
        and ours.get("source_digest") == receipt.source_digest
        and ours.get("recipe") == receipt.recipe == planned["recipe"]
        and ours.get("recipe_sha256") == planned.get("recipe_sha256")
        and ours.get("imatrix_sha256") == planned.get("imatrix_sha256")
        and ours.get("encoding") == planned.get("encoding")
        and ours.get("tool_version") == receipt.tool_version == planned["tool_version"]
        and reader.file_bytes == receipt.file_bytes == output.layout.file_bytes
        and reader.index_xxh3 == receipt.index_xxh3 == planned["index_xxh3"]
        and receipt.metadata_xxh3 in ("", reader.metadata_xxh3)
    )
