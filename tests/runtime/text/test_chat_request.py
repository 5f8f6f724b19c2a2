"""What a request adds to a conversation: effort, response format, a prefix; and where to go on."""

from __future__ import annotations

from typing import Any

import pytest

from ds4q.quantize.encoding import Encoding
from ds4q.runtime.errors import ChatError, EffortError, ResponseFormatError
from ds4q.runtime.text.chat import attach_response_format, attach_tools, encode_chat, render
from ds4q.runtime.text.pieces import Control
from ds4q.runtime.text.tokenizer import Tokenizer
from tests.runtime.text.messages import (
    CONFIG,
    TOOL,
    TOOL_BLOCK,
    A,
    B,
    C,
    E,
    Message,
    T,
    U,
    X,
    assistant,
    call,
    developer,
    system,
    text,
    user,
)

# ------------------------------------------------------------------ effort and response format


def encoding(**more: Any) -> Encoding:
    """A release whose texts are not DeepSeek's; what is not named is absent."""
    fields: dict[str, Any] = {
        "release": "0731",
        "efforts": {"low": "", "high": "Think.\n\n"},
        "response_format": None,
        "sha256": {},
        "notes": (),
    }
    return Encoding(**fields | more)


def test_effort_stands_right_behind_bos() -> None:
    asked = {"effort": "high", "encoding": encoding()}
    assert text([system("s"), user("a")], "thinking", **asked) == (
        "Think.\n\n" + "s" + U + "a" + A + T
    )
    assert text([user("a")], "thinking", effort="low", encoding=encoding()) == U + "a" + A + T
    assert text([user("a")], "chat", **asked) == U + "a" + A + C


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (None, "no text for effort 'max'; it is part of a release: name its folder .*--encoding"),
        (
            encoding(),
            "no text for effort 'max': expected low, high; the release's encoding .* none$",
        ),
    ],
    ids=["no file", "no text"],
)
def test_effort_without_its_text_is_refused_in_thinking_mode(
    given: Encoding | None, said: str
) -> None:
    with pytest.raises(EffortError, match=said):
        render([user("a")], thinking=True, effort="max", encoding=given)
    assert text([user("a")], effort="max", encoding=given) == U + "a" + A + C


def test_least_effort_needs_no_file_and_says_what_the_file_says() -> None:
    assert text([user("a")], "thinking", effort="low") == U + "a" + A + T
    other = encoding(efforts={"low": "Hm.\n\n"})
    assert text([user("a")], "thinking", encoding=other) == "Hm.\n\n" + U + "a" + A + T


def test_unknown_effort_is_refused() -> None:
    with pytest.raises(ChatError, match="expected low, high, max, found 'highest'"):
        render([user("a")], thinking=True, effort="highest", encoding=encoding())


def test_markers_in_a_release_s_text_are_control_tokens() -> None:
    """It is part of the template, unlike what a caller writes."""
    own = encoding(efforts={"low": "", "high": f"In {T} only.\n"}, response_format=f"Behind {C}:\n")
    messages = [system(T, response_format={"type": C}), user("a")]
    prompt = render(messages, thinking=True, effort="high", encoding=own)
    controls = [piece.text for piece in prompt.pieces if isinstance(piece, Control)]
    assert controls == [B, T, C, U, A, T]


JSON = {"type": "json_object"}
FORMAT = encoding(response_format="## Format:\n\nAnswer so:\n")


@pytest.mark.parametrize("mode", ["chat", "thinking"])
def test_response_format_follows_the_text_and_the_tools(mode: str) -> None:
    block = '\n\n## Format:\n\nAnswer so:\n{"type": "json_object"}'
    end = U + "a" + A + (C if mode == "chat" else T)
    messages = attach_response_format([system("s"), user("a")], JSON)
    assert text(messages, mode, encoding=FORMAT) == "s" + block + end
    messages = attach_response_format(attach_tools([user("a")], [TOOL]), JSON)
    assert text(messages, mode, encoding=FORMAT) == "\n\n" + TOOL_BLOCK + block + end


def test_response_format_of_a_developer_follows_its_text() -> None:
    block = '\n\n## Format:\n\nAnswer so:\n{"b": 1, "a": "é"}'
    asked = developer("d", response_format={"b": 1, "a": "é"})
    assert text([asked], encoding=FORMAT) == U + "d" + block + A + C


@pytest.mark.parametrize("nothing", [None, {"type": "text"}])
def test_a_response_format_of_text_changes_nothing(nothing: Any) -> None:
    messages = [user("a")]
    assert attach_response_format(messages, nothing) == messages


def test_response_format_without_system_message_gets_one() -> None:
    assert attach_response_format([user("a")], JSON) == [
        system("", response_format=JSON),
        user("a"),
    ]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (None, "no text for a response format; .*--encoding"),
        (encoding(), "no text for a response format; the release's encoding that is used has none"),
    ],
    ids=["no file", "no text"],
)
def test_response_format_without_its_text_is_refused(given: Encoding | None, said: str) -> None:
    with pytest.raises(ResponseFormatError, match=said):
        render(attach_response_format([user("a")], JSON), encoding=given)


# ------------------------------------------------------------------ prefix, marks


def test_marks_stand_behind_each_assistant_token(tiny_tokenizer: Tokenizer) -> None:
    messages = [user(f"a{A}"), X, user("b"), X, user("c")]
    for thinking in (False, True):
        prompt = encode_chat(CONFIG, tiny_tokenizer, messages, thinking=thinking)
        assert [prompt.ids[mark - 1] for mark in prompt.marks] == [259] * 3
        assert prompt.ids.count(259) == 3
        assert prompt.marks[-1] == len(prompt.ids) - 1


def test_dropped_reasoning_leaves_the_prompt_before_the_mark_as_it_was(
    tiny_tokenizer: Tokenizer,
) -> None:
    """Why the marks are where they are: the next prompt goes on from the last one of this."""
    asked = encode_chat(CONFIG, tiny_tokenizer, [user("a")], thinking=True)
    again = encode_chat(CONFIG, tiny_tokenizer, [user("a"), X, user("b")], thinking=True)
    mark = asked.marks[-1]
    assert again.ids[:mark] == asked.ids[:mark]
    assert again.ids[mark] != asked.ids[mark]
    assert again.marks[0] == mark


def test_prefix_is_continued_in_chat_mode(tiny_tokenizer: Tokenizer) -> None:
    messages = [user("a"), X, user("b"), assistant("The answ", "r", prefix=True)]
    for thinking in (False, True):
        prompt = encode_chat(CONFIG, tiny_tokenizer, messages, thinking=thinking, effort="max")
        assert not prompt.thinking
        assert tiny_tokenizer.decode(prompt.ids) == (
            B + U + "a" + A + C + "x" + E + U + "b" + A + C + "The answ"
        )
        assert prompt.ids[prompt.marks[-1]] == 261


def test_empty_prefix_and_prefix_false(tiny_tokenizer: Tokenizer) -> None:
    bare = encode_chat(CONFIG, tiny_tokenizer, [user("a")])
    assert encode_chat(CONFIG, tiny_tokenizer, [user("a"), assistant("", prefix=True)]) == bare
    unmarked = [user("a"), assistant("x", prefix=False), user("b", prefix=None)]
    assert encode_chat(CONFIG, tiny_tokenizer, unmarked).marks


@pytest.mark.parametrize(
    "messages",
    [
        [user("a"), assistant("x", prefix=True), user("b")],
        [user("a", prefix=True)],
        [user("a"), assistant("x", prefix="true")],
        [user("a"), assistant("x", prefix=1)],
        [user("a"), assistant("x", prefix=True, tool_calls=[call()])],
        [assistant("x", prefix=True)],
        [system("s"), assistant("x", prefix=True)],
        [user("a"), assistant("x"), assistant("y", prefix=True)],
        ["a", assistant("x", prefix=True)],
    ],
    ids=repr,
)
def test_prefix_elsewhere_is_refused(messages: list[Any], tiny_tokenizer: Tokenizer) -> None:
    with pytest.raises(ChatError, match="cannot be a prefix"):
        encode_chat(CONFIG, tiny_tokenizer, messages)


@pytest.mark.parametrize("last", [assistant("x"), system("s")], ids=["assistant", "system"])
def test_last_message_must_ask(last: Message, tiny_tokenizer: Tokenizer) -> None:
    with pytest.raises(ChatError, match="asks for no answer"):
        encode_chat(CONFIG, tiny_tokenizer, [user("a"), last])


def test_answer_to_a_task_begins_outside_the_reasoning(deepseek_tokenizer: Tokenizer) -> None:
    prompt = encode_chat(CONFIG, deepseek_tokenizer, [user("a", task="query")], thinking=True)
    assert not prompt.thinking


def test_no_messages_to_encode(tiny_tokenizer: Tokenizer) -> None:
    with pytest.raises(ChatError, match="no messages"):
        encode_chat(CONFIG, tiny_tokenizer, [])


def test_thinking_that_is_not_dropped(tiny_tokenizer: Tokenizer) -> None:
    messages = [user("a"), X, user("b")]
    kept = encode_chat(CONFIG, tiny_tokenizer, messages, thinking=True, drop_thinking=False)
    assert (
        tiny_tokenizer.decode(kept.ids) == B + U + "a" + A + T + "r" + C + "x" + E + U + "b" + A + T
    )
