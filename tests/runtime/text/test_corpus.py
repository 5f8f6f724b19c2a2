"""Texts and files of ids as windows: every token once, each window with BOS, bad files by name."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4q.artifact.files import NotRegularError
from ds4q.runtime.errors import ConfigError, CorpusError
from ds4q.runtime.text.corpus import bos_id, read_windows
from ds4q.runtime.text.tokenizer import Tokenizer
from tests.checks import check_refused

BOS, VOCAB = 256, 512


def windows(paths: Iterable[Path], **options: Any) -> list[list[int]]:
    known = {"tokenizer": None, "bos": BOS, "vocab_size": VOCAB} | options
    found = read_windows(paths, **known)
    assert all(window.dtype == np.int64 for window in found)
    return [window.tolist() for window in found]


def test_a_text_is_cut_into_windows_that_begin_with_bos(
    tmp_path: Path, tiny_tokenizer: Tokenizer
) -> None:
    (tmp_path / "a.txt").write_bytes("abcdé\r\n".encode())
    found = windows([tmp_path / "a.txt"], tokenizer=tiny_tokenizer, window_tokens=4)
    assert found == [[BOS, 97, 98, 99], [BOS, 100, 0xC3, 0xA9], [BOS, 13, 10]]


def test_no_window_spans_two_files(tmp_path: Path, tiny_tokenizer: Tokenizer) -> None:
    (tmp_path / "a.txt").write_text("abc")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "b.IDS").write_text("1, 2\n3\t4,5 ")
    paths = [tmp_path / name for name in ("a.txt", "empty.txt", "b.IDS")]
    found = windows(paths, tokenizer=tiny_tokenizer, window_tokens=3)
    assert found == [[BOS, 97, 98], [BOS, 99], [BOS, 1, 2], [BOS, 3, 4], [BOS, 5]]


@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=3),
    window=st.integers(2, 12),
    limit=st.none() | st.integers(1, 100),
)
def test_every_token_is_predicted_once(
    lengths: list[int], window: int, limit: int | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("ids")
    ids = iter(range(100))
    texts = [[next(ids) for _ in range(length)] for length in lengths]
    paths = []
    for number, text in enumerate(texts):
        paths.append(folder / f"{number}.ids")
        paths[-1].write_text(" ".join(map(str, text)))
    wanted = [token for text in texts for token in text][:limit]
    if not wanted:
        check_refused(CorpusError, lambda: windows(paths), says=["no tokens"])
        return
    found = windows(paths, window_tokens=window, limit_tokens=limit)
    assert [token for each in found for token in each[1:]] == wanted
    assert all(each[0] == BOS and 2 <= len(each) <= window for each in found)


def test_a_limit_leaves_later_files_unread(tmp_path: Path) -> None:
    (tmp_path / "a.ids").write_text("1 2 3")
    absent = tmp_path / "absent.ids"
    assert windows([tmp_path / "a.ids", absent], limit_tokens=3) == [[BOS, 1, 2, 3]]
    with pytest.raises(FileNotFoundError):
        windows([tmp_path / "a.ids", absent], limit_tokens=4)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("x.ids", b"1 2 -3", ["token 2 is not a token id", "found '-3'"]),
        ("x.ids", b"1 0x10", ["token 1 is not a token id"]),
        ("x.ids", b"9" * 5000, ["token 0 is not a token id"]),
        ("x.ids", b"511 512", ["token 1 is not in the vocabulary: expected 0 to 511, found 512"]),
        ("x.ids", "\u0661".encode(), ["token 0 is not a token id"]),
        ("x.txt", b"ab\xff", ["text is not UTF-8: found byte 2"]),
    ],
)
def test_a_bad_file_is_refused_by_name(
    name: str, content: bytes, says: list[str], tmp_path: Path, tiny_tokenizer: Tokenizer
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    call = lambda: windows([path], tokenizer=tiny_tokenizer)  # noqa: E731
    check_refused(CorpusError, call, path=path, says=says)


@pytest.mark.parametrize("name", ["a.txt", "a.ids"])
def test_what_never_ends_is_refused_at_once(name: str, tmp_path: Path) -> None:
    pipe = tmp_path / name
    os.mkfifo(pipe)
    for path in (Path("/dev/zero"), pipe):
        check_refused(NotRegularError, lambda: windows([path]), path=path)  # noqa: B023
    huge = tmp_path / f"huge-{name}"
    with huge.open("wb") as file:
        file.truncate(3 << 30)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    check_refused(CorpusError, lambda: windows([huge]), path=huge, says=["too large", "67,108,864"])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 150 << 10


def test_a_text_needs_a_tokenizer_and_ids_do_not(tmp_path: Path) -> None:
    for name in ("x.txt", "x.ids"):
        (tmp_path / name).write_text("12")
    says = ["no tokenizer", "ends in .ids"]
    path = tmp_path / "x.txt"
    check_refused(CorpusError, lambda: windows([path]), path=path, says=says)
    assert windows([tmp_path / "x.ids"]) == [[BOS, 12]]


@pytest.mark.parametrize("options", [{"window_tokens": 1}, {"limit_tokens": 0}])
def test_sizes_that_hold_no_token_are_refused(options: dict[str, int], tmp_path: Path) -> None:
    (tmp_path / "x.ids").write_text("12")
    check_refused(CorpusError, lambda: windows([tmp_path / "x.ids"], **options))


def test_bos_is_found_by_its_name_or_in_the_config(tiny_tokenizer: Tokenizer) -> None:
    assert bos_id({"config": {"bos_token_id": 7}}, tiny_tokenizer) == BOS
    assert bos_id({"config": {"bos_token_id": 7}}, None) == 7
    for metadata in ({}, {"config": None}, {"config": {"bos_token_id": True}}):
        check_refused(ConfigError, lambda metadata=metadata: bos_id(metadata, None))  # type: ignore[misc]
