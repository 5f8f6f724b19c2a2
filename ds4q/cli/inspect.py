"""Owns ``ds4q inspect``: what is in an artifact, a receipt, a trace or a checkpoint folder.

It reads no payload.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ds4q.cli import common

if TYPE_CHECKING:
    from ds4q.artifact.describe import Document, Rows
    from ds4q.artifact.report import Check

RECEIPT_MAGIC = b"\x28\xb5\x2f\xfd"  # a zstd frame
TRACE_MAGIC = b"ds4q.trace"
TRACE_MAGIC_AT = 8  # behind the head of a zstd frame that unpackers skip
TRACE_FRAME = b"\x5e\x2a\x4d\x18"  # which that head begins with


@click.command("inspect")
@click.argument("file", type=click.Path(path_type=Path), metavar="FILE")
@click.option("--tensors", is_flag=True, help="List every tensor.")
@click.option("--layer", type=click.IntRange(0), metavar="N", help="Only tensors of layer N.")
@click.option("--strict", is_flag=True, help="Exit 1 if anything is unusual or wrong.")
@common.html_option
@common.json_option
@common.talk_options
def command(
    file: Path,
    tensors: bool,
    layer: int | None,
    strict: bool,
    html: Path | None,
    as_json: bool,
    quiet: bool,
    verbose: bool,
) -> None:
    """Show types, sizes, metadata and tensors of FILE: an .hfq, a receipt or a checkpoint folder.

    Example: ds4q inspect flash.hfq --tensors --layer 2

    Only headers are read, never a payload. FILE may also be a trace of ds4q run --trace: what it
    was recorded under, and how much it holds.
    """
    from ds4q.artifact.report import Check

    if html is not None:
        common.claim_page(html)
    check = Check("inspect")
    if file.is_dir() or file.suffix == ".safetensors":
        document, rows = _checkpoint(file, check)
    elif (head := _head(file)).startswith(RECEIPT_MAGIC):
        document, rows = _receipt(file)
    elif head.startswith(TRACE_MAGIC, TRACE_MAGIC_AT) or head.startswith(TRACE_FRAME):
        document, rows = _trace(file)
    else:
        document, rows = _artifact(file, check, strict)
    shown = rows if layer is None else [row for row in rows if _layer(row["name"]) == layer]
    listed = tensors or layer is not None
    document["ok"] = check.ok and not check.notes
    document["problems"] = [failure.line() for failure in check.failures] + check.notes
    if as_json:
        common.emit_json(document | ({"tensor_list": shown} if listed else {}))
    else:
        _print(document, shown if listed else [])
    if html is not None:
        from ds4q import __version__
        from ds4q.quantize.page import gather, render

        common.write_page(html, render(gather(document, rows, __version__)))
    if strict and not document["ok"]:
        click.get_current_context().exit(1)


def _head(file: Path) -> bytes:
    """How a file begins; nothing of what is no file, which the reader of artifacts tells."""
    from ds4q.artifact.files import NotRegularError, read_head

    try:
        return read_head(file, TRACE_MAGIC_AT + len(TRACE_MAGIC))
    except NotRegularError:
        return b""


def _layer(name: str) -> int | None:
    from ds4q.quantize.deepseek4 import classify, weight_of_scale

    info = classify(weight_of_scale(name) or name)
    return None if info is None else info.layer


def _artifact(file: Path, check: Check, strict: bool) -> tuple[Document, Rows]:
    from ds4q.artifact.check import check_structure
    from ds4q.artifact.describe import describe
    from ds4q.artifact.hfq import ARCH_DEEPSEEK4, Reader
    from ds4q.quantize.inventory import check_inventory

    with Reader(file) as reader:
        check_structure(reader, check)
        if strict or reader.arch_id == ARCH_DEEPSEEK4:
            check_inventory(reader, check)
        return describe(reader)


def _receipt(file: Path) -> tuple[Document, Rows]:
    from ds4q.artifact.describe import type_census
    from ds4q.artifact.receipt import read_receipt

    receipt = read_receipt(file)
    rows = [
        {"name": t.name, "type": t.type, "shape": list(t.shape), "bytes": t.nbytes, "xxh3": t.xxh3}
        for t in receipt.tensors
    ]
    metadata = {
        key: getattr(receipt, key)
        for key in (
            "sha256",
            "recipe",
            "tool_version",
            "source_fingerprint",
            "source_digest",
            "partial",
        )
    }
    if receipt.imatrix_sha256:
        metadata["imatrix_sha256"] = receipt.imatrix_sha256
    return {
        "kind": "receipt",
        "path": str(file),
        "bytes": receipt.file_bytes,
        "tensors": len(rows),
        "types": type_census(rows),
        "skipped": len(receipt.skipped),
        "metadata": metadata,
    }, rows


def _trace(file: Path) -> tuple[Document, Rows]:
    from dataclasses import asdict

    from ds4q.runtime.experts.replay import Workload
    from ds4q.runtime.experts.trace import read_trace

    trace = read_trace(file)
    header = asdict(trace.header)
    header["slot_bytes"] = sum(header["slot_bytes"])  # of a slot in every layer
    del header["expert_bytes"]  # one number an expert, where they differ
    kinds = Counter(type(record).__name__.removesuffix("Record").lower() for record in trace)
    return {
        "kind": "trace",
        "path": str(file),
        "bytes": file.stat().st_size,
        "records": dict(sorted(kinds.items())),
        "tokens": Workload.of(trace).tokens,
        "types": {},
        "metadata": {key: value for key, value in header.items() if value not in ("", {})},
    }, []


def _checkpoint(file: Path, check: Check) -> tuple[Document, Rows]:
    from ds4q.artifact.describe import brief, type_census
    from ds4q.artifact.errors import Ds4qError
    from ds4q.quantize.audit import audit
    from ds4q.quantize.checkpoint import Checkpoint

    with Checkpoint.open(file, allow_partial=True) as checkpoint:
        try:
            audited = audit(checkpoint, allow_partial=True)
            check.notes.extend(audited.warnings)
            if audited.missing:
                check.notes.append(f"{len(audited.missing)} weights of the model are absent")
        except Ds4qError as error:
            check.fail_with(error)
        rows = [
            {
                "name": t.name,
                "type": t.dtype,
                "shape": list(t.shape),
                "shard": t.shard,
                "bytes": t.nbytes,
            }
            for t in checkpoint.tensors.values()
        ]
        return {
            "kind": "checkpoint",
            "path": str(file),
            "bytes": sum(row["bytes"] for row in rows),
            "shards": len(checkpoint.shards),
            "tensors": len(rows),
            "types": type_census(rows),
            "metadata": {"config": brief(checkpoint.config)},
        }, rows


def _held(document: Document) -> str:
    tokens, records = document["tokens"], document["records"]
    told = [f"{n:,} {name} records" for name, n in records.items()]
    told.append(f"{tokens['prefill']:,} tokens of prompts, {tokens['decode']:,} generated")
    return ", ".join(told)


def _print(document: Document, rows: Rows) -> None:
    held = f"{document['tensors']:,} tensors" if "tensors" in document else _held(document)
    common.line(f"{document['path']}: {document['kind']}, {document['bytes']:,} bytes, {held}")
    for name, entry in document["types"].items():
        common.line(f"  {name:12} {entry['tensors']:>8,} tensors {entry['bytes']:>20,} bytes")
    if "arch_id" in document:
        from ds4q.registry.arch import ARCH_NAMES

        number = document["arch_id"]
        common.line(f"  arch_id: {number}, {ARCH_NAMES.get(number, 'of no family that is known')}")
    for key, value in document["metadata"].items():
        if isinstance(value, dict):
            value = ", ".join(
                f"{k} {' '.join(v) if isinstance(v, dict) else v}" for k, v in sorted(value.items())
            )
        common.line(f"  {key}: {value}")
    for problem in document["problems"]:
        common.warn(problem)
    for row in rows:
        shape = "x".join(map(str, row["shape"])) or "scalar"
        name = row["name"]
        common.line(f"{name}  {row['type']}  {shape}  {row['bytes']:,}")
