"""Owns the structural check of an open artifact: what can be said without reading weights.

The reader has already refused what it cannot parse. This adds the rulings that make a file fit for
decoding: every length fits its type and shape, every type has a codec, ROCmFPX tensors have all
that they are read by, and a file that ds4q wrote is exactly as ds4q writes it. Decode tables are
the only payloads that are read here.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from typing import Any

from ds4q.artifact.codings import CALIBRATIONS, KEY, VARIANTS, examine, repairs_fit
from ds4q.artifact.errors import ArtifactError
from ds4q.artifact.hfq import ARCH_DEEPSEEK4, VERSION_WRITTEN, Reader, TensorEntry
from ds4q.artifact.report import Check, Failure
from ds4q.artifact.types import (
    HFP4G32,
    PRIVATE,
    ROCMFPX,
    TYPES,
    UPSTREAM_K,
    check_entry,
    decodable,
    matrix_shape,
)


def type_name(type_id: int) -> str:
    """The table's name of a type number, or ``type N`` for one it does not hold."""
    return TYPES[type_id].name if type_id in TYPES else f"type {type_id}"


def census(entries: Iterable[TensorEntry]) -> dict[str, int]:
    """Type name -> number of tensors, sorted by name; unknown numbers read ``type N``."""
    return dict(sorted(Counter(type_name(entry.type_id) for entry in entries).items()))


def own_metadata(reader: Reader) -> dict[str, Any] | None:
    """The ``ds4q`` metadata object of a file that ds4q wrote, else None.

    ds4q writes version 1 only: what a converter carried over into version 2 promises nothing.
    """
    ours = reader.metadata.get("ds4q") if reader.version == VERSION_WRITTEN else None
    return ours if isinstance(ours, dict) else None


def check_structure(reader: Reader, check: Check) -> None:
    """Fill ``check`` with every structural fault of ``reader``; weights are not read."""
    for entry in reader.tensors.values():
        name, kind = entry.name, TYPES.get(entry.type_id)
        try:
            decodable(entry.type_id, tensor=name)
        except ArtifactError as error:
            check.fail_with(error)
        if kind is None or kind in ROCMFPX:  # those have rules of their own
            continue
        try:  # whether or not there is a codec: a length that is known must be right
            check_entry(kind.id, entry.shape, entry.group_size, entry.nbytes, tensor=name)
        except ArtifactError as error:
            check.fail_with(error)
    ours = own_metadata(reader)
    _check_codings(reader, ours is not None, check)
    if ours is None:
        check.notes.extend(reader.warnings + reader.strict_warnings)
    else:
        _check_own(reader, ours, check)
    check.figures |= {
        "version": reader.version,
        "tensors": len(reader.tensors),
        "bytes": reader.file_bytes,
    }


def _check_codings(reader: Reader, own: bool, check: Check) -> None:
    """What ROCmFPX tensors are read by, and what the metadata says of them beyond that."""
    codings = examine(reader, check.fail_with)
    document = reader.metadata.get(KEY)
    if not isinstance(document, dict):
        return
    used = {entry.type_id for entry in reader.tensors.values()}
    for type_id, (key, _) in VARIANTS.items():
        if key in document and type_id not in used:
            what = f"metadata {KEY}.{key} is set, but no tensor has type {type_id}"
            check.fail(Failure(what, found=repr(document[key])))
    calibration = document.get("calibration")
    if calibration not in CALIBRATIONS and (own or "calibration" in document):
        what, words = f"wrong metadata {KEY}.calibration", " or ".join(CALIBRATIONS)
        check.fail(Failure(what, expected=words, found=repr(calibration)))
    repairs = document.get("repairs", [])
    if own and check.ok and not repairs_fit(repairs, codings.tables):
        check.fail(Failure(f"metadata {KEY}.repairs is not one count for each decode table"))
    check.figures["decode_tables"] = len(codings.tables)
    if calibration in CALIBRATIONS:
        lower = " (lower quality than with an imatrix)" if calibration == "absmax" else ""
        check.figures["calibration"] = f"{calibration}{lower}"
    check.notes.extend(codings.uneven_pairs())


def _check_own(reader: Reader, ours: dict[str, Any], check: Check) -> None:
    """A file that ds4q wrote: sorted, aligned, exact to its last byte, and true about itself."""
    for warning in reader.warnings + reader.strict_warnings:
        check.fail(Failure(warning))
    names = [name.encode("utf-8") for name in reader.tensors]
    for before, after in itertools.pairwise(names):
        if before > after:
            check.fail(Failure("tensors are not sorted by name", tensor=after.decode("utf-8")))
            break
    entries = reader.tensors.values()
    odd_rows = any(
        e.type_id == HFP4G32.id and matrix_shape(e.shape)[1] % UPSTREAM_K for e in entries
    )
    claims = (
        ("arch_id", ARCH_DEEPSEEK4, reader.arch_id),
        ("type census", reader.metadata.get("hipfire_recipe_census"), census(entries)),
        ("ds4q.k256", ours.get("k256"), not odd_rows),
        ("ds4q.private_qt", ours.get("private_qt"), any(e.type_id >= PRIVATE for e in entries)),
    )
    for what, expected, found in claims:
        if expected != found:
            check.fail(Failure(f"wrong {what}", expected=str(expected), found=str(found)))
