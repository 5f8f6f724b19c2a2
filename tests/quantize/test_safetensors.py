"""The header parser: one test per way to lie in a header, each beside a legal twin."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4q.quantize import safetensors
from ds4q.quantize.errors import (
    DuplicateNameError,
    HeaderError,
    HeaderLengthError,
    LfsPointerError,
    SourceError,
    TensorLayoutError,
    TensorSizeError,
    TrailingBytesError,
    TruncatedShardError,
    UnsupportedDtypeError,
)
from ds4q.quantize.safetensors import Entry, Header, parse_header, parse_json, read_header
from tests.quantize.builders import header_text, record, shard_bytes

TWO = (
    '{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},'
    '"b":{"dtype":"U8","shape":[4],"data_offsets":%s}}'
)


def read(path: Path) -> Header:
    fd = os.open(path, os.O_RDONLY)
    try:
        return read_header(fd, path.stat().st_size, path)
    finally:
        os.close(fd)


def parse(text: str | bytes, data_bytes: int) -> Header:
    return parse_header(text.encode() if isinstance(text, str) else text, data_bytes, "f")


def one(dtype: str, shape: str, offsets: str, extra: str = "") -> str:
    return f'{{"w":{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}{extra}}}}}'


# ---------------------------------------------------------------- header length


@pytest.mark.parametrize(
    ("case", "claimed", "size"),
    [("max", 2**64 - 1, 68), ("1TiB", 2**40, 68), ("plus1", 10**6, 68), ("zero", 0, 68)],
)
def test_length_field_is_compared_with_the_file(
    cases_dir: Path, case: str, claimed: int, size: int
) -> None:
    path = cases_dir / f"c01_len_{case}.safetensors"
    with pytest.raises(HeaderLengthError) as caught:
        read(path)
    message = str(caught.value)
    assert str(path) in message
    assert f"{claimed} bytes" in message
    assert f"file of {size} bytes" in message


def test_length_field_that_fits_exactly_is_legal(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    path.write_bytes(shard_bytes("{}"))
    assert read(path) == Header([], {}, 10)


@pytest.mark.parametrize("size", [0, 1, 7])
def test_file_without_room_for_the_length_is_refused(tmp_path: Path, size: int) -> None:
    path = tmp_path / "f.safetensors"
    path.write_bytes(b"\1" * size)
    with pytest.raises(HeaderLengthError, match=f"a file of {size} bytes"):
        read(path)


def test_header_over_the_limit_is_named_and_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f.safetensors"
    path.write_bytes(shard_bytes("{}", claimed=10**10))
    os.truncate(path, 2 * 10**10)  # sparse: the claim fits into the file
    asked = record(monkeypatch, "pread", lambda fd, n, at: n)
    with pytest.raises(HeaderLengthError, match=f"at most {safetensors.MAX_HEADER_BYTES} bytes"):
        read(path)
    assert sum(asked) < 100


def test_large_header_opens_and_costs_what_it_holds(tmp_path: Path) -> None:
    count = 100_000
    text = ",".join(
        f'"t{i:06d}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}' for i in range(count)
    )
    path = tmp_path / "f.safetensors"
    path.write_bytes(shard_bytes("{" + text + "}"))
    header = read(path)
    assert len(header.entries) == count
    assert header.entries[-1] == Entry("t099999", "U8", (0,), 0, 0)


# ---------------------------------------------------------------- layout


@pytest.mark.parametrize(
    ("case", "error", "words"),
    [
        ("overlap", TensorLayoutError, ["b:", "[2, 6]", "[0, 4] of a", "same bytes"]),
        ("alias", TensorLayoutError, ["b:", "[0, 4] over [0, 4] of a"]),
        ("hole", TensorLayoutError, ["[4, 6]", "after a [0, 4]", "[6, 10]", "no tensor"]),
        ("reverse", TensorSizeError, ["b:", "[8, 4]", "backwards"]),
        ("dup", DuplicateNameError, ["duplicate key", "'a'"]),
    ],
)
def test_layout_faults_name_tensors_and_ranges(
    cases_dir: Path, case: str, error: type[SourceError], words: list[str]
) -> None:
    with pytest.raises(error) as caught:
        read(cases_dir / f"c02_{case}.safetensors")
    assert [word for word in words if word not in str(caught.value)] == []


def test_entries_may_stand_in_any_order(cases_dir: Path) -> None:
    header = read(cases_dir / "c02_unordered_ok.safetensors")
    assert header.entries == [Entry("a", "U8", (2,), 0, 2), Entry("b", "U8", (2,), 2, 4)]


def test_hole_at_the_start_is_refused() -> None:
    with pytest.raises(TensorLayoutError, match=r"\[0, 2\], before \[2, 6\]"):
        parse(one('"U8"', "[4]", "[2,6]"), 6)


def test_empty_tensors_take_no_bytes_and_are_no_alias() -> None:
    text = header_text({"a": ("U8", (0, 3)), "b": ("U8", (4,)), "c": ("F32", (0,))})
    assert [e.name for e in parse(text, 4).entries] == ["a", "b", "c"]


def test_bytes_after_the_last_tensor_are_refused() -> None:
    assert len(parse(TWO % "[4,8]", 8).entries) == 2
    with pytest.raises(TrailingBytesError, match="3 more"):
        parse(TWO % "[4,8]", 11)


# ---------------------------------------------------------------- truncation


def test_truncated_shard_says_by_how_much(cases_dir: Path) -> None:
    with pytest.raises(TruncatedShardError, match=r"c04_cut\.safetensors.*short by 4096 bytes"):
        read(cases_dir / "c04_cut.safetensors")
    assert len(read(cases_dir / "c04_full.safetensors").entries) == 15


def test_cut_inside_the_header_is_refused(cases_dir: Path) -> None:
    with pytest.raises(HeaderLengthError, match="file of 20 bytes"):
        read(cases_dir / "c04_cut_header.safetensors")


def test_every_cut_of_a_shard_is_refused(cases_dir: Path, tmp_path: Path) -> None:
    whole = (cases_dir / "c03_f4_ok.safetensors").read_bytes()
    path = tmp_path / "cut.safetensors"
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises((HeaderLengthError, TruncatedShardError)):
            read(path)


def test_lfs_pointer_is_called_by_its_name(cases_dir: Path) -> None:
    with pytest.raises(LfsPointerError, match="git-lfs pointer"):
        read(cases_dir / "lfs_pointer" / "model.safetensors")


# ---------------------------------------------------------------- one tensor alone


def test_packed_and_unpacked_fp4_have_the_same_bytes(cases_dir: Path) -> None:
    packed = read(cases_dir / "c03_f4_ok.safetensors").entries
    bytewise = read(cases_dir / "c03_i8_ok.safetensors").entries
    assert packed == [Entry("w", "F4", (2, 32), 0, 32), Entry("s", "F8_E8M0", (2, 1), 32, 34)]
    assert bytewise == [Entry("w", "I8", (2, 16), 0, 32), Entry("s", "F8_E8M0", (2, 1), 32, 34)]


def test_odd_element_count_of_fp4_is_refused(cases_dir: Path) -> None:
    with pytest.raises(TensorSizeError, match="odd element count 3"):
        read(cases_dir / "c03_f4_odd.safetensors")


def test_shape_is_compared_with_the_bytes(cases_dir: Path) -> None:
    with pytest.raises(TensorSizeError, match=r"w:.*expected 16384 bytes.*found 128 bytes"):
        read(cases_dir / "c03_short_data.safetensors")


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [("F4", 4), ("F6_E2M3", 6), ("U8", 8), ("BF16", 16), ("F32", 32), ("C64", 64)],
)
def test_every_dtype_has_its_width(dtype: str, bits: int) -> None:
    text = one(f'"{dtype}"', "[4,2]", f"[0,{bits}]")
    assert parse(text, bits).entries == [Entry("w", dtype, (4, 2), 0, bits)]
    with pytest.raises(TensorSizeError, match=f"expected {bits} bytes"):
        parse(one(f'"{dtype}"', "[4,2]", f"[0,{bits + 1}]"), bits + 1)


def test_unknown_dtype_is_not_called_damage() -> None:
    with pytest.raises(UnsupportedDtypeError) as caught:
        parse(one('"F3_E1M1"', "[8]", "[0,3]"), 3)
    assert "unsupported dtype: found 'F3_E1M1'" in str(caught.value)
    assert "need not be damaged" in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        one('"U8"', "[4.0]", "[0,4]"),
        one('"U8"', "[true]", "[0,1]"),
        one('"U8"', '["4"]', "[0,4]"),
        one('"U8"', "4", "[0,4]"),
        one('"U8"', "[4]", "[0,4,8]"),
        one('"U8"', "[4]", "[0]"),
        one('"U8"', "[4]", '["0","4"]'),
        one("8", "[4]", "[0,4]"),
        one('"U8"', "[4]", "[0,4]", ',"x":1'),
        '{"w":{"dtype":"U8","shape":[4]}}',
        '{"w":[0,4]}',
        '{"w":null}',
    ],
)
def test_entry_of_the_wrong_kind_names_its_tensor(text: str) -> None:
    with pytest.raises(HeaderError, match="w: entry must hold"):
        parse(text, 4)


@pytest.mark.parametrize("shape", ["[-4]", "[-2,-2]", f"[{2**60}]", "[" + "1," * 300 + "4]"])
def test_impossible_shape_is_refused(shape: str) -> None:
    with pytest.raises(TensorSizeError, match="w: impossible shape"):
        parse(one('"U8"', shape, "[0,4]"), 4)


def test_scalar_is_one_element() -> None:
    assert parse(one('"F32"', "[]", "[0,4]"), 4).entries == [Entry("w", "F32", (), 0, 4)]


# ---------------------------------------------------------------- JSON


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b'{"w":NaN}', "number that JSON forbids: found NaN"),
        (b'{"w":-Infinity}', "found -Infinity"),
        (b'{"w":1e999}', "found 1e999"),
        (b'{"w\xff":1}', "not UTF-8"),
        (rb'{"\ud800":1}', "lone surrogate"),
        (b'{"w":1', "not JSON"),
        (b'{"w":1}x', "not JSON"),
        (b'{"w":' + b"9" * 5000 + b"}", "not JSON"),
        (b'{"w":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b"[1]", "not a JSON object"),
        (b"\xef\xbb\xbf{}", "byte-order mark"),
    ],
)
def test_json_is_strict(raw: bytes, words: str) -> None:
    with pytest.raises(HeaderError, match=words):
        parse_header(raw, 0, "f")


def test_escaped_name_with_both_surrogates_is_legal() -> None:
    text = one('"U8"', "[4]", "[0,4]").replace('"w"', r'"\ud83d\ude00"')
    assert parse(text, 4).entries[0].name == "\U0001f600"


def test_duplicate_key_inside_an_entry_is_refused() -> None:
    with pytest.raises(DuplicateNameError, match="'shape'"):
        parse(one('"U8"', "[4]", "[0,4]", ',"shape":[4]'), 4)


def test_header_must_begin_with_a_brace(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    path.write_bytes(shard_bytes(" {}"))
    with pytest.raises(HeaderError, match="begin with"):
        read(path)
    path.write_bytes(shard_bytes("{}   "))  # padding after the object is how files are aligned
    assert read(path).entries == []


def test_metadata_holds_strings() -> None:
    assert parse('{"__metadata__":{"format":"pt"}}', 0).metadata == {"format": "pt"}
    for value in ("{1:2}", '{"a":1}', "[]", "null", '"x"'):
        with pytest.raises(HeaderError):
            parse('{"__metadata__":' + value + "}", 0)


def test_other_json_files_have_their_own_error() -> None:
    assert parse_json(b'{"a":{"a":1}}', "f") == {"a": {"a": 1}}
    with pytest.raises(SourceError, match="not usable JSON: not JSON"):
        parse_json(b"{", "f")


# ---------------------------------------------------------------- mutation

SMALL = header_text({"a": ("U8", (2, 2)), "bé": ("BF16", (3,)), "c": ("F4", (2, 4))}).encode()
SMALL_DATA = bytes(range(14))


@given(
    edits=st.lists(
        st.tuples(st.integers(0, 8 + len(SMALL) - 1), st.integers(0, 255)), min_size=1, max_size=3
    ),
    cut=st.integers(0, 4),
)
def test_any_mutation_is_refused_or_covers_the_data(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[int, int]], cut: int
) -> None:
    raw = bytearray(shard_bytes(SMALL, SMALL_DATA))
    for at, value in edits:
        raw[at] = value
    path = tmp_path_factory.getbasetemp() / "mutated.safetensors"
    path.write_bytes(raw[: len(raw) - cut])
    try:
        header = read(path)
    except SourceError:
        return
    data = bytes(raw[header.data_offset : len(raw) - cut])
    assert b"".join(data[e.start : e.stop] for e in header.entries) == data


@given(st.binary(max_size=64))
def test_noise_is_refused(noise: bytes) -> None:
    try:
        header = parse_header(noise, 0, "f")
    except SourceError:
        return
    assert isinstance(json.loads(noise), dict)
    assert all(e.stop == 0 for e in header.entries)
