"""Text to ids and back, with a byte tokenizer and with the one that DeepSeek-V4 publishes."""

# ruff: noqa: RUF001 (the fullwidth bars of the control tokens are meant)

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4q.runtime.errors import ContextError, ControlTokenError, PromptError, TokenizerError
from ds4q.runtime.text import tokenizer as module
from ds4q.runtime.text.pieces import BOS, Prompt
from ds4q.runtime.text.tokenizer import BYTE_OF_CHAR, Tokenizer

TINY_JSON = Path(__file__).parents[2] / "data" / "ds4-tiny" / "tokenizer.json"

DEEPSEEK_CONTROLS = {
    "<｜begin▁of▁sentence｜>": 0,
    "<｜end▁of▁sentence｜>": 1,
    "<｜▁pad▁｜>": 2,
    "<｜place▁holder▁no▁799｜>": 128799,
    "<｜fim▁hole｜>": 128800,
    "<｜fim▁begin｜>": 128801,
    "<｜fim▁end｜>": 128802,
    "<｜User｜>": 128803,
    "<｜Assistant｜>": 128804,
    "<|EOT|>": 128805,
    "<｜tool▁calls▁begin｜>": 128806,
    "<think>": 128821,
    "</think>": 128822,
    "｜DSML｜": 128825,
    "<｜latest_reminder｜>": 128828,
    "<｜action｜>": 128829,
    "<｜query｜>": 128830,
    "<｜authority｜>": 128831,
    "<｜domain｜>": 128832,
    "<｜title｜>": 128836,
    "<｜extracted_url｜>": 128844,
    "<｜read_url｜>": 128845,
}


def tiny_json(change: Callable[[dict[str, Any]], object] = lambda parsed: None) -> str:
    parsed = json.loads(TINY_JSON.read_text(encoding="utf-8"))
    change(parsed)
    return json.dumps(parsed)


def joined_bytes(tokenizer: Tokenizer, ids: list[int]) -> bytes:
    return b"".join(tokenizer.token_bytes(token) for token in ids)


def test_byte_alphabet_is_a_bijection() -> None:
    assert sorted(BYTE_OF_CHAR.values()) == list(range(256))
    assert BYTE_OF_CHAR["Ġ"] == 0x20
    assert BYTE_OF_CHAR["Ċ"] == 0x0A


def test_tiny_ids_are_bytes(tiny_tokenizer: Tokenizer) -> None:
    assert tiny_tokenizer.encode("a\né😀") == list("a\né😀".encode())
    assert [tiny_tokenizer.token_bytes(byte) for byte in range(256)] == [
        bytes([byte]) for byte in range(256)
    ]


def test_tiny_control_tokens(tiny_tokenizer: Tokenizer) -> None:
    assert tiny_tokenizer.control("<｜Assistant｜>") == 259
    assert tiny_tokenizer.token_bytes(259) == "<｜Assistant｜>".encode()
    assert tiny_tokenizer.encode("<｜Assistant｜>") == list("<｜Assistant｜>".encode())


def test_unused_id_has_no_text(tiny_tokenizer: Tokenizer) -> None:
    assert tiny_tokenizer.token_bytes(300) == b""


def test_missing_control_token_is_named(tiny_tokenizer: Tokenizer) -> None:
    with pytest.raises(ControlTokenError, match="｜DSML｜"):
        tiny_tokenizer.control("｜DSML｜")


def test_a_base_token_is_no_control_token(tiny_tokenizer: Tokenizer) -> None:
    with pytest.raises(ControlTokenError):
        tiny_tokenizer.control("a")


@given(text=st.text())
def test_tiny_round_trip(tiny_tokenizer: Tokenizer, text: str) -> None:
    ids = tiny_tokenizer.encode(text)
    assert joined_bytes(tiny_tokenizer, ids) == text.encode("utf-8")
    assert tiny_tokenizer.decode(ids) == text


def test_lone_surrogate_is_refused(tiny_tokenizer: Tokenizer) -> None:
    with pytest.raises(PromptError, match="surrogate at character 1"):
        tiny_tokenizer.encode("a\ud800")


def test_decode_replaces_what_is_not_utf8(tiny_tokenizer: Tokenizer) -> None:
    assert tiny_tokenizer.decode([0x61, 0xFF, 0x62]) == "a�b"


def test_truncation_and_padding_of_the_file_are_not_applied() -> None:
    def limit(parsed: dict[str, Any]) -> None:
        parsed["truncation"] = {
            "direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0
        }  # fmt: skip
        parsed["padding"] = {
            "strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None,
            "pad_id": 0, "pad_type_id": 0, "pad_token": "x",
        }  # fmt: skip

    library = tokenizers.Tokenizer.from_str(tiny_json(limit))
    assert len(library.encode("abcd").ids) != 4  # the file does ask for it
    assert Tokenizer(tiny_json(limit)).encode("abcd") == list(b"abcd")


def test_no_token_is_added_to_a_text() -> None:
    """BOS is the prompt format's to write, even where the file's post-processor would add it."""

    def begin(parsed: dict[str, Any]) -> None:
        bos = {"SpecialToken": {"id": "bos", "type_id": 0}}
        parsed["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [],
            "special_tokens": {"bos": {"id": "bos", "ids": [256], "tokens": ["bos"]}},
        }

    assert tokenizers.Tokenizer.from_str(tiny_json(begin)).encode("a").ids == [256, 97]
    assert Tokenizer(tiny_json(begin)).encode("a") == [97]


def test_a_token_outside_the_byte_alphabet_is_its_own_text() -> None:
    tokenizer = Tokenizer(tiny_json(lambda parsed: parsed["model"]["vocab"].update({"你": 256})))
    assert tokenizer.control("<｜begin▁of▁sentence｜>") == 256
    tokenizer = Tokenizer(tiny_json(lambda parsed: parsed["model"]["vocab"].update({"你": 300})))
    assert tokenizer.token_bytes(300) == "你".encode()


@pytest.mark.parametrize("value", [None, "", " ", "{}"], ids=repr)
def test_artifact_without_a_tokenizer(value: str | None) -> None:
    assert Tokenizer.from_metadata({"tokenizer": value}) is None
    assert Tokenizer.from_metadata({}) is None


def test_artifact_with_a_tokenizer(tiny_tokenizer: Tokenizer) -> None:
    tokenizer = Tokenizer.from_metadata({"tokenizer": tiny_json()})
    assert tokenizer is not None
    assert tokenizer.controls == tiny_tokenizer.controls


@pytest.mark.parametrize(
    "source",
    [
        "no json",
        "[]",
        "null",
        '{"version": "1.0"}',
        '{"added_tokens": [], "model": {}}',
        tiny_json(lambda parsed: parsed.update(added_tokens=[{"id": 1}])),
        tiny_json(lambda parsed: parsed.update(added_tokens=None)),
        "[" * 100_000,
    ],
    ids=["text", "list", "null", "no-model", "bad-model", "bad-token", "no-list", "deep"],
)
def test_malformed_tokenizer_is_one_line(source: str) -> None:
    with pytest.raises(TokenizerError) as caught:
        Tokenizer(source, path="model.hfq")
    assert str(caught.value).startswith("model.hfq: ")
    assert "\n" not in str(caught.value)


def test_tokenizer_as_an_object_is_refused() -> None:
    with pytest.raises(TokenizerError, match=r"expected the text of tokenizer\.json, found dict"):
        Tokenizer.from_metadata({"tokenizer": {}})


def test_tokenizer_that_is_not_byte_level_is_refused() -> None:
    with pytest.raises(TokenizerError, match="not byte-level"):
        Tokenizer(tiny_json(lambda parsed: parsed.update(decoder={"type": "Fuse"})))


def test_tokenizer_without_a_byte_is_refused() -> None:
    with pytest.raises(TokenizerError, match="none for byte 0x61"):
        Tokenizer(tiny_json(lambda parsed: parsed["model"]["vocab"].pop("a")))


# ------------------------------------------------------------------ the published tokenizer


@pytest.mark.parametrize(
    "part",
    [
        {"normalizer": {"type": "NFC"}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFKC"}]}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [
                    {
                        "type": "Split",
                        "pattern": {"String": " "},
                        "behavior": "Removed",
                        "invert": False,
                    },
                    {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True},
                ],
            }
        },
    ],
    ids=json.dumps,
)
def test_what_may_leave_bytes_out_has_no_longest_token(part: dict[str, Any]) -> None:
    assert Tokenizer(tiny_json(lambda parsed: parsed.update(part))).longest_bytes is None


def test_longest_token_of_bytes(tiny_tokenizer: Tokenizer) -> None:
    assert tiny_tokenizer.longest_bytes == 1
    nothing = {"normalizer": {"type": "Sequence", "normalizers": []}}
    assert Tokenizer(tiny_json(lambda parsed: parsed.update(nothing))).longest_bytes == 1


def test_deepseek_longest_token(deepseek_tokenizer: Tokenizer) -> None:
    longest = deepseek_tokenizer.longest_bytes
    assert longest == max(len(deepseek_tokenizer.token_bytes(token)) for token in range(128000))
    text = " " * 1000
    assert len(deepseek_tokenizer.encode(text)) * longest >= len(text)


def test_deepseek_file_is_the_published_one(deepseek_source: str) -> None:
    digest = hashlib.sha256(deepseek_source.encode()).hexdigest()
    assert digest == "8f9f37ca37fdc4f5fd36d5cf4d3b0e8392edb4e894fd10cc0d70b4957c8633cf"


def test_deepseek_control_tokens(deepseek_tokenizer: Tokenizer) -> None:
    found = {text: deepseek_tokenizer.control(text) for text in DEEPSEEK_CONTROLS}
    assert found == DEEPSEEK_CONTROLS
    for text, number in DEEPSEEK_CONTROLS.items():
        assert deepseek_tokenizer.token_bytes(number) == text.encode()
    assert len(deepseek_tokenizer.controls) == 1283


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("You are a helpful assistant.", [3476, 477, 260, 11502, 22896, 16]),
        ("What is 2+2?", [3085, 344, 223, 20, 13, 20, 33]),
        ("naïve café 😀", [2720, 91223, 57664, 53769, 225]),
        ("a<｜User｜>b", [67, 30, 28217, 6756, 28217, 32, 68]),
        (".\n\n", [339]),
    ],
)
def test_deepseek_ids(deepseek_tokenizer: Tokenizer, text: str, ids: list[int]) -> None:
    assert deepseek_tokenizer.encode(text) == ids
    assert deepseek_tokenizer.decode(ids) == text


def test_deepseek_control_texts_stay_text(deepseek_tokenizer: Tokenizer) -> None:
    """C20: a literal marker in caller text is encoded as text, whichever marker it is."""
    controls = set(deepseek_tokenizer.controls.values())
    for text in deepseek_tokenizer.controls:
        ids = deepseek_tokenizer.encode(f"a {text} b")
        assert not controls.intersection(ids)
        assert joined_bytes(deepseek_tokenizer, ids) == f"a {text} b".encode()


def test_deepseek_every_token_has_bytes(deepseek_tokenizer: Tokenizer) -> None:
    not_utf8 = 0
    for token in range(129_280):
        raw = deepseek_tokenizer.token_bytes(token)
        assert raw
        try:
            raw.decode("utf-8")
        except UnicodeDecodeError:
            not_utf8 += 1
    assert not_utf8 == 1470
    assert deepseek_tokenizer.token_bytes(129_280) == b""


@given(text=st.text())
def test_deepseek_round_trip(deepseek_tokenizer: Tokenizer, text: str) -> None:
    ids = deepseek_tokenizer.encode(text)
    assert joined_bytes(deepseek_tokenizer, ids) == text.encode("utf-8")


def test_deepseek_ordinary_text_encodes_as_the_library_does(
    deepseek_source: str, deepseek_tokenizer: Tokenizer
) -> None:
    text = "Hello, world! 12345  \n\n你好 naïve\r\n\tdef f(x): return x**2 😀 ¼ＡＢ e\u0301"
    library = tokenizers.Tokenizer.from_str(deepseek_source)
    assert deepseek_tokenizer.encode(text) == library.encode(text, add_special_tokens=False).ids


# ------------------------------------------------------------------ long texts, in parts

WORDS = st.sampled_from(
    ["a", "Z", "\u00e9", "e\u0301", " ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u3000", "1", "23",
     "\u00b2", "\u0663", "\u216b", ".", "!?", "_", "\u6a21", "\u578b", "\u3042", "\u30fb",
     "-", "+=", "\u3001", "\u3007", "\U0001f600", "\ue000",
     "\u0378", "\u200d", "\u0e01", "\x00", "'s", "<"]
)  # fmt: skip


def split_everywhere(tokenizer: Tokenizer, text: str) -> list[list[int]]:
    """The parts of a text that is split wherever it can be."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PART_CHARACTERS", 1)
        return list(tokenizer.encode_parts(text))


@settings(max_examples=1500)
@given(words=st.lists(WORDS, max_size=24))
def test_deepseek_parts_have_the_ids_of_the_whole(
    deepseek_tokenizer: Tokenizer, words: list[str]
) -> None:
    text = "".join(words)
    joined = [token for part in split_everywhere(deepseek_tokenizer, text) for token in part]
    assert joined == deepseek_tokenizer.encode(text)


def test_deepseek_splits_what_people_write(deepseek_tokenizer: Tokenizer) -> None:
    for text, parts in (
        ("two words", 2),
        ("end.\nnext", 2),
        ("x1 2,3", 4),
        ("\u6a21\u578b\uff0c\u6a21\u578b\u3002", 4),
        ("....    ====", 1),
    ):
        assert len(split_everywhere(deepseek_tokenizer, text)) == parts, text


def test_a_long_text_is_encoded_in_parts(deepseek_tokenizer: Tokenizer) -> None:
    text = "for (i = 0; i < n; i++) { sum += x[i] * 1024; }\r\n" * 4000
    parts = list(deepseek_tokenizer.encode_parts(text, bounded=True))
    assert len(parts) == len(text) // module.PART_CHARACTERS + 1
    (whole,) = deepseek_tokenizer._text.encode_batch_fast([text], add_special_tokens=False)
    assert [token for part in parts for token in part] == whole.ids


def test_a_run_that_cannot_be_split_is_refused_where_memory_is_bounded(
    deepseek_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PART_CHARACTERS", 10)
    monkeypatch.setattr(module, "RUN_CHARACTERS", 100)
    text = "word " * 8 + "-" * 200 + " word"
    assert len(list(deepseek_tokenizer.encode_parts(text))) > 1
    with pytest.raises(PromptError, match=r"100 characters from character 4\d on cannot be split"):
        list(deepseek_tokenizer.encode_parts(text, bounded=True))
    assert list(deepseek_tokenizer.encode_parts("word " * 8 + "-" * 90 + " word", bounded=True))


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "NFC"}},
        {
            "pre_tokenizer": {
                "type": "ByteLevel",
                "add_prefix_space": True,
                "use_regex": False,
                "trim_offsets": True,
            }
        },
        {
            "pre_tokenizer": {
                "type": "ByteLevel",
                "add_prefix_space": False,
                "use_regex": True,
                "trim_offsets": True,
            }
        },
        {"pre_tokenizer": None},
    ],
    ids=json.dumps,
)
def test_a_tokenizer_that_is_not_known_to_allow_it_splits_nothing(change: dict[str, Any]) -> None:
    tokenizer = Tokenizer(tiny_json(lambda parsed: parsed.update(change)))
    assert len(split_everywhere(tokenizer, "two words 1 2\nx")) == 1


def test_a_vocabulary_without_merges_is_split_anywhere(tiny_tokenizer: Tokenizer) -> None:
    assert split_everywhere(tiny_tokenizer, "a\u00e9") == [[97], [195, 169]]


def test_a_prompt_that_cannot_fit_is_not_tokenized(
    tiny_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = Prompt().control(BOS).text("x" * 99)
    assert len(prompt.encode(tiny_tokenizer, fewer_than=101)) == 100
    monkeypatch.setattr(Tokenizer, "encode_parts", lambda *_, **__: pytest.fail("tokenized"))
    with pytest.raises(ContextError, match="expected fewer than 100 tokens, found at least 100"):
        prompt.encode(tiny_tokenizer, fewer_than=100)


def test_a_prompt_is_tokenized_up_to_the_context(
    deepseek_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PART_CHARACTERS", 5)
    prompt = Prompt().control(BOS).text("word " * 1000)
    assert len(prompt.encode(deepseek_tokenizer, fewer_than=1003)) == 1002
    with pytest.raises(ContextError, match=r"fewer than 200 tokens, found at least 20\d;"):
        prompt.encode(deepseek_tokenizer, fewer_than=200)
