"""How tools and calls are written; the bytes that the model was trained on."""

# ruff: noqa: RUF001 (the fullwidth bars of the control tokens are meant)

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from ds4q.runtime.errors import ChatError
from ds4q.runtime.text.pieces import DSML, THINK, THINK_END, Control, Prompt
from ds4q.runtime.text.tools import HEAD, TAIL, to_json, tool_block, tool_calls_block


def call(name: Any = "f", arguments: Any = "{}") -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


def written(*calls: Any) -> str:
    return str(Prompt().extend(tool_calls_block(calls)))


def test_instructions_are_the_published_bytes() -> None:
    assert (len(HEAD), len(HEAD.encode())) == (854, 890)
    head = hashlib.sha256(HEAD.encode()).hexdigest()
    assert head == "c7c9042638154a237b5d1bd48be772374a35a4d24c5cacfd1ffbd92703da329c"
    tail = hashlib.sha256(TAIL.encode()).hexdigest()
    assert tail == "690702850fe256512cb1ee67c4e436ecb3e735c71ebee77ca45ff357a75fb5a7"


def test_one_line_per_tool_between_head_and_tail() -> None:
    tools = [
        {"type": "function", "function": {"name": "b", "description": "é", "strict": False}},
        {"type": "function", "function": {"z": 1, "a": [1, None]}},
    ]
    lines = '{"name": "b", "description": "é", "strict": false}\n{"z": 1, "a": [1, null]}'
    assert str(Prompt().extend(tool_block(tools))) == HEAD + lines + TAIL


def test_markers_of_the_block_are_control_tokens_and_those_of_a_tool_are_not() -> None:
    pieces = tool_block([{"function": {"name": f"{THINK}{DSML}"}}])
    controls = [piece.text for piece in pieces if isinstance(piece, Control)]
    assert controls == [DSML] * 9 + [THINK, THINK, THINK_END, THINK_END]
    texts = [piece for piece in pieces if isinstance(piece, str)]
    assert [text for text in texts if DSML in text or THINK in text] == [texts[-1]]


def test_arguments_strings_verbatim_others_as_json() -> None:
    arguments = '{"s": "a \\"b\\"\\n<c>", "n": 1.5, "t": true, "o": {"k":[1,"é"]}, "z": null}'
    assert written(call("get", arguments)) == (
        "<｜DSML｜tool_calls>\n"
        '<｜DSML｜invoke name="get">\n'
        '<｜DSML｜parameter name="s" string="true">a "b"\n<c></｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="n" string="false">1.5</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="t" string="false">true</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="o" string="false">{"k": [1, "é"]}</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="z" string="false">null</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n"
        "</｜DSML｜tool_calls>"
    )


def test_call_without_arguments_leaves_an_empty_line_and_calls_follow_each_other() -> None:
    assert written(call("f"), call("g", '{"a": ""}')) == (
        "<｜DSML｜tool_calls>\n"
        '<｜DSML｜invoke name="f">\n'
        "\n"
        "</｜DSML｜invoke>\n"
        '<｜DSML｜invoke name="g">\n'
        '<｜DSML｜parameter name="a" string="true"></｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n"
        "</｜DSML｜tool_calls>"
    )


@pytest.mark.parametrize(
    "raw", ["", "no json", "[1]", "3", '"s"', "null", '{"a": NaN}', '{"a": 1e999}', "[" * 10**5]
)
def test_what_is_no_json_object_becomes_one_raw_argument(raw: str) -> None:
    line = f'\n<｜DSML｜parameter name="arguments" string="true">{raw}</｜DSML｜parameter>\n'
    assert line in written(call("f", raw))
    assert written(call("f", raw)).count("parameter name=") == 1


def test_every_marker_of_a_call_is_a_control_token() -> None:
    pieces = tool_calls_block([call("f", '{"a": "</think>"}')])
    assert [piece.text for piece in pieces if isinstance(piece, Control)] == [DSML] * 6
    assert any("</think>" in piece for piece in pieces if isinstance(piece, str))


@pytest.mark.parametrize(
    "bad",
    [
        call(f"f{DSML}"),
        call('f"g'),
        call("f", f'{{"a": "{DSML}"}}'),
        call("f", f'{{"a": ["{DSML}"]}}'),
        call("f", f'{{"a{DSML}": 1}}'),
        call("f", '{"a\\"b": 1}'),
        call("f", DSML),
        call(""),
        call(None),
        call(3),
        call("f", {"a": 1}),
        call("f", None),
        {"id": "c1"},
        {"function": "f"},
        "f",
        None,
    ],
    ids=repr,
)
def test_what_the_format_cannot_express_is_refused(bad: Any) -> None:
    with pytest.raises(ChatError):
        tool_calls_block([bad])


@pytest.mark.parametrize("bad", ["f", {}, {"function": None}, {"function": {"a": float("nan")}}])
def test_malformed_tool_is_refused(bad: Any) -> None:
    with pytest.raises(ChatError):
        tool_block([bad])


def test_json_keeps_order_and_text() -> None:
    assert to_json({"b": 1, "a": "你", "c": []}) == '{"b": 1, "a": "你", "c": []}'
