"""Reading an answer as it comes: reasoning, content, calls, stop strings; whatever the pieces."""

# ruff: noqa: RUF001 (the fullwidth bars of the control tokens are meant)

from __future__ import annotations

import itertools
import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ds4q.runtime.errors import ChatError
from ds4q.runtime.text.answer import AnswerStream, ToolCall
from ds4q.runtime.text.decode import TextStream
from ds4q.runtime.text.pieces import Prompt
from ds4q.runtime.text.tokenizer import Tokenizer
from ds4q.runtime.text.tools import tool_calls_block

PAIRS = Path(__file__).parents[4] / "shared" / "cases" / "chat"  # DeepSeek's; not part of this

CALLS = "<｜DSML｜tool_calls>"
END = "</｜DSML｜tool_calls>"
CALL = '<｜DSML｜invoke name="f">'
CALL_END = "</｜DSML｜invoke>"
VALUE_END = "</｜DSML｜parameter>"


def parameter(name: str, value: str, *, string: str = "true") -> str:
    return f'<｜DSML｜parameter name="{name}" string="{string}">{value}{VALUE_END}'


def block(*parameters: str) -> str:
    """A well-formed block of one call of ``f``, as the format writes it."""
    return "\n".join([CALLS, CALL, "\n".join(parameters), CALL_END, END])


@dataclass
class Answer:
    """An answer as its reader was told it."""

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    finish_reason: str | None = None


def read(
    chunks: Any,
    *,
    thinking: bool = False,
    tools: bool = True,
    stop: Any = (),
    reason: str = "stop",
) -> Answer:
    answer = Answer()
    stream = AnswerStream(thinking=thinking, tools=tools, stop=stop)
    pieces = [piece for chunk in chunks for piece in stream.push(chunk)]
    assert not any(isinstance(piece, ToolCall) or not piece[1] for piece in pieces)
    pieces += stream.finish(reason)
    for piece in pieces:
        if isinstance(piece, ToolCall):
            answer.calls.append((piece.name, piece.arguments))
        elif piece[0] == "reasoning":
            assert not answer.content
            answer.reasoning += piece[1]
        else:
            answer.content += piece[1]
    answer.finish_reason = stream.finish_reason
    return answer


# ------------------------------------------------------------------ reasoning and content


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
        ("r</think>\n\nc\n", "r", "\n\nc\n"),
        (f"{block()}</think>c", block(), "c"),
    ],
)
def test_reasoning_ends_at_the_first_tag(text: str, reasoning: str, content: str) -> None:
    for chunks in ([text], list(text)):
        assert read(chunks, thinking=True) == Answer(reasoning, content, [], "stop")


def test_without_thinking_the_tag_is_text() -> None:
    assert read(["a</think>b<think>"]) == Answer("", "a</think>b<think>", [], "stop")


@pytest.mark.parametrize("stray", ["<think>", "<｜begin▁of▁sentence｜>", "｜DSML｜", CALL, END])
def test_stray_control_tokens_are_text(stray: str) -> None:
    answer = read(list(f"r{stray}r</think>a{stray}b"), thinking=True)
    assert answer == Answer(f"r{stray}r", f"a{stray}b", [], "stop")


def test_a_call_after_reasoning() -> None:
    answer = read(list(f"why</think>so\n\n{block()}"), thinking=True)
    assert answer == Answer("why", "so", [("f", "{}")], "tool_calls")


def test_channel_turns_with_the_tag() -> None:
    stream = AnswerStream(thinking=True, tools=False)
    assert (stream.channel, stream.push("a</thi")) == ("reasoning", [("reasoning", "a")])
    assert (stream.channel, stream.push("nk>")) == ("reasoning", [])
    assert stream.channel == "content"
    assert AnswerStream(thinking=False, tools=False).channel == "content"


def test_only_what_may_be_a_tag_is_held_back() -> None:
    stream = AnswerStream(thinking=True, tools=False)
    assert stream.push("abc</th") == [("reasoning", "abc")]
    assert stream.push("<") == [("reasoning", "</th")]
    assert stream.push("/think>x") == [("content", "x")]
    assert stream.push("<｜DSML｜tool_calls>") == [("content", CALLS)]
    stream = AnswerStream(thinking=False, tools=True)
    assert stream.push("a\n\n\n") == [("content", "a\n")]
    assert stream.push("<｜DSML｜tool_") == []
    assert stream.push("x") == [("content", "\n\n<｜DSML｜tool_x")]
    assert stream.push("\n") == []
    assert stream.push("b") == [("content", "\nb")]


# ------------------------------------------------------------------ calls


@pytest.mark.parametrize(
    ("feeds", "content"), [(0, "c"), (1, "c"), (2, "c"), (3, "c\n"), (4, "c\n\n")]
)
def test_two_line_feeds_before_a_block_are_not_content(feeds: int, content: str) -> None:
    text = "c" + "\n" * feeds + block()
    for chunks in ([text], list(text)):
        assert read(chunks) == Answer("", content, [("f", "{}")], "tool_calls")


def test_arguments_stand_in_their_order_strings_as_json_others_as_they_are() -> None:
    text = block(
        parameter("b", ' say "hi"\n<é>\\ '),
        parameter("a", '{"z":1, "a": [1.50, NULL]}'.replace("NULL", "null"), string="false"),
        parameter("e", ""),
        parameter("n", " 1e999 ", string="false"),
        parameter("i", "9" * 5000, string="false"),
    )
    ((name, arguments),) = read(list(text)).calls
    assert name == "f"
    assert arguments == (
        '{"b": " say \\"hi\\"\\n<é>\\\\ ", "a": {"z":1, "a": [1.50, null]}, "e": "", '
        f'"n":  1e999 , "i": {"9" * 5000}}}'
    )
    assert json.loads(arguments, parse_int=str)["b"] == ' say "hi"\n<é>\\ '


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_calls_follow_each_other(reason: str) -> None:
    text = f"{CALLS}{CALL} {CALL_END}\t{CALL.replace('f', 'g h')}\r\n{CALL_END}{END}\n \n"
    for chunks in ([text], list(text)):
        answer = read(chunks, reason=reason)
        assert answer == Answer("", "", [("f", "{}"), ("g h", "{}")], "tool_calls")


def test_calls_have_ids_of_their_own() -> None:
    ids = set()
    for _ in range(2):
        stream = AnswerStream(thinking=False, tools=True)
        stream.push(block()[: -len(END)] + CALL + CALL_END + END)
        calls = stream.finish("stop")
        ids |= {call.id for call in calls if isinstance(call, ToolCall)}
    assert len(ids) == 4
    assert all(each.startswith("call_") for each in ids)


def test_a_value_runs_to_its_closing_tag() -> None:
    value = f"<tag>{END}{CALL}</｜DSML｜param\n<｜DSML｜tool_calls></think>"
    ((_, arguments),) = read(list(block(parameter("a", value)))).calls
    assert json.loads(arguments) == {"a": value}


def test_a_block_is_text_where_no_tool_was_offered() -> None:
    text = f"a\n\n{block()}"
    for chunks in ([text], list(text)):
        assert read(chunks, tools=False) == Answer("", text, [], "stop")


MALFORMED = {
    "no call": f"{CALLS}\n{END}",
    "no end": block()[: -len(END)],
    "half an end": block()[:-1],
    "no end of the call": f"{CALLS}\n{CALL}\n{END}",
    "ends in a value": f'{CALLS}{CALL}<｜DSML｜parameter name="a" string="true">x',
    "ends in a name": f'{CALLS}<｜DSML｜invoke name="f',
    "text between": f"{CALLS}\nx{CALL}\n{CALL_END}{END}",
    "text in a call": f"{CALLS}\n{CALL}\nx\n{CALL_END}{END}",
    "text behind": f"{block()} x",
    "tag behind": f"{block()}{END}",
    "block behind": f"{block()}\n{block()}",
    "no-break space": f"{CALLS}\u00a0{CALL}{CALL_END}{END}",
    "parameter outside": f"{CALLS}{parameter('a', 'x')}{CALL}{CALL_END}{END}",
    "call in a call": f"{CALLS}{CALL}{CALL}{CALL_END}{CALL_END}{END}",
    "no name": f"{CALLS}{CALL.replace('f', '')}{CALL_END}{END}",
    "no name, then one": f"{CALLS}{CALL.replace('f', '')}{CALL}{CALL_END}{END}",
    "no name of a parameter": block(parameter("", "x")),
    "no name of a parameter, then one": block(
        '<｜DSML｜parameter name="" string="true">' + parameter("a", "x")
    ),
    "marker in a name": f"{CALLS}{CALL.replace('f', 'f｜DSML｜')}{CALL_END}{END}",
    "other attribute": f'{CALLS}<｜DSML｜invoke id="f">{CALL_END}{END}',
    "more attributes": f'{CALLS}<｜DSML｜invoke name="f" id="1">{CALL_END}{END}',
    "no kind": block(f'<｜DSML｜parameter name="a">x{VALUE_END}'),
    "other kind": block(parameter("a", "x", string="maybe")),
    "repeated": block(parameter("a", "x"), parameter("a", "y")),
    "not JSON": block(parameter("a", "x", string="false")),
    "no JSON": block(parameter("a", "", string="false")),
    "more than JSON": block(parameter("a", "1 2", string="false")),
    "NaN": block(parameter("a", "[NaN]", string="false")),
    "infinity": block(parameter("a", "-Infinity", string="false")),
    "deep": block(parameter("a", "[" * 100_000, string="false")),
    "capital": f"{CALLS}{CALL.replace('invoke', 'Invoke')}{CALL_END}{END}",
    "old marker": f"{CALLS}{CALL.replace('｜DSML｜', '')}{CALL_END}{END}",
}


@pytest.mark.parametrize("text", MALFORMED.values(), ids=MALFORMED.keys())
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_malformed_block_is_content_and_no_call(text: str, reason: str) -> None:
    text = f"c\n\n{text}"
    chunks = [text] if len(text) > 10_000 else list(text)
    assert read(chunks, reason=reason) == Answer("", text, [], reason)
    assert read([text], reason=reason) == Answer("", text, [], reason)


def test_text_behind_a_fault_comes_at_once() -> None:
    stream = AnswerStream(thinking=False, tools=True)
    assert stream.push(f"a\n\n{CALLS}\nThis") == [
        ("content", "a"),
        ("content", f"\n\n{CALLS}\n"),
        ("content", "This"),
    ]
    assert stream.push(f" is how: {block()}") == [("content", f" is how: {block()}")]
    assert stream.finish("stop") == []
    assert stream.finish_reason == "stop"


# ------------------------------------------------------------------ stop strings


@pytest.mark.parametrize(
    ("stop", "text", "content"),
    [
        (["END"], "abENDcd", "ab"),
        (["END"], "abEN", "abEN"),
        (["END"], "abENEND", "abEN"),
        (["aab"], "aaab", "a"),
        (["bc", "abcd"], "xabcd", "xa"),
        (["abcd", "bcd"], "xabcd", "x"),
        (["d", "abcd"], "xabcd", "x"),
        (["\n\n"], "a\nb\n\nc", "a\nb"),
        (["a"], "a", ""),
        (["é😀"], "xé😀y", "x"),
        ([], "abc", "abc"),
    ],
)
def test_the_answer_ends_before_a_stop_string(stop: list[str], text: str, content: str) -> None:
    for chunks in ([text], list(text)):
        for tools in (False, True):
            assert read(chunks, stop=stop, tools=tools) == Answer("", content, [], "stop")


def test_stop_string_cut_in_half_by_a_token_border() -> None:
    stream = AnswerStream(thinking=False, tools=False, stop=["</end>"])
    assert stream.push("one </e") == [("content", "one ")]
    assert not stream.stopped
    assert stream.push("nd> two") == []
    assert stream.stopped
    assert stream.push("three") == []
    assert stream.finish("length") == []
    assert stream.finish_reason == "stop"


def test_what_does_not_become_a_stop_string_is_shown() -> None:
    stream = AnswerStream(thinking=False, tools=False, stop=["abc", "bd"])
    assert stream.push("xab") == [("content", "x")]
    assert stream.push("e") == [("content", "abe")]
    assert stream.push("b") == []
    assert stream.finish("length") == [("content", "b")]
    assert stream.finish_reason == "length"


def test_stop_strings_are_not_looked_for_in_the_reasoning() -> None:
    answer = read(list("one\n\ntwo</think>three\n\nfour"), thinking=True, stop=["\n\n"])
    assert answer == Answer("one\n\ntwo", "three", [], "stop")
    assert read(["a</think>b"], thinking=True, stop=["</think>"]) == Answer("a", "b", [], "stop")


def test_stop_strings_are_not_looked_for_in_a_block() -> None:
    text = f"so\n\n{block(parameter('a', 'x STOP'))}"
    for stop in (["STOP"], [END], ["invoke"], [f"{CALLS}\n"]):
        for chunks in ([text], list(text)):
            answer = read(chunks, stop=stop)
            assert answer == Answer("", "so", [("f", '{"a": "x STOP"}')], "tool_calls")


def test_a_stop_string_before_a_block_ends_the_answer() -> None:
    text = f"so\n\n{block()}"
    for stop, content in ((["\n\n"], "so"), (["DSML"], "so\n\n<｜"), ([CALLS], "so\n\n")):
        for chunks in ([text], list(text)):
            assert read(chunks, stop=stop) == Answer("", content, [], "stop")


def test_stop_strings_are_looked_for_again_behind_a_fault() -> None:
    text = f"{CALLS}\nSTOP is {CALL}: STOP it"
    for chunks in ([text], list(text)):
        assert read(chunks, stop=["STOP"]) == Answer("", f"{CALLS}\n", [], "stop")


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ChatError, match="stop string is empty"):
        AnswerStream(thinking=False, tools=False, stop=["a", ""])


# ------------------------------------------------------------------ however it is cut

FRAGMENTS = [
    *(CALLS, END, CALL, CALL_END, VALUE_END, parameter("a", "1", string="false")),
    *('<｜DSML｜parameter name="b" string="true">', '<｜DSML｜parameter name="a" string="false">'),
    *(
        "</think>",
        "<think>",
        "\n",
        "\n\n",
        " ",
        "x",
        "STOP",
        "ST",
        "OP",
        "<",
        "</",
        "｜DSML｜",
        '"',
        "]",
    ),
]
TEXTS = st.lists(st.sampled_from([*FRAGMENTS, block(), block(parameter("s", "STOP"))]), max_size=14)


@given(
    texts=TEXTS,
    thinking=st.booleans(),
    tools=st.booleans(),
    stop=st.sampled_from([(), ("STOP",), ("OP\n", "STOP"), ("\n\n", "x"), ("TOP", "STOP")]),
    reason=st.sampled_from(["stop", "length"]),
    seed=st.integers(0, 1 << 16),
)
@example(["\n\n", block(), "\n"], False, True, (), "length", 0)
def test_joined_pieces_are_the_answer_of_the_whole_text(
    texts: list[str], thinking: bool, tools: bool, stop: Any, reason: str, seed: int
) -> None:
    text = "".join(texts)
    asked: dict[str, Any] = {"thinking": thinking, "tools": tools, "stop": stop, "reason": reason}
    whole = read([text], **asked)
    assert read(list(text), **asked) == whole
    drawn = random.Random(seed)
    cuts = sorted({0, len(text), *drawn.choices(range(len(text) + 1), k=6)})
    assert read([text[a:b] for a, b in itertools.pairwise(cuts)], **asked) == whole


@given(texts=TEXTS, thinking=st.booleans(), tools=st.booleans())
def test_no_text_is_lost_where_there_is_no_call(
    texts: list[str], thinking: bool, tools: bool
) -> None:
    text = "".join(texts)
    answer = read([text], thinking=thinking, tools=tools)
    if answer.calls:
        reasoning, _, rest = text.partition("</think>") if thinking else ("", "", text)
        before = rest[: rest.index(CALLS)]
        assert answer.reasoning == reasoning
        assert before.startswith(answer.content)
        assert before[len(answer.content) :] in ("", "\n", "\n\n")
    else:
        tag = "</think>" if thinking and "</think>" in text else ""
        assert answer.reasoning + tag + answer.content == text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text("ab\n", max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)  # fmt: skip
NAMES = st.text("abz_- .<>/\n", min_size=1, max_size=8)


@given(
    calls=st.lists(
        st.tuples(NAMES, st.dictionaries(NAMES, JSON, max_size=4)), min_size=1, max_size=3
    ),
    content=st.sampled_from(["", "so", "so\n", "a\n\n\nb"]),
)
def test_what_is_written_is_read_back(
    calls: list[tuple[str, dict[str, Any]]], content: str
) -> None:
    written = [
        {"function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}}
        for name, arguments in calls
    ]
    rendered = str(Prompt().extend(tool_calls_block(written)))
    answer = read(list(f"{content}\n\n{rendered}"))
    assert (answer.content, answer.finish_reason) == (content, "tool_calls")
    assert [(name, json.loads(text)) for name, text in answer.calls] == calls
    again = [{"function": {"name": name, "arguments": text}} for name, text in answer.calls]
    assert str(Prompt().extend(tool_calls_block(again))) == rendered


# ------------------------------------------------------------------ published answers


def published(number: int) -> list[str]:
    """The answers in a published prompt, each from behind its Assistant token to its end."""
    if not PAIRS.is_dir():
        pytest.skip(f"DeepSeek's pairs of messages and prompts are not at {PAIRS}")
    prompt = (PAIRS / f"test_output_{number}.txt").read_bytes().decode("utf-8")
    behind = [
        part.partition("<｜end▁of▁sentence｜>")[0] for part in prompt.split("<｜Assistant｜>")
    ]
    return [answer.removeprefix("<think>") for answer in behind[1:]]


def test_answers_of_published_pairs() -> None:
    calling, told = (read(list(text), thinking=True) for text in published(1))
    assert (calling.content, calling.finish_reason) == ("", "tool_calls")
    ((name, arguments),) = calling.calls
    assert name == "get_weather"
    assert json.loads(arguments) == {"location": "Beijing", "unit": "celsius"}
    assert calling.reasoning
    assert "22°C" in told.content
    assert (told.calls, told.finish_reason) == ([], "stop")
    last = read(list(published(2)[-1]), thinking=True)
    assert (last.content, last.calls) == ("The capital of France is Paris.", [])


# ------------------------------------------------------------------ through tokens


def test_split_tags_and_characters_through_tokens(deepseek_tokenizer: Tokenizer) -> None:
    """As a server feeds it: every token's bytes through the decoder, the text to the reader."""
    text = f"Let me.</think>The café 😀.\n\n{block(parameter('city', '北京 😀'))}"
    ids = deepseek_tokenizer.encode(text)
    assert len(ids) > 40
    texts, stream = (
        TextStream(deepseek_tokenizer.token_bytes),
        AnswerStream(thinking=True, tools=True),
    )
    pieces = [piece for token in ids for piece in stream.push(texts.push(token))]
    pieces += [*stream.push(texts.finish()), *stream.finish("stop")]
    told = {channel: "" for channel in ("reasoning", "content")}
    for piece in pieces:
        if isinstance(piece, ToolCall):
            assert json.loads(piece.arguments) == {"city": "北京 😀"}
        else:
            told[piece[0]] += piece[1]
    assert told == {"reasoning": "Let me.", "content": "The café 😀."}
    assert stream.finish_reason == "tool_calls"
