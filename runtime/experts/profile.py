"""Owns the warm-start profile: which experts of a layer a trace used most. Loads no expert.

The file is canonical JSON with a digest of its own content, so one trace always gives the same
bytes, and nothing that they say can change unnoticed.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import xxhash

from ds4q.artifact.errors import MetadataError
from ds4q.artifact.files import beginning, read_small
from ds4q.artifact.metadata import canonical, parse_metadata
from ds4q.runtime.errors import ProfileError, TraceError
from ds4q.runtime.experts.header import Identity
from ds4q.runtime.experts.trace import Trace

FORMAT = "ds4q.profile.v3"
NAMELESS_FORMAT = "ds4q.profile.v2"  # names the artifact, and no source
is_profile = beginning(rb'\{"a_format":"ds4q\.profile\.')  # the keys are sorted: it comes first
"""Whether a file that begins so is a profile."""

DIGEST = "xxh3"  # the key of the digest of all else
MAX_PROFILE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Profile:
    """Experts by layer, most used first; those never used are not listed.

    ``artifact`` is the ``artifact_identity`` of the traced model, ``uses`` how often tokens chose
    each expert, ``source`` the fingerprint of the model's checkpoint, "" where it is not known.
    Which experts a text uses belongs to the model, not to how it is packed.
    """

    artifact: str
    experts: tuple[tuple[int, ...], ...]
    uses: tuple[tuple[int, ...], ...]
    source: str = ""

    @classmethod
    def of(cls, trace: Trace) -> Profile:
        """Count a trace. Equal counts go by expert number.

        Raises ``TraceError`` where nothing was asked for.
        """
        header = trace.header
        counts = np.zeros((header.layers, header.experts), dtype=np.int64)
        for record in trace.bands():
            served = record.ids[np.isin(record.ids, record.distinct)]  # another band has the rest
            counts[record.layer] += np.bincount(served, minlength=header.experts)
        if not counts.any():
            raise TraceError("the trace records no dispatch", path=trace.path)
        order = np.argsort(-counts, axis=1, kind="stable")
        used = [ids[row[ids] > 0] for ids, row in zip(order, counts, strict=True)]
        return cls(
            header.artifact,
            tuple(tuple(ids.tolist()) for ids in used),
            tuple(tuple(row[ids].tolist()) for ids, row in zip(used, counts, strict=True)),
            header.source,
        )

    def encode(self) -> bytes:
        """The file's bytes."""
        return canonical(self._content() | {DIGEST: self.digest})

    @property
    def digest(self) -> str:
        """xxh3-128 (hex) of the content: what the file and a trace's warm start name it by."""
        return _digest(self._content())

    def _content(self) -> dict[str, Any]:
        content = asdict(self)
        if self.source:
            return {"a_format": FORMAT} | content
        del content["source"]
        return {"a_format": NAMELESS_FORMAT} | content


def read_profile(
    path: str | os.PathLike[str], model: Identity, layers: int, experts: int
) -> Profile:
    """The profile at ``path``, of a model of those sizes: it fits every artifact of one checkpoint.

    Raises ``ProfileError``: not a profile, one of another version, damaged, another model's, or
    another artifact's where it names no checkpoint, an expert out of range or twice.
    """
    document = _parse(path)
    version = document.get("a_format")
    known = {"a_format", *(each.name for each in fields(Profile))}
    if version == NAMELESS_FORMAT:
        known.remove("source")
    elif isinstance(version, str) and version != FORMAT and version.startswith(FORMAT[:-1]):
        raise ProfileError("profile of another version", path=path, expected=FORMAT, found=version)
    digest = document.pop(DIGEST, None)
    if version not in (FORMAT, NAMELESS_FORMAT) or document.keys() != known:
        raise ProfileError("not a warm-start profile", path=path)
    if digest != _digest(document):
        raise ProfileError(
            "the profile is damaged: its digest differs",
            path=path,
            expected=digest,
            found=_digest(document),
        )
    made = Identity(document["artifact"], document.get("source", ""))
    if not all(type(word) is str for word in made):
        raise ProfileError("not a warm-start profile", path=path, found=made)
    if (same := made.same_model(model)) is not True:
        what, name = (
            ("another model", "source") if same is False else ("another artifact", "artifact")
        )
        raise ProfileError(
            f"profile of {what}",
            path=path,
            expected=f"{name} {getattr(model, name)}",
            found=getattr(made, name),
        )
    ranked, uses = document["experts"], document["uses"]
    if not _lists(ranked, layers) or not _lists(uses, layers):
        raise ProfileError("profile is not one list of numbers a layer", path=path)
    for layer, (ids, counts) in enumerate(zip(ranked, uses, strict=True)):
        if len(ids) != len(counts) or len(set(ids)) != len(ids):
            raise ProfileError(f"layer {layer}: an expert twice, or without its uses", path=path)
        if ids and not 0 <= min(ids) <= max(ids) < experts:
            raise ProfileError(
                f"layer {layer}: expert out of range",
                path=path,
                expected=f"0 to {experts - 1}",
                found=next(i for i in ids if not 0 <= i < experts),
            )
    return Profile(made.artifact, tuple(map(tuple, ranked)), tuple(map(tuple, uses)), made.source)


def _digest(content: dict[str, Any]) -> str:
    return xxhash.xxh3_128(canonical(content)).hexdigest()


def _parse(path: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        return parse_metadata(read_small(path, MAX_PROFILE_BYTES), path)
    except MetadataError as error:
        raise ProfileError("not a warm-start profile", path=path, found=error.what) from None


def _lists(value: object, layers: int) -> bool:
    return (
        isinstance(value, list)
        and len(value) == layers
        and all(isinstance(row, list) and all(type(x) is int for x in row) for row in value)
    )
