"""Prompts as pieces: text is joined and stays apart from control tokens."""

# ruff: noqa: RUF001 (the fullwidth bars of the control tokens are meant)

from __future__ import annotations

import pytest

from ds4q.runtime.errors import ControlTokenError
from ds4q.runtime.text.pieces import ASSISTANT, BOS, DSML, EOS, USER, Control, Prompt
from ds4q.runtime.text.tokenizer import Tokenizer


def test_names_are_deepseeks() -> None:
    assert BOS == "<｜begin▁of▁sentence｜>"
    assert EOS == "<｜end▁of▁sentence｜>"
    assert (USER, ASSISTANT, DSML) == ("<｜User｜>", "<｜Assistant｜>", "｜DSML｜")


def test_neighbouring_text_is_one_run() -> None:
    prompt = Prompt().control(BOS).text("a").text("").text("b").extend(["c", Control(EOS), "d"])
    assert prompt.pieces == [Control(BOS), "abc", Control(EOS), "d"]
    assert str(prompt) == f"{BOS}abc{EOS}d"


def test_joined_text_is_encoded_together(deepseek_tokenizer: Tokenizer) -> None:
    assert Prompt().text(".").text("\n\n").encode(deepseek_tokenizer) == [339]


def test_encoding_keeps_control_and_text_apart(tiny_tokenizer: Tokenizer) -> None:
    ids = Prompt().control(USER).text(USER).encode(tiny_tokenizer)
    assert ids == [258, *USER.encode()]


def test_missing_control_token_is_named(tiny_tokenizer: Tokenizer) -> None:
    with pytest.raises(ControlTokenError, match=DSML):
        Prompt().control(DSML).encode(tiny_tokenizer)
