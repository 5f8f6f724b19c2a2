"""Owns ``ds4q registry gen``: the curated file and the listing become the registry document.

Offline and pure: the same two files give the same bytes, on any machine and day, so ``--check`` is
a comparison. Only ``refresh`` asks the hub, and it changes the listing, from which all follows.
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds4q.artifact.errors import Ds4qError
from ds4q.artifact.files import unless_changed, write_whole
from ds4q.registry.arch import KNOWN_QUANTS, arch_id_for, quant_for
from ds4q.registry.entries import SCHEMA_VERSION, check_document
from ds4q.registry.errors import GenerateError, RegistryError
from ds4q.registry.hub import look_up
from ds4q.registry.rules import SIDECAR_KINDS
from ds4q.registry.schema import Kind, Problem, canonical, parse, schema_problems, shown
from ds4q.registry.sources import read_file

CURATED, LISTING, DOCUMENT = "models.json", "listing.json", "registry.json"


@dataclass(frozen=True, slots=True)
class Generated:
    """What ``generate`` did: whether files differ from what they should be, and in which lines."""

    changed: bool
    diff: tuple[str, ...]


def generate(
    folder: Path | None = None, *, check: bool = False, refresh: bool = False
) -> Generated:
    """Make ``registry.json`` from ``models.json`` and ``listing.json`` in ``folder``.

    Parameters
    ----------
    folder : the one of this package if None
    check : write nothing, only compare
    refresh : ask the hub for every repo of the curated file first

    Raises
    ------
    GenerateError : holds every problem; nothing is written then
    DocumentError, OSError : a file cannot be used at all
    """
    folder = folder or Path(__file__).parent
    curated = _read(folder / CURATED, "curated")
    listing = _read(folder / LISTING, "listing")
    texts = {}
    if refresh:
        listing = _listed(curated, listing)
        texts[LISTING] = canonical(listing)
    texts[DOCUMENT] = canonical(document_of(curated, listing))
    diff: list[str] = []
    for name, text in texts.items():
        path = folder / name
        may_replace = unless_changed(path)
        before = path.read_text("utf-8") if path.exists() else ""
        if before != text:
            lines = before.splitlines(), text.splitlines()
            diff += difflib.unified_diff(*lines, f"{name} as it is", name, lineterm="")
            if not check:
                write_whole(path, text, replace=may_replace)
    return Generated(bool(diff), tuple(diff))


def _read(path: Path, kind: Kind) -> dict[str, Any]:
    """A file that people or an earlier run wrote; unknown keys are errors there."""
    document = parse(read_file(str(path)), str(path))
    if problems := schema_problems(document, kind):
        raise GenerateError.of(problems, path)
    return document


def document_of(curated: Mapping[str, Any], listing: Mapping[str, Any]) -> dict[str, Any]:
    """The registry document: what people wrote, and digests, sizes, ids, quant and commit.

    Its time is the listing's, which is when digests and sizes were true; so the document needs no
    clock.

    Raises
    ------
    GenerateError : holds every problem
    """
    problems: list[Problem] = []
    models = {
        tag: _filled(tag, entry, listing["repos"], problems)
        for tag, entry in curated["models"].items()
    }
    document = {
        "schema_version": SCHEMA_VERSION,
        "generated_at": listing["listed_at"],
        "models": models,
        "aliases": curated["aliases"],
    }
    if not problems:  # else what is missing would be told twice
        problems += check_document(canonical(document).encode("utf-8"), DOCUMENT)
        problems += _misnamed(document)
        for tag, entry in curated["models"].items():
            problems += _changed(entry, models[tag], ("models", tag))
    if problems:
        raise GenerateError.of(problems, CURATED)
    return document


def _filled(
    tag: str, entry: Mapping[str, Any], repos: Mapping[str, Any], problems: list[Problem]
) -> dict[str, Any]:
    """``entry`` with what can be told from its names and its repo's listing."""
    out: dict[str, Any] = {"sha256": None, "size_bytes": None} | dict(entry)
    where = ("models", tag)
    for key, tell in (
        ("arch_id", lambda: arch_id_for(tag, entry["file"])),
        ("quant", lambda: quant_for(entry["file"])),
    ):
        try:
            out[key] = tell()
        except RegistryError as error:
            problems.append(Problem((*where, key), str(error)))
    if not is_hub(entry["repo"]):
        return out  # a folder of files lists nothing: its digests are typed
    repo = repos.get(entry["repo"])
    if repo is None:
        what = "repo is not in the listing; 'ds4q registry gen --refresh' lists it"
        problems.append(Problem((*where, "repo"), what, found=shown(entry["repo"])))
        return out
    if repo["commit"] is not None and "revision" not in entry:
        out["revision"] = repo["commit"]  # the main branch moves
    for kind in (None, *(kind for kind in SIDECAR_KINDS if kind in entry)):
        item = out if kind is None else out[kind]
        listed = repo["files"].get(item["file"])
        if listed is None:
            what = f"no such file in the listing of {entry['repo']}"
            at = where if kind is None else (*where, kind)
            problems.append(Problem((*at, "file"), what, found=shown(item["file"])))
            continue
        said = {key: value for key, value in listed.items() if value is not None}
        if kind is None:
            out |= said
        else:
            out[kind] = item | said
    return out


def is_hub(repo: str) -> bool:
    """Whether a repo is one of the hub, ``owner/name``: neither "" nor a URL."""
    return bool(repo) and "://" not in repo


def _changed(before: Any, after: Any, where: tuple[str, ...]) -> Iterator[Problem]:
    """Values that people wrote and that the document does not hold as they wrote them."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key, value in before.items():
            yield from _changed(value, after.get(key), (*where, key))
    elif before != after:
        what = "the curated value is not what names and listing say"
        yield Problem(where, what, shown(after), shown(before))


def _misnamed(document: Mapping[str, Any]) -> Iterator[Problem]:
    """Names that end in another quant than that of their entry: mq2lloyd is not mq2lloydu.

    What we publish is held to that; what people call their own files is theirs to say.
    """
    models, aliases = document["models"], document["aliases"]
    names = {("models", tag): tag for tag in models}
    names |= {("aliases", alias): tag for alias, tag in aliases.items() if tag in models}
    for where, tag in names.items():
        _, colon, variant = where[-1].partition(":")
        word, quant = variant.rpartition("-")[2], models[tag]["quant"]
        if colon and word in KNOWN_QUANTS and word != quant:
            yield Problem(where, "a name of another quant than its entry's", quant, word)


def _listed(curated: Mapping[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """The listing anew: of every repo the files that entries name; same time if nothing changed."""
    wanted: dict[str, set[str]] = {}
    revisions: dict[str, str | None] = {}
    problems = []
    for tag, entry in curated["models"].items():
        repo = entry["repo"]
        if not is_hub(repo):
            continue
        files = {entry["file"], *(entry[kind]["file"] for kind in SIDECAR_KINDS if kind in entry)}
        wanted.setdefault(repo, set()).update(files)
        if revisions.setdefault(repo, entry.get("revision")) != entry.get("revision"):
            what = "another revision of the repo than an entry before it; a listing holds one"
            problems.append(Problem(("models", tag, "revision"), what, found=shown(repo)))
    repos = {}
    for repo in sorted(wanted):
        try:
            held = look_up(repo, revisions[repo])
        except Ds4qError as error:
            problems.append(Problem(("repos", repo), str(error)))
            continue
        listed = {
            name: {"size_bytes": held.files[name].size_bytes, "sha256": held.files[name].sha256}
            for name in sorted(wanted[repo] & held.files.keys())
        }
        repos[repo] = {"commit": held.commit, "files": listed}
    if problems:
        raise GenerateError.of(problems, LISTING)
    if repos == before["repos"]:
        return before
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {"schema_version": SCHEMA_VERSION, "listed_at": now, "repos": repos}
