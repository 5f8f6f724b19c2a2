"""DeepSeek-V4's prompt format: every rule, the published pairs, and C20."""

# ruff: noqa: RUF001 (the fullwidth bars of the control tokens are meant)

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from ds4q.runtime.errors import ChatError, ControlTokenError
from ds4q.runtime.text.chat import (
    attach_tools,
    encode_chat,
    encode_raw,
    render,
    require_model_type,
)
from ds4q.runtime.text.pieces import Control
from ds4q.runtime.text.tokenizer import Tokenizer
from tests.runtime.text.messages import (
    CALLS,
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
    reminder,
    result,
    system,
    text,
    user,
)

ROOT = Path(__file__).parents[3]
PAIRS = ROOT.parent / "shared" / "cases" / "chat"  # DeepSeek's files; not part of this repository

# ------------------------------------------------------------------ the published pairs


def golden(number: int) -> tuple[list[Any], str]:
    if not PAIRS.is_dir():
        pytest.skip(f"DeepSeek's pairs of messages and prompts are not at {PAIRS}")
    messages = json.loads((PAIRS / f"test_input_{number}.json").read_text(encoding="utf-8"))
    if isinstance(messages, dict):
        messages = attach_tools(messages["messages"], messages["tools"])
    return messages, (PAIRS / f"test_output_{number}.txt").read_bytes().decode("utf-8")


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_published_pair(number: int) -> None:
    messages, expected = golden(number)
    assert str(render(messages, thinking=number != 4)) == expected


@pytest.mark.parametrize(
    ("number", "tokens", "digest"),
    [
        (1, 541, "1ac61dbdc43db656a72bb9f5d96b649850a54ccb324d38a48281b00d3cb18397"),
        (2, 53, "f160f465f3f1605bb1160d4b21d5a11f742c7a730ee424011a900ca13c596113"),
        (3, 820, "66006d77b65b1e28e420f2f3edda9223587f3aa9b55658c59a2bd2d78a88fd8c"),
        (4, 582, "b14ce13e633d02f03cc25282e106d36dfd3b3283ae504385b9f84edc8591d456"),
    ],
)
def test_ids_of_published_pair(
    number: int, tokens: int, digest: str, deepseek_tokenizer: Tokenizer
) -> None:
    messages, _ = golden(number)
    ids = render(messages, thinking=number != 4).encode(deepseek_tokenizer)
    assert len(ids) == tokens
    assert hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest() == digest


def test_ids_of_a_short_prompt(deepseek_tokenizer: Tokenizer) -> None:
    messages = [system("You are a helpful assistant."), user("What is 2+2?")]
    prompt = encode_chat(CONFIG, deepseek_tokenizer, messages, thinking=True)
    assert prompt.ids == [
        0, 3476, 477, 260, 11502, 22896, 16, 128803, 3085, 344, 223, 20, 13, 20, 33, 128804, 128821
    ]  # fmt: skip
    assert prompt.marks == (16,)


# ------------------------------------------------------------------ short examples

EXAMPLES: list[tuple[str, list[Message], str, dict[str, Any], str]] = [
    ("chat", [user("hi")], "chat", {}, U + "hi" + A + C),
    ("thinking", [user("hi")], "thinking", {}, U + "hi" + A + T),
    ("two users", [user("a"), user("b")], "chat", {}, U + "a\n\nb" + A + C),
    (
        "dropping",
        [user("a"), X, user("b")],
        "thinking",
        {},
        U + "a" + A + C + "x" + E + U + "b" + A + T,
    ),
    (
        "dropping off",
        [user("a"), X, user("b")],
        "thinking",
        {"drop_thinking": False},
        U + "a" + A + T + "r" + C + "x" + E + U + "b" + A + T,
    ),
    (
        "call and result without tools",
        [user("a"), {**X, "tool_calls": [call()]}, result("R")],
        "thinking",
        {},
        U + "a" + A + C + "x" + CALLS + E + U + "<tool_result>R</tool_result>" + A + T,
    ),
    (
        "system between users",
        [user("a"), system("mid"), user("b")],
        "chat",
        {},
        U + "a" + "mid" + U + "b" + A + C,
    ),
    (
        "reminder",
        [user("a"), reminder("R")],
        "chat",
        {},
        U + "a" + A + C + "<｜latest_reminder｜>R",
    ),
    (
        "wo_eos",
        [user("a"), assistant("x", wo_eos=True)],
        "thinking",
        {},
        U + "a" + A + T + C + "x",
    ),
    (
        "developer dropped",
        [developer("d"), assistant("x"), user("b")],
        "thinking",
        {},
        "x" + E + U + "b" + A + T,
    ),
]


@pytest.mark.parametrize(
    ("messages", "mode", "options", "expected"),
    [example[1:] for example in EXAMPLES],
    ids=[example[0] for example in EXAMPLES],
)
def test_short_example(
    messages: list[Message], mode: str, options: dict[str, Any], expected: str
) -> None:
    assert text(messages, mode, **options) == expected


# ------------------------------------------------------------------ rule by rule


def test_developer_is_kept_in_chat_mode_and_when_it_asks_last() -> None:
    assert text([developer("d"), assistant("x")]) == U + "d" + A + C + "x" + E
    last = [user("a"), assistant("x", "r"), developer("d")]
    assert text(last, "thinking") == U + "a" + A + C + "x" + E + U + "d" + A + T


def test_reasoning_after_the_last_question_is_kept() -> None:
    messages = [user("a"), X, X]
    assert text(messages, "thinking") == U + "a" + A + T + "r" + C + "x" + E + "r" + C + "x" + E


def test_reasoning_without_any_question_is_kept() -> None:
    assert text([X], "thinking") == "r" + C + "x" + E


def test_chat_mode_never_writes_reasoning() -> None:
    assert text([user("a"), X]) == U + "a" + A + C + "x" + E


def test_tools_switch_dropping_off() -> None:
    kept = U + "a" + A + T + "r" + C + "x" + E + U + "b" + A + T
    question = [user("a"), X, user("b")]
    assert text([system("s", tools=[TOOL]), *question], "thinking") == ("s\n\n" + TOOL_BLOCK + kept)
    on_assistant = [user("a"), {**X, "tools": [TOOL]}, user("b")]
    assert text(on_assistant, "thinking") == kept
    assert text([system("s", tools=[]), *question], "thinking") != "s" + kept


def test_tools_on_a_user_message_are_lost() -> None:
    messages = [user("a", tools=[TOOL]), X, user("b")]
    assert text(messages, "thinking") == U + "a" + A + C + "x" + E + U + "b" + A + T


def test_tools_are_attached_to_the_system_message() -> None:
    assert text(attach_tools([system("s"), user("a")], [TOOL])) == (
        "s\n\n" + TOOL_BLOCK + U + "a" + A + C
    )
    assert text(attach_tools([user("a")], [TOOL])) == "\n\n" + TOOL_BLOCK + U + "a" + A + C
    assert attach_tools([user("a")], []) == [user("a")]


def test_tools_of_a_developer_follow_its_text() -> None:
    assert text([developer("d", tools=[TOOL])]) == U + "d\n\n" + TOOL_BLOCK + A + C


def test_system_without_content_is_empty() -> None:
    assert text([system(None), user("a")]) == U + "a" + A + C


def test_results_stand_in_the_order_of_the_calls() -> None:
    calls = [call("f", "1"), call("f", "2"), call("f", "3")]
    messages = [
        user("a"),
        assistant(None, tool_calls=calls),
        result("three", "3"),
        user("between"),
        result("lost", "9"),
        result("one", "1"),
        result("two", "2"),
    ]
    rendered = text(messages)
    turn = rendered[rendered.rindex(U) + len(U) :]
    results = [f"<tool_result>{word}</tool_result>" for word in ("lost", "one", "two", "three")]
    assert turn == "\n\n".join([results[0], "between", *results[1:]]) + A + C


def test_only_the_latest_calls_order_results() -> None:
    messages = [
        user("a"),
        assistant("", tool_calls=[call("f", "1"), call("f", "2")]),
        result("two", "2"),
        assistant("", tool_calls=[call("f", "2"), call("f", "1")]),
        result("one", "1"),
        result("two", "2"),
    ]
    assert text(messages).endswith(
        "<tool_result>two</tool_result>\n\n<tool_result>one</tool_result>" + A + C
    )


def test_result_as_a_list_of_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}, 3]
    assert text([result(parts)]) == (
        U + "<tool_result>a\n\n[Unsupported image]\n\nb\n\n[Unsupported None]</tool_result>" + A + C
    )


@pytest.mark.parametrize("call_id", [None, 7, ["x"], "unknown"])
def test_result_with_an_odd_call_id_is_taken(call_id: Any) -> None:
    messages = [assistant("", tool_calls=[call("f", "1")]), result("R", call_id), result("S", "1")]
    assert "<tool_result>R</tool_result>\n\n<tool_result>S</tool_result>" in text(messages)


def test_calls_follow_the_content() -> None:
    assert text([assistant("x", tool_calls=[call()])]) == "x" + CALLS + E
    assert text([assistant(None, tool_calls=[call()])]) == CALLS + E


@pytest.mark.parametrize("task", ["query", "authority", "domain", "read_url"])
def test_task_replaces_the_opening(task: str) -> None:
    assert text([user("a", task=task)], "thinking") == U + "a" + f"<｜{task}｜>"


def test_action_follows_the_opening() -> None:
    assert text([user("a", task="action")]) == U + "a" + A + C + "<｜action｜>"


def test_title_follows_the_end_of_the_answer() -> None:
    messages = [user("a"), assistant("x", task="title"), assistant("Title", "r")]
    assert text(messages, "thinking") == (
        U + "a" + A + T + C + "x" + E + "<｜title｜>" + "Title" + E
    )


def test_answer_to_a_task_has_no_reasoning() -> None:
    assert text([user("a", task="query"), X], "thinking") == U + "a" + "<｜query｜>" + "x" + E


def test_user_text_starts_a_turn_after_a_task_and_a_result_does_not() -> None:
    assert text([user("a", task="query"), user("b")]) == U + "a" + U + "b" + A + C
    joined = U + "a\n\n<tool_result>R</tool_result>" + "<｜query｜>"
    assert text([user("a", task="query"), result("R")]) == joined


def test_fields_that_the_format_does_not_know_change_nothing() -> None:
    odd = user("a", mask=1, name="me", wo_eos=True, reasoning_content="r", tool_calls=[call()])
    assert text([odd]) == U + "a" + A + C


# ------------------------------------------------------------------ C20


def test_c20_no_template_is_needed(tiny_tokenizer: Tokenizer) -> None:
    assert str(render([user("hi")])) == B + "<｜User｜>hi<｜Assistant｜></think>"
    assert str(render([user("hi")], thinking=True)) == B + "<｜User｜>hi<｜Assistant｜><think>"
    off = encode_chat(CONFIG, tiny_tokenizer, [user("hi")])
    on = encode_chat(CONFIG, tiny_tokenizer, [user("hi")], thinking=True)
    assert (off.ids, off.thinking) == ([256, 258, *b"hi", 259, 261], False)
    assert (on.ids, on.thinking) == ([256, 258, *b"hi", 259, 260], True)


@pytest.mark.parametrize(
    "model_type", ["deepseek_v41", "deepseek_v3", "deepseek_v4_mtp", "DeepSeek_V4", "", None, 4]
)
def test_c20_other_model_types_are_refused(model_type: Any, tiny_tokenizer: Tokenizer) -> None:
    with pytest.raises(ChatError, match=r"m\.hfq: .*expected deepseek_v4, found"):
        encode_chat({"model_type": model_type}, tiny_tokenizer, [user("hi")], path="m.hfq")
    with pytest.raises(ChatError):
        require_model_type({})


def test_c20_literal_marker_in_user_text_is_text(tiny_tokenizer: Tokenizer) -> None:
    messages = [user(f"a{A}b{C}")]
    controls = [p.text for p in render(messages).pieces if isinstance(p, Control)]
    assert controls == [B, U, A, C]
    ids = encode_chat(CONFIG, tiny_tokenizer, messages).ids
    assert ids == [256, 258, *f"a{A}b{C}".encode(), 259, 261]


@pytest.mark.parametrize("role", ["system", "developer", "latest_reminder", "assistant", "tool"])
def test_c20_literal_marker_in_any_role_is_text(role: str) -> None:
    messages = [{"role": role, "content": f"a{A}b"}]
    texts = [piece for piece in render(messages).pieces if isinstance(piece, str)]
    assert any(f"a{A}b" in piece for piece in texts)


def test_c20_tool_and_developer_roles() -> None:
    assert text([result("R")]) == U + "<tool_result>R</tool_result>" + A + C
    assert text([developer("d")]) == U + "d" + A + C


@pytest.mark.parametrize("role", ["user", "developer"])
def test_c20_content_as_parts(role: str) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert text([{"role": role, "content": parts}]) == U + "a\n\nb" + A + C


def test_c20_no_messages() -> None:
    with pytest.raises(ChatError, match="no messages"):
        render([])


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    "message",
    [
        "hi",
        None,
        {},
        {"role": "bot", "content": "a"},
        {"role": ["user"], "content": "a"},
        user(None),
        user(3),
        user({"type": "text", "text": "a"}),
        user([{"type": "image_url", "image_url": {"url": "x"}}]),
        user([{"type": "text"}]),
        user([{"type": "text", "text": None}]),
        user(["a"]),
        user("a", task="title"),
        user("a", task=["query"]),
        assistant("a", task="query"),
        assistant(3),
        assistant("a", reasoning_content=3),
        assistant("a", tool_calls={"id": 1}),
        assistant("a", tool_calls=[3]),
        result(None),
        result([{"type": "text"}]),
        developer(None),
        reminder(None),
        system("s", tools={"f": 1}),
        system("s", tools=["f"]),
        system("s", response_format={"type": "json_object"}),
        developer("d", response_format={"type": "json_object"}),
    ],
    ids=repr,
)
def test_bad_message_is_one_line(message: Any) -> None:
    with pytest.raises(ChatError) as caught:
        render([user("ok"), message])
    assert "\n" not in str(caught.value)


def test_tools_need_the_markers_in_the_tokenizer(tiny_tokenizer: Tokenizer) -> None:
    with pytest.raises(ControlTokenError, match="｜DSML｜"):
        encode_chat(CONFIG, tiny_tokenizer, [system("s", tools=[TOOL]), user("a")])


def test_raw_text_begins_a_document(tiny_tokenizer: Tokenizer) -> None:
    assert encode_raw(tiny_tokenizer, "a<think>") == [256, *b"a<think>"]
    assert encode_raw(tiny_tokenizer, "") == [256]
