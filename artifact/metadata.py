"""Owns the metadata JSON of an artifact: strict parsing, canonical bytes, and its own digests.

Knows no key but ``ds4q.metadata_xxh3``; what the other keys mean is said where they are used.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import xxhash

from ds4q.artifact.errors import MetadataError

MAX_METADATA_BYTES = 256 << 20
MAX_NESTING = 256
BLANK_DIGEST = " " * 32  # what metadata_xxh3 is replaced by while it is computed

# A whole string, a bracket, or a quote that opens a string without an end. Possessive: the scan
# keeps no state for each escape, and never tries a second way to read the same bytes.
_STRUCTURE = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|["{}\[\]]', re.DOTALL)
_DIGEST_KEY = b'"metadata_xxh3":"'
_DIGEST = re.compile(rb'(?:[0-9a-f]{32}|[ ]{32})"')


def canonical(value: Any) -> bytes:
    """Sorted keys, no spaces, raw UTF-8; NaN, infinity and lone surrogates are refused."""
    try:
        text = json.dumps(
            value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
        )
        return text.encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise MetadataError("metadata cannot be written as JSON", found=str(error)) from None


def seal(metadata: dict[str, Any]) -> bytes:
    """Canonical bytes of ``metadata`` with ``ds4q.metadata_xxh3`` filled in; the input is kept.

    Raises ``MetadataError`` for what the reader would refuse: values that JSON cannot hold, deep
    nesting, and a second key ``metadata_xxh3`` that makes the place of the digest ambiguous.
    """
    blanked = metadata | {"ds4q": metadata["ds4q"] | {"metadata_xxh3": BLANK_DIGEST}}
    raw = canonical(blanked)
    object_length(memoryview(raw), None)
    if metadata_digest(raw) is None:
        raise MetadataError("metadata holds more than one metadata_xxh3")
    digest = xxhash.xxh3_128(raw).hexdigest()
    return canonical(blanked | {"ds4q": blanked["ds4q"] | {"metadata_xxh3": digest}})


def front_digest(header: bytes, index: bytes) -> str:
    """xxh3-128 (hex) of the 32 header bytes and the index, count included: ``ds4q.index_xxh3``."""
    return xxhash.xxh3_128(header + index).hexdigest()


def metadata_digest(raw: bytes) -> str | None:
    """xxh3-128 (hex) of ``raw`` with ``metadata_xxh3`` blanked; None where it is not there once."""
    if raw.count(_DIGEST_KEY) != 1:
        return None
    start = raw.index(_DIGEST_KEY) + len(_DIGEST_KEY)
    end = start + len(BLANK_DIGEST)
    if not _DIGEST.fullmatch(raw, start, end + 1):
        return None
    hasher = xxhash.xxh3_128(memoryview(raw)[:start])
    hasher.update(BLANK_DIGEST.encode())
    hasher.update(memoryview(raw)[end:])
    return hasher.hexdigest()


def any_metadata_digest(raw: bytes) -> str:
    """``metadata_digest``, or xxh3-128 (hex) of all of ``raw`` where it holds none of its own."""
    return metadata_digest(raw) or xxhash.xxh3_128(raw).hexdigest()


def parse_metadata(raw: bytes, path: object = None) -> dict[str, Any]:
    """One strict JSON object: UTF-8, no duplicate key, no NaN or infinity, no lone surrogate."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) != len(pairs):
            counts = Counter(name for name, _ in pairs)
            twice = counts.most_common(1)[0][0]
            raise MetadataError("metadata has a key twice", path=path, found=repr(twice))
        return out

    def refuse(word: str) -> Any:
        raise MetadataError("metadata holds a number that JSON forbids", path=path, found=word)

    try:
        parsed = json.loads(raw.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse)
        # Surrogates and infinity (1e999) may hide behind escapes and exponents.
        json.dumps(parsed, ensure_ascii=False, allow_nan=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise MetadataError("metadata holds a lone surrogate", path=path) from error
    except UnicodeDecodeError as error:
        found = f"byte {error.start}"
        raise MetadataError("metadata is not UTF-8", path=path, found=found) from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise MetadataError("metadata is not JSON", path=path, found=str(error)) from None
    except MetadataError:
        raise
    except ValueError as error:  # infinity, or an integer of more digits than Python converts
        raise MetadataError("metadata is not usable JSON", path=path, found=str(error)) from None
    if not isinstance(parsed, dict):
        raise MetadataError("metadata is not a JSON object", path=path)
    return parsed


def object_length(front: memoryview, path: object) -> int:
    """Length of the JSON object that ``front`` starts with, by a string-aware bracket scan."""
    if not front or front[0] != ord("{"):
        found = repr(bytes(front[:8]))
        raise MetadataError("metadata must begin with '{'", path=path, found=found)
    depth = 0
    for token in _STRUCTURE.finditer(front):
        char = front[token.start()]
        if char == ord('"'):
            if token.end() - token.start() == 1:
                raise MetadataError("a string never closes before data_offset", path=path)
            continue
        if char in b"{[":
            depth += 1
            if depth > MAX_NESTING:
                found = f"more than {MAX_NESTING} levels"
                raise MetadataError("metadata is nested too deeply", path=path, found=found)
        else:
            depth -= 1
            if depth == 0:
                if token.end() > MAX_METADATA_BYTES:
                    raise MetadataError("metadata is too long", path=path, found=token.end())
                return token.end()
    raise MetadataError("metadata object never closes before data_offset", path=path)
