"""C21: characters split over tokens; and the split of reasoning from content."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4q.runtime.text.decode import TextStream, split_reasoning


def stream(pieces: list[bytes]) -> list[str]:
    """What a stream shows for tokens of these bytes, one entry per token and one for the end."""
    texts = TextStream(pieces.__getitem__)
    return [*(texts.push(token) for token in range(len(pieces))), texts.finish()]


@pytest.mark.parametrize(
    ("pieces", "shown"),
    [
        ([b"\xf0\x9f", b"\x98\x80"], ["", "😀", ""]),
        ([b"\xe4\xbd\xa0\xe5", b"\xa5\xbd"], ["你", "好", ""]),
        ([b"\xff"], ["�", ""]),
        ([b"a", b"\xe4"], ["a", "", "�"]),
        ([b"\xe4\xbd"], ["", "�"]),
        ([b"\xf0\x9f\x98"], ["", "�"]),
        ([b"\xe4", b"a"], ["", "�a", ""]),
        ([b"", b"a"], ["", "a", ""]),
    ],
    ids=["emoji", "two-characters", "lone-ff", "dangling", "2-of-3", "3-of-4", "broken", "empty"],
)
def test_c21(pieces: list[bytes], shown: list[str]) -> None:
    assert stream(pieces) == shown


@given(pieces=st.lists(st.binary(max_size=5)))
def test_streamed_text_is_the_plain_text(pieces: list[bytes]) -> None:
    assert "".join(stream(pieces)) == b"".join(pieces).decode("utf-8", errors="replace")


@given(text=st.text(), cuts=st.lists(st.integers(0, 100)))
def test_no_piece_holds_half_a_character(text: str, cuts: list[int]) -> None:
    raw = text.encode("utf-8")
    bounds = sorted({0, len(raw), *(cut for cut in cuts if cut < len(raw))})
    pieces = [raw[a:b] for a, b in itertools.pairwise(bounds)]
    shown = stream(pieces)
    assert "".join(shown) == text
    assert shown[-1] == ""


def test_stream_ends_once() -> None:
    texts = TextStream([b"\xe4"].__getitem__)
    texts.push(0)
    assert [texts.finish(), texts.finish()] == ["�", ""]


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("r</think>c", "r", "c"),
        ("r", "r", ""),
        ("</think>", "", ""),
        ("", "", ""),
        ("r</think>c</think>d", "r", "c</think>d"),
        ("r</thin", "r</thin", ""),
        ("r<think></think>c", "r<think>", "c"),
    ],
)
def test_split_reasoning(text: str, reasoning: str, content: str) -> None:
    assert split_reasoning(text) == (reasoning, content)
