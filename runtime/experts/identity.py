"""Owns which artifact a trace, a profile or a predictor belongs to. Reads no payload."""

from __future__ import annotations

import xxhash

from ds4q.artifact.hfq import Reader
from ds4q.artifact.metadata import canonical


def identity(reader: Reader) -> str:
    """xxh3-128 (hex) of header, index and metadata.

    Header and index alone are equal for two models of one shape; the metadata names the source.
    """
    hasher = xxhash.xxh3_128(reader.header_raw + reader.index_raw)
    hasher.update(canonical(reader.metadata))
    return hasher.hexdigest()
