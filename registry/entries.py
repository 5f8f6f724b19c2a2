"""Owns what a registry says, as values: entries, sidecars, what a name resolves to, which to use.

How a document is had: ``sources.py``. What its text may hold: ``schema.py``, ``rules.py``.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ds4q.artifact.places import from_json
from ds4q.registry import sources
from ds4q.registry.errors import AmbiguousNameError, DocumentError, SourceError, UnknownTagError
from ds4q.registry.rules import SIDECAR_KINDS, document_rules
from ds4q.registry.schema import Problem, canonical, in_order, parse, schema_problems
from ds4q.registry.sources import local_registry_path as local_registry_path

SCHEMA_VERSION = 1
_SUGGESTED = 5
_SHOWN_PROBLEMS = 3


@dataclass(frozen=True, slots=True)
class Sidecar:
    """A file that belongs to a trunk or its draft: ``kind`` is one of ``SIDECAR_KINDS``."""

    kind: str
    file: str
    sha256: str | None
    size_bytes: int | None
    unverified: bool = False


@dataclass(frozen=True, slots=True)
class Entry:
    """What a tag means.

    Attributes
    ----------
    repo : "" where the file is nowhere but here, ``owner/name`` of the hub, or the URL of a folder
    size_gb, min_vram_gb : decimal gigabytes, for people; ``size_bytes`` is exact
    sha256 : 64 lower-case hex digits, or None where nobody published them
    revision : commit, tag or branch of the repo; None is its main branch
    sidecars : in the order in which they are fetched, the receipt first
    unverified : the entry itself says that there is no digest
    raw : the JSON object as it stands in the document
    """

    tag: str
    repo: str
    file: str
    desc: str
    size_gb: float
    min_vram_gb: float
    sha256: str | None
    size_bytes: int | None
    arch_id: int
    quant: str
    quant_recipe: str | None
    revision: str | None
    sidecars: tuple[Sidecar, ...]
    unverified: bool
    raw: Mapping[str, Any]


@dataclass(frozen=True)
class Registry:
    """A document that holds.

    Attributes
    ----------
    origin : where it is from, in words that fit a message
    warnings : what is wrong with it or with how it was had, yet does not forbid its use
    local : tags that come from the user's own document
    comment : its ``_comment``
    """

    entries: Mapping[str, Entry]
    aliases: Mapping[str, str]
    generated_at: str
    origin: str
    warnings: tuple[str, ...] = ()
    local: frozenset[str] = frozenset()
    comment: str | None = None

    def resolve(self, name: str, *, to_pull: bool = False) -> Entry:
        """The entry with this tag, else alias, else registered file name: equal, never alike.

        ``to_pull`` suggests only what can be pulled.

        Raises
        ------
        UnknownTagError : with the nearest names
        AmbiguousNameError : a file name that several tags register
        """
        if name in self.entries:
            return self.entries[name]
        if name in self.aliases:
            return self.entries[self.aliases[name]]
        holders = sorted(tag for tag, entry in self.entries.items() if entry.file == name)
        if len(holders) == 1:
            return self.entries[holders[0]]
        if holders:
            named = [tag for tag in holders if self.entries[tag].repo] if to_pull else []
            remedy = f"give one of the tags {', '.join(named or holders)}"
            raise AmbiguousNameError(path=self.origin, found=repr(name), remedy=remedy)
        raise UnknownTagError(
            path=self.origin, found=repr(name), remedy=self._suggestion(name, to_pull)
        )

    def _suggestion(self, name: str, to_pull: bool) -> str:
        fit = {tag: entry for tag, entry in self.entries.items() if entry.repo or not to_pull}
        aliases = (alias for alias, tag in self.aliases.items() if tag in fit)
        known = {*fit, *aliases, *(entry.file for entry in fit.values())}
        folded = {each.casefold(): each for each in sorted(known)}
        near = difflib.get_close_matches(name.casefold(), folded, n=_SUGGESTED, cutoff=0.6)
        if near:
            return f"did you mean {', '.join(folded[each] for each in near)}?"
        return "'ds4q registry list' shows all tags"


def check_document(raw: bytes, origin: str, *, beneath: Collection[str] = ()) -> list[Problem]:
    """Every problem of a document's text, under the strictest reading.

    ``beneath`` is as for ``read_document``.

    Raises
    ------
    DocumentError : it is no JSON object at all
    """
    return _problems(parse(raw, origin), beneath)


def _problems(document: dict[str, Any], beneath: Collection[str] = ()) -> list[Problem]:
    found = schema_problems(document, "document")
    if not any(problem.fatal for problem in found):
        found += document_rules(document["models"], document.get("aliases", {}), beneath)
    return in_order(found, document)


def read_document(raw: bytes, origin: str, *, beneath: Collection[str] = ()) -> Registry:
    """The registry in a document's text; what only strict checks refuse becomes its warnings.

    A digest in upper case is read as what it means, an alias of nothing is left out. ``beneath``
    are tags of the document that this one will be laid over: its aliases may mean those, too.

    Raises
    ------
    DocumentError : not JSON, or a fatal problem; one bad entry is enough
    """
    return _build(parse(raw, origin), origin, beneath)


def _build(document: dict[str, Any], origin: str, beneath: Collection[str] = ()) -> Registry:
    """``read_document`` of parsed JSON; ``document`` is kept as it is."""
    lowered, said = _lower_digests(document)
    problems = _problems(lowered, beneath)
    fatal = [problem for problem in problems if problem.fatal]
    if fatal:
        text = "; ".join(str(problem) for problem in fatal[:_SHOWN_PROBLEMS])
        more = f"; and {len(fatal) - _SHOWN_PROBLEMS} more" if len(fatal) > _SHOWN_PROBLEMS else ""
        raise DocumentError(text + more, path=origin, remedy="mend the document, or use another")
    models, aliases = lowered["models"], lowered.get("aliases", {})
    return Registry(
        entries={tag: _entry(tag, models[tag]) for tag in sorted(models)},
        aliases={a: tag for a, tag in sorted(aliases.items()) if tag in models or tag in beneath},
        generated_at=lowered["generated_at"],
        origin=origin,
        warnings=tuple(f"{origin}: {text}" for text in [*said, *map(str, problems)]),
        comment=lowered.get("_comment"),
    )


def _lower_digests(value: Any, where: str = "") -> tuple[Any, list[str]]:
    """A copy of ``value`` whose digests are in lower case, and what was changed."""
    if not isinstance(value, dict):
        return value, []
    out, said = {}, []
    for key, item in value.items():
        out[key], below = _lower_digests(item, f"{where}{key}: ")
        said += below
        if key == "sha256" and isinstance(item, str) and item != item.lower():
            out[key] = item.lower()
            said.append(f"{where}sha256: in upper case")
    return out, said


def _entry(tag: str, item: dict[str, Any]) -> Entry:
    return Entry(
        tag=tag,
        repo=item["repo"],
        file=from_json(item["file"]),
        desc=item["desc"],
        size_gb=item["size_gb"],
        min_vram_gb=item["min_vram_gb"],
        sha256=item.get("sha256"),
        size_bytes=_whole(item.get("size_bytes")),
        arch_id=int(item["arch_id"]),
        quant=item["quant"],
        quant_recipe=item.get("quant_recipe"),
        revision=item.get("revision"),
        sidecars=tuple(_sidecar(kind, item[kind]) for kind in SIDECAR_KINDS if kind in item),
        unverified=item.get("unverified", False),
        raw=item,
    )


def _sidecar(kind: str, item: dict[str, Any]) -> Sidecar:
    return Sidecar(
        kind=kind,
        file=from_json(item["file"]),
        sha256=item.get("sha256"),
        size_bytes=_whole(item.get("size_bytes")),
        unverified=item.get("unverified", False),
    )


def _whole(value: float | None) -> int | None:
    """JSON writes a whole number as ``5`` or ``5.0``."""
    return None if value is None else int(value)


def document_text(registry: Registry) -> str:
    """The registry as a document: sorted keys, two spaces, raw UTF-8, a newline at the end."""
    document = {
        "schema_version": SCHEMA_VERSION,
        "generated_at": registry.generated_at,
        "models": {tag: entry.raw for tag, entry in registry.entries.items()},
        "aliases": dict(registry.aliases),
    }
    return canonical(
        document if registry.comment is None else document | {"_comment": registry.comment}
    )


def load_registry(origin: str | None = None, *, offline: bool = False) -> Registry:
    """The registry to use.

    Parameters
    ----------
    origin : path or URL of the one document to use. None: the one that ``DS4Q_REGISTRY_URL`` names,
        else the bundled one; and the user's own document laid over it
    offline : open no connection; what was downloaded last serves in place of a URL

    Raises
    ------
    DocumentError, SourceError, OSError : a document that was asked for cannot be used. Where the
        server of ``DS4Q_REGISTRY_URL`` fails, the last copy or the bundled document serves instead,
        and a warning says so
    """
    if origin is not None:
        return _asked_for(origin, offline)
    url = sources.configured()
    if url is None:
        base = read_document(sources.bundled(), sources.BUNDLED)
    elif sources.is_remote(url):
        base = _configured(url, offline)
    else:
        base = _asked_for(url, offline)
    path = local_registry_path()
    if not path.exists():
        return base
    try:
        raw = sources.read_file(str(path))
        return _laid_over(base, read_document(raw, str(path), beneath=base.entries))
    except (DocumentError, SourceError) as error:
        raise type(error)(
            error.what,
            path=path,
            expected=error.expected,
            found=error.found,
            remedy="this is your own registry: mend it, or move it away and add its tags again",
        ) from None


def update_registry(url: str | None = None) -> Registry:
    """Download the document anew and remember it, whatever is remembered.

    Raises
    ------
    SourceError : neither ``url`` nor ``DS4Q_REGISTRY_URL`` is one, or the server fails
    DocumentError : what came is no registry; what was remembered stays
    """
    url = sources.configured() if url is None else url
    if url is None or not sources.is_remote(url):
        remedy = f"set {sources.URL_VARIABLE} or give --registry URL"
        found = None if url is None else sources.words_for(url)
        raise SourceError("no URL to update the registry from", found=found, remedy=remedy)
    name = sources.words_for(url)
    document = parse(sources.download(url), name)
    registry = _build(document, name)
    try:
        sources.keep_copy(url, document)
    except OSError as error:
        what = f"{error.filename}: {error.strerror}: the next command has to download it again"
        return replace(registry, warnings=(*registry.warnings, what))
    return registry


def _asked_for(origin: str, offline: bool) -> Registry:
    """The document at ``origin`` and no other."""
    if not sources.is_remote(origin):
        return read_document(sources.read_file(origin), sources.words_for(origin))
    if not offline:
        return update_registry(origin)
    name = sources.words_for(origin)
    if (copy := sources.last_copy(origin)) is None:
        remedy = "'ds4q registry update' with the same --registry fetches it"
        raise SourceError("this command does not call out", path=name, remedy=remedy)
    return _build(copy.document, f"last copy of {name}")


def _configured(url: str, offline: bool) -> Registry:
    """The document at ``url``, else the next best, with a warning."""
    copy = _usable(url)
    if copy and (copy[1] or offline):
        return copy[0]
    if offline:
        name = sources.words_for(url)
        why = f"{name}: no copy yet, 'ds4q registry update' fetches one; using the bundled registry"
    else:
        try:
            return update_registry(url)
        except (SourceError, DocumentError) as error:
            use = "the last copy" if copy else "the bundled registry"
            why = f"{error}; using {use}"
    base = copy[0] if copy else read_document(sources.bundled(), sources.BUNDLED)
    return replace(base, warnings=(*base.warnings, why))


def _usable(url: str) -> tuple[Registry, bool] | None:
    """The last copy of ``url`` and whether it is fresh; None where it no longer holds."""
    copy = sources.last_copy(url)
    if copy is None:
        return None
    words = "last copy" if copy.fresh else "stale copy"
    try:
        return _build(copy.document, f"{words} of {sources.words_for(url)}"), copy.fresh
    except DocumentError:
        return None


def _laid_over(base: Registry, local: Registry) -> Registry:
    """``base`` with the user's own entries; a tag always means an entry before an alias does."""
    entries = {**base.entries, **local.entries}
    aliases = {**base.aliases, **local.aliases}
    warnings = [*base.warnings, *local.warnings]
    for alias in sorted(aliases.keys() & entries.keys()):
        tag = aliases.pop(alias)
        warnings.append(f"{local.origin}: {alias!r} is a tag, so it is no alias of {tag!r}")
    return replace(
        base,
        entries=dict(sorted(entries.items())),
        aliases=aliases,
        origin=f"{base.origin} and {local.origin}",
        warnings=tuple(warnings),
        local=frozenset(local.entries),
    )
