"""Owns what a registry says beyond its schema: names that clash, sidecars, digests, plausibility.

A rule is fatal where following the document could fetch or name the wrong thing. The others only
strict checks refuse: a registry that others publish may hold what this version does not know.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import Any
from unicodedata import normalize

from ds4q.artifact.places import from_json, to_json
from ds4q.registry.arch import CURRENT_RELEASE, KNOWN_QUANTS, arch_fault, effort_native, release
from ds4q.registry.errors import UnsafeNameError
from ds4q.registry.names import plain_name
from ds4q.registry.schema import Problem, shown

SIDECAR_KINDS = (
    "receipt", "dspark_receipt", "dspark", "mtp_receipt", "mtp", "adapter", "triattn"
)  # fmt: skip
"""In the order in which they are fetched: a receipt says what its file has to be."""

RECEIPTS = {"receipt": "trunk", "dspark_receipt": "dspark", "mtp_receipt": "mtp"}
"""Kind of a receipt -> kind of the file that it belongs to."""

PROFILES = ("general", "coding", "instruct")
RECEIPT_SUFFIX = ".receipt"
SIZE_TOLERANCE = 0.25
GB = 10**9


def document_rules(
    models: Mapping[str, Any], aliases: Mapping[str, str], beneath: Collection[str] = ()
) -> Iterator[Problem]:
    """Problems of a document whose schema holds; aliases may mean tags ``beneath``, too."""
    yield from identity_rules(models, aliases, beneath)
    for tag, entry in models.items():
        yield from entry_rules(tag, entry)
        where = ("models", tag)
        if fault := arch_fault(tag, entry["file"], entry["arch_id"]):
            yield Problem((*where, "arch_id"), fault, fatal=False)
        if entry["quant"] not in KNOWN_QUANTS:
            found = shown(entry["quant"])
            yield Problem((*where, "quant"), "unknown quant", found=found, fatal=False)


def identity_rules(
    models: Mapping[str, Any], aliases: Mapping[str, str], beneath: Collection[str] = ()
) -> Iterator[Problem]:
    """A name means one entry, and a file name one file."""
    for alias, tag in aliases.items():
        where = ("aliases", alias)
        if alias in models:
            yield Problem(where, f"alias of {tag!r} is also the tag of an entry, {alias!r}")
        elif tag not in models and tag not in beneath:
            what = "alias of a tag that does not exist"
            yield Problem(where, what, found=repr(tag), fatal=False)
    files: dict[str, list[tuple[str, Any]]] = defaultdict(list)
    for tag, entry in models.items():
        files[entry["file"]].append((tag, entry))
        for kind in SIDECAR_KINDS:
            if kind in entry:
                files[entry[kind]["file"]].append((tag, entry[kind]))
    folded: dict[str, str] = {}
    for file, said in files.items():
        other = folded.setdefault(normalize("NFC", file).casefold(), file)
        if other != file:
            what = f"file {file!r} differs from {other!r} in case or accents only"
            yield Problem(("models", said[0][0], "file"), what, fatal=False)
        named = {file, aliases.get(file, file)} & models.keys()
        if others := sorted(named - {tag for tag, _ in said}):
            what = f"file {file!r} of {said[0][0]!r} is also a name of {others[0]!r}"
            yield Problem(("models", said[0][0], "file"), what, fatal=False)
        for key in ("size_bytes", "sha256"):
            values = {item[key]: tag for tag, item in said if item.get(key) is not None}
            if len(values) > 1:
                (a, first), (b, second) = list(values.items())[:2]
                what = f"file {file!r} has another {key} under {second!r} than under {first!r}"
                yield Problem(("models", second), what, str(a), str(b), fatal=False)


def entry_rules(tag: str, entry: Mapping[str, Any]) -> Iterator[Problem]:
    """Problems of one entry, filled in or not."""
    where = ("models", tag)
    parts = [(where, entry)] + [((*where, k), entry[k]) for k in SIDECAR_KINDS if k in entry]
    names: dict[str, tuple[str, ...]] = {}
    for at, item in parts:
        name = item["file"]
        try:
            plain_name(from_json(name), what=f"{' '.join(at[2:])} file".strip())
        except UnsafeNameError as error:
            yield Problem((*at, "file"), error.what, found=error.found)
        if name in names:
            yield Problem((*at, "file"), f"the same file as {names[name][-1]!r}", found=shown(name))
        names[name] = at
        if item.get("unverified") and item.get("sha256") is not None:
            yield Problem(at, "has a sha256, and says that it is unverified", fatal=False)
        if item.get("sha256") is None and entry["repo"] and not item.get("unverified"):
            yield Problem(at, "has no sha256, and does not say that it is unverified", fatal=False)
        if item.get("sha256") is not None and item.get("size_bytes") is None:
            yield Problem(at, "has a sha256 and no size_bytes", fatal=False)
    yield from _sidecar_rules(tag, entry)
    size_bytes, size_gb = entry.get("size_bytes"), entry["size_gb"]
    if size_bytes is not None and abs(size_bytes / GB - size_gb) > SIZE_TOLERANCE * size_gb:
        what = "size_gb is more than 25 % away from size_bytes"
        found = f"{size_gb} GB for {size_bytes} bytes"
        yield Problem((*where, "size_gb"), what, found=found, fatal=False)
    if effort_native(tag):
        yield from _budget_rules(where, entry)


def _sidecar_rules(tag: str, entry: Mapping[str, Any]) -> Iterator[Problem]:
    where = ("models", tag)
    if "mtp" in entry and release(tag, entry["file"]) == CURRENT_RELEASE:
        what = f"an MTP draft does not pair with the {CURRENT_RELEASE} trunk; its draft is dspark"
        yield Problem((*where, "mtp"), what, found=shown(entry["mtp"]["file"]))
    for kind, of in RECEIPTS.items():
        if kind not in entry:
            continue
        owner = entry if of == "trunk" else entry.get(of)
        if owner is None:
            yield Problem((*where, kind), f"a receipt of a {of} file that is not registered")
        elif entry[kind]["file"] != (beside := to_json(from_json(owner["file"]) + RECEIPT_SUFFIX)):
            expected, found = shown(beside), shown(entry[kind]["file"])
            yield Problem((*where, kind, "file"), f"not the {of}'s receipt", expected, found)


def _budget_rules(where: tuple[str, ...], entry: Mapping[str, Any]) -> Iterator[Problem]:
    profiles = entry.get("sampling_profiles", {})
    settings = [(("sampling_profiles", n), profiles[n]) for n in PROFILES if n in profiles]
    for at, said in [*settings, (("recommended_settings",), entry.get("recommended_settings", {}))]:
        if "thinking_budget" in said:
            what = "a thinking budget means nothing to a model with reasoning efforts"
            yield Problem((*where, *at, "thinking_budget"), what, fatal=False)
