"""Owns what a page shows, as plain data: identity, sizes, checks. Draws nothing, escapes nothing.

Texts that come from a file are cut and freed of control characters here; what would harm a page of
HTML is the template's business.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ds4q.artifact.describe import Document, Rows
from ds4q.artifact.errors import one_line
from ds4q.artifact.report import Check, Report
from ds4q.artifact.types import RAW
from ds4q.quantize.deepseek4 import Role, TensorInfo, classify, weight_of_scale
from ds4q.quantize.page.experts import (
    EXPERT_ROLES,
    bits_per_weight,
    expert_role,
    experts,
    nrmse,
)

if TYPE_CHECKING:
    from ds4q.quantize.measure import ErrorSums

MAX_TEXT = 400
MAX_TABLE_ROWS = 20
MAX_PROBLEMS = 100

_ATTENTION = "attention"
_ENDS = "embedding and head"
_ROUTING = "routing"
_SHARED = "shared experts"
_DENSE = "norms, streams and draft heads"
_TABLES = "decode tables"
_UNKNOWN = "other tensors"
_FRONT = "index and metadata"
_REST = "padding and trailing bytes"
_GROUPS = {
    Role.EMBED: _ENDS,
    Role.HEAD: _ENDS,
    Role.ATTENTION: _ATTENTION,
    Role.SINK: _ATTENTION,
    Role.COMPRESSOR: _ATTENTION,
    Role.POSITION: _ATTENTION,
    Role.INDEXER: _ATTENTION,
    Role.GATE: _ROUTING,
    Role.GATE_BIAS: _ROUTING,
    Role.HASH_TABLE: _ROUTING,
    Role.SHARED_EXPERT: _SHARED,
    Role.NORM: _DENSE,
    Role.HYPER: _DENSE,
    Role.DRAFT_PROJECTION: _DENSE,
    Role.MARKOV: _DENSE,
    Role.CONFIDENCE: _DENSE,
}
# The place of a role's colour in the style sheet: one role looks alike on every page.
_COLOURS = (
    *EXPERT_ROLES,
    _ATTENTION,
    _SHARED,
    _ENDS,
    _ROUTING,
    _DENSE,
    _TABLES,
    _FRONT,
    _REST,
    _UNKNOWN,
)


def gather(
    document: Document,
    rows: Rows,
    version: str,
    report: Report | None = None,
    errors: Mapping[str, ErrorSums] | None = None,
) -> dict[str, Any]:
    """All that the page shows; JSON can hold it.

    Parameters
    ----------
    document, rows : as ``ds4q inspect`` makes them; a document of an artifact that could not be
        opened has a ``path`` alone
    version : of ds4q, which makes the page
    report : the checks of ``ds4q verify``
    errors : what re-encoding cost, by tensor name
    """
    rows = [row | {"type": text(row["type"])} for row in rows]
    infos = [classify(weight_of_scale(row["name"]) or row["name"]) for row in rows]
    # A checkpoint's shapes count packed bytes and scales: they do not tell how many weights.
    count_weights = document.get("kind") != "checkpoint"
    found = experts(rows, infos, errors or {}, count_weights)
    return {
        "name": text(str(document["path"]).rstrip("/").rpartition("/")[2]),
        "tool": f"ds4q {version}",
        "kind": document["kind"],
        "counted": count_weights,
        "ok": None if report is None else report.ok,
        "failed": 0 if report is None else sum(not c.ok for c in report.checks),
        "passed": 0 if report is None else sum(c.verdict == "ok" for c in report.checks),
        "bytes": document.get("bytes"),
        "tensors": len(rows),
        "nrmse": nrmse(errors[name] for name in sorted(errors)) if errors else None,
        "facts": _facts(document, report),
        "types": _shares(rows, infos, lambda row, info: row["type"], count_weights),
        "roles": _sizes(document, rows, infos, count_weights),
        "experts": found,
        "checks": [] if report is None else [_check(check) for check in report.checks],
        "problems": [text(line) for line in document.get("problems", [])[:MAX_PROBLEMS]],
    }


def text(value: Any, limit: int = MAX_TEXT) -> str:
    """``value`` as one line without control characters, cut to ``limit`` characters."""
    whole = str(value)
    line = one_line(whole[:limit])
    return line if len(whole) <= limit else f"{line} … ({len(whole):,} characters)"


# ------------------------------------------------------------------ sizes


def _role(row: dict[str, Any], info: TensorInfo | None) -> str:
    if row["type"] == RAW.name:
        return _TABLES
    if info is None:
        return _UNKNOWN
    return expert_role(info) if info.role is Role.EXPERT else _GROUPS[info.role]


def _sizes(
    document: Document, rows: Rows, infos: list[TensorInfo | None], count_weights: bool
) -> list[dict[str, Any]]:
    """Bytes by role; for a file they add up to its length."""
    shares = _shares(rows, infos, _role, count_weights)
    payload = sum(share["bytes"] for share in shares)
    front = document.get("data_offset", 0)
    rest = document.get("bytes", 0) - front - payload if front else 0
    for name, nbytes in ((_FRONT, front), (_REST, rest)):
        if nbytes:
            shares.append({"name": name, "tensors": None, "bytes": nbytes, "bpw": None})
    return [share | {"colour": _COLOURS.index(share["name"])} for share in _with_share(shares)]


def _shares(
    rows: Rows,
    infos: list[TensorInfo | None],
    name_of: Callable[[dict[str, Any], TensorInfo | None], str],
    count_weights: bool,
) -> list[dict[str, Any]]:
    """Tensors, bytes and bits per weight of each group, the largest first."""
    groups: dict[str, list[int]] = {}
    for row, info in zip(rows, infos, strict=True):
        group = groups.setdefault(name_of(row, info), [0, 0, 0])
        group[0] += 1
        group[1] += row["bytes"]
        group[2] += 0 if row["type"] == RAW.name else math.prod(row["shape"])
    shares = [
        {
            "name": name,
            "tensors": tensors,
            "bytes": nbytes,
            "bpw": bits_per_weight(nbytes, weights) if count_weights else None,
        }
        for name, (tensors, nbytes, weights) in groups.items()
    ]
    return _with_share(sorted(shares, key=lambda share: (-int(share["bytes"]), share["name"])))


def _with_share(shares: list[dict[str, Any]]) -> list[dict[str, Any]]:
    whole = sum(share["bytes"] for share in shares)
    return [share | {"share": share["bytes"] / whole if whole else 0.0} for share in shares]


# ------------------------------------------------------------------ identity


def _facts(document: Document, report: Report | None) -> list[list[str]]:
    """Label and value of what tells this file from another; only what it says of itself."""
    metadata = document.get("metadata", {})
    # A receipt has these at the top, an artifact of ds4q in an object of its own.
    told = metadata.get("ds4q") if document["kind"] == "artifact" else metadata
    told = told if isinstance(told, dict) else {}
    coded = metadata.get("rocmfpx")
    coded = coded if isinstance(coded, dict) else {}
    version = document.get("version")
    recipe = told.get("recipe", metadata.get("hipfire_quant_recipe"))
    facts: list[tuple[str, Any]] = [
        ("Kind", f"HFQ artifact, version {version}" if version else document["kind"]),
        ("Architecture", metadata.get("architecture")),
        ("Recipe", recipe),
        ("Recipe digest", told.get("recipe_sha256")),
        ("Made by", f"ds4q {told['tool_version']}" if told.get("tool_version") else None),
        ("Part of a model", "yes: tensors are missing on purpose" if told.get("partial") else None),
        ("SHA-256", told.get("sha256") or _sha256(report)),
        ("Source fingerprint", told.get("source_fingerprint")),
        ("Source digest", told.get("source_digest")),
        ("Calibration", _calibration(coded, told)),
        ("Type 107 is read as", coded.get("variant_107")),
        ("Code 32 of FP6 is read as", coded.get("fp6_code32")),
        ("Shards", document.get("shards")),
        ("Skipped source tensors", document.get("skipped")),
    ]
    return [[label, text(value)] for label, value in facts if value is not None]


def _calibration(coded: Mapping[str, Any], told: Mapping[str, Any]) -> str | None:
    word, digest = coded.get("calibration"), told.get("imatrix_sha256")
    if word == "absmax":
        return "none: every column weighs alike"
    if digest:
        return f"imatrix {digest}"
    return None if word is None else str(word)


def _sha256(report: Report | None) -> Any:
    """The digest that the receipt's check took of the whole file."""
    checks = [] if report is None else report.checks
    return next((c.figures["sha256"] for c in checks if "sha256" in c.figures), None)


# ------------------------------------------------------------------ checks


def _check(check: Check) -> dict[str, Any]:
    """A check; figures that are lists of objects become tables, the rest words."""
    figures, tables = [], []
    for key, value in check.figures.items():
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            tables.append(_table(key, value))
        else:
            figures.append([text(key), _figure(value)])
    return {
        "name": text(check.name),
        "verdict": check.verdict,
        "unjudged": check.unjudged,
        "seconds": round(check.seconds, 2),
        "figures": figures,
        "tables": tables,
        "notes": [text(note) for note in check.notes],
        "count": check.count,
        "failures": [text(line) for line in check.lines()],
    }


def _table(name: str, items: list[dict[str, Any]]) -> dict[str, Any]:
    columns = list(dict.fromkeys(key for item in items for key in item))
    return {
        "name": text(name),
        "columns": [text(column) for column in columns],
        "rows": [[_figure(item.get(c, "")) for c in columns] for item in items[:MAX_TABLE_ROWS]],
    }


def _figure(value: Any) -> str:
    if type(value) is int:
        return f"{value:,}"
    if isinstance(value, dict):
        return text(", ".join(f"{key} {_figure(item)}" for key, item in value.items()))
    if isinstance(value, list):
        return text(", ".join(_figure(item) for item in value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return text(value)
