"""The metadata JSON: strict parsing, the end of the object, canonical bytes, digests."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ds4q.artifact.errors import MetadataError
from ds4q.artifact.metadata import (
    BLANK_DIGEST,
    MAX_NESTING,
    canonical,
    front_digest,
    metadata_digest,
    object_length,
    parse_metadata,
    seal,
)
from tests.checks import check_refused

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
LEAVES = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | TEXT | FLOATS
JSON = st.recursive(
    LEAVES, lambda x: st.lists(x, max_size=4) | st.dictionaries(TEXT, x, max_size=4)
)
OBJECTS = st.dictionaries(TEXT, JSON, max_size=5)

# ------------------------------------------------------------------ canonical bytes


def test_canonical_bytes() -> None:
    value = {"b": [1, 1.5, None], "a": {"ü": "\n\u2028你", "A": True}, "": "\\"}
    text = '{"":"\\\\","a":{"A":true,"ü":"\\n\u2028你"},"b":[1,1.5,null]}'
    assert canonical(value) == text.encode("utf-8")


@given(OBJECTS)
def test_canonical_does_not_depend_on_insertion_order(value: dict[str, Any]) -> None:
    assert canonical(dict(reversed(list(value.items())))) == canonical(value)


@given(OBJECTS)
def test_canonical_parses_back(value: dict[str, Any]) -> None:
    raw = canonical(value)
    assert parse_metadata(raw) == value
    assert object_length(memoryview(raw + b"}]\x00"), "x") == len(raw)


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), -float("inf"), "\ud800", {"\udfff": 1}]
)
def test_canonical_refuses_what_json_cannot_hold(value: object) -> None:
    check_refused(MetadataError, lambda: canonical({"x": value}), says=["cannot be written"])


# ------------------------------------------------------------------ strict parsing


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b'{"a":1,"a":1}', "'a'"),
        (b'{"x":{"a":1,"b":2,"a":1}}', "'a'"),
        (b'{"\\u0061":1,"a":1}', "'a'"),
        (b'{"x":NaN}', "NaN"),
        (b'{"x":[-Infinity]}', "-Infinity"),
        (b'{"x":1e999}', "float"),
        (b'{"x":-1e999}', "float"),
        (b'{"x":"\\ud800"}', "surrogate"),
        (b'{"\\udc00":1}', "surrogate"),
        (b'{"x":"\xff"}', "byte 6"),
        (b'{"x":"\xed\xa0\x80"}', "not UTF-8"),
        (b'{"x":"\xc0\x80"}', "not UTF-8"),
        (b'\xef\xbb\xbf{"x":1}', "not JSON"),
        (b'{"x":01}', "not JSON"),
        (b'{"x":"\n"}', "not JSON"),
        (b"{'x':1}", "not JSON"),
        (b'{"x":1,}', "not JSON"),
        (b'{"x":1}}', "not JSON"),
        (b"[]", "not a JSON object"),
        (b"1", "not a JSON object"),
        (b"", "not JSON"),
        (b'{"x":' + b"9" * 5000 + b"}", "not usable JSON"),
        (b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "not JSON"),
    ],
    ids=lambda value: repr(value[:24]) if isinstance(value, bytes) else "",
)
def test_attack_on_the_parser(raw: bytes, words: str) -> None:
    check_refused(MetadataError, lambda: parse_metadata(raw, "p"), path="p", says=[words])


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        (b"{}", {}),
        (b'{"a":{"a":1},"b":{"a":1}}', {"a": {"a": 1}, "b": {"a": 1}}),
        (b'{"x":1e308}', {"x": 1e308}),
        (b'{"x":"\\ud83d\\ude00\xc3\xbc"}', {"x": "\U0001f600ü"}),
        (b'{"x":"NaN"}', {"x": "NaN"}),
        (b' {"x" : [ ] }\n', {"x": []}),
        (b'{"":0}', {"": 0}),
        (b'{"x":' + b"9" * 4000 + b"}", {"x": int("9" * 4000)}),
    ],
)
def test_legal_twin_of_the_attack(raw: bytes, value: dict[str, Any]) -> None:
    assert parse_metadata(raw) == value


# ------------------------------------------------------------------ where the object ends


@pytest.mark.parametrize(
    "head",
    [
        b"{}",
        b'{"}":"{"}',
        b'{"a\\"}":1}',
        b'{"a":"\\\\"}',
        b'{"a":"\\\\\\""}',
        b'{"a":[{"b":[]},{}]}',
        b'{"\xc3\xbc":"\x7f"}',
    ],
)
@pytest.mark.parametrize("rest", [b"", b"}", b'"', b"\x00\x02", b'{"', b"[[[["])
def test_object_ends_at_its_own_brace(head: bytes, rest: bytes) -> None:
    assert object_length(memoryview(head + rest), "p") == len(head)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "must begin"),
        (b" {}", "must begin"),
        (b"[]", "must begin"),
        (b"\xef\xbb\xbf{}", "must begin"),
        (b"{", "never closes"),
        (b'{"a":{}', "never closes"),
        (b'{"a}', "never closes"),
        (b'{"a\\"}', "never closes"),
        (b'{"a\\', "never closes"),
        (b'{"a":"}\\"}"', "never closes"),
    ],
)
def test_object_without_an_end(raw: bytes, words: str) -> None:
    check_refused(
        MetadataError, lambda: object_length(memoryview(raw), "p"), path="p", says=[words]
    )


@pytest.mark.parametrize("levels", [MAX_NESTING, MAX_NESTING + 1])
def test_nesting_limit(levels: int) -> None:
    raw = b'{"x":' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}"
    if levels <= MAX_NESTING:
        assert object_length(memoryview(raw), "p") == len(raw)
        parse_metadata(raw)
    else:
        check_refused(
            MetadataError, lambda: object_length(memoryview(raw), "p"), says=["256 levels"]
        )


def test_metadata_longer_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = b'{"x":"' + b"a" * 100 + b'"}'
    for limit in (len(raw), len(raw) - 1):
        monkeypatch.setattr("ds4q.artifact.metadata.MAX_METADATA_BYTES", limit)
        if limit == len(raw):
            assert object_length(memoryview(raw), "p") == limit
        else:
            check_refused(
                MetadataError, lambda: object_length(memoryview(raw), "p"), says=["too long"]
            )


def test_scan_of_escapes_takes_no_memory() -> None:
    # A backtracking scan keeps a state for each escape: 900 MB for 16 MB of them.
    raw = b'{"x":"' + b'\\"' * 1_000_000 + b'"}'
    tracemalloc.start()
    try:
        assert object_length(memoryview(raw), "p") == len(raw)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 16


def test_scan_stops_at_a_string_that_never_closes() -> None:
    # Trying each of the quotes as a beginning took time with the square of the length.
    raw = b'{"x":"' + b'\\"' * 1_000_000
    check_refused(
        MetadataError, lambda: object_length(memoryview(raw), "p"), says=["a string never closes"]
    )


# ------------------------------------------------------------------ digests

OURS: dict[str, Any] = {
    "ds4q": {"recipe": "fp4", "metadata_xxh3": BLANK_DIGEST},
    "config": {"a": 1},
}


def test_seal_fills_in_the_digest_of_the_blanked_text() -> None:
    before = json.dumps(OURS)
    raw = seal(OURS)
    assert json.dumps(OURS) == before
    expected = xxhash.xxh3_128(
        b'{"config":{"a":1},"ds4q":{"metadata_xxh3":"' + b" " * 32 + b'","recipe":"fp4"}}'
    ).hexdigest()
    assert parse_metadata(raw)["ds4q"]["metadata_xxh3"] == expected == metadata_digest(raw)
    assert len(raw) == len(canonical(OURS))


def test_seal_does_not_depend_on_what_stood_there() -> None:
    other = {"config": OURS["config"], "ds4q": OURS["ds4q"] | {"metadata_xxh3": "f" * 32}}
    assert seal(other) == seal(OURS)
    assert seal(parse_metadata(seal(OURS))) == seal(OURS)


def test_digest_of_metadata_without_one() -> None:
    for raw in (
        b"{}",
        b'{"ds4q":{}}',
        b'{"ds4q":{"metadata_xxh3":"' + b"A" * 32 + b'"}}',
        b'{"ds4q":{"metadata_xxh3":"' + b"a" * 31 + b'"}}',
        b'{"ds4q":{"metadata_xxh3": "' + b"a" * 32 + b'"}}',
    ):
        assert metadata_digest(raw) is None


def test_quoted_digest_in_a_text_is_not_the_digest() -> None:
    text = '"metadata_xxh3":"' + "0" * 32 + '"'
    raw = seal(OURS | {"tokenizer": text})
    assert metadata_digest(raw) == parse_metadata(raw)["ds4q"]["metadata_xxh3"]


def test_seal_refuses_metadata_that_its_own_reader_would_refuse() -> None:
    twice = OURS | {"config": {"metadata_xxh3": "0" * 32}}
    check_refused(MetadataError, lambda: seal(twice), says=["metadata_xxh3"])
    deep: dict[str, Any] = {}
    for _ in range(MAX_NESTING):
        deep = {"x": deep}
    check_refused(MetadataError, lambda: seal(OURS | {"config": deep}), says=["nested too deeply"])


def test_front_digest() -> None:
    assert front_digest(b"head", b"index") == xxhash.xxh3_128(b"headindex").hexdigest()
