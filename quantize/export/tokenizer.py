"""Owns ``tokenizer.ggml.*``: a byte-level BPE ``tokenizer.json`` in GGUF's words."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ds4q.quantize.export.container import boolean, i32_array, text, text_array, u32
from ds4q.quantize.export.plan import ExportError

Keys = dict[str, bytes]

NO_TOKENIZER = "{}"  # what an artifact without one holds
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
_MARKER_ENDS = (("<|", "|>"), ("<\uff5c", "\uff5c>"))  # DeepSeek's bars are fullwidth


def _split(pattern: str) -> dict[str, Any]:
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }


# llama.cpp splits so where a file says "deepseek-v3" (src/llama-vocab.cpp). Another splitting has
# no name here, and a wrong name would give other ids.
_DEEPSEEK_V3 = [
    _split(r"\p{N}{1,3}"),
    _split("[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"),
    _split(
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
        + "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
        + "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
    ),
]


def tokenizer_keys(
    metadata: Mapping[str, Any], config: Mapping[str, Any], path: object
) -> tuple[Keys, list[str]]:
    """Keys of the artifact's tokenizer, and warnings.

    Raises ``ExportError`` for a tokenizer that is not byte-level BPE, or has more tokens than ids.
    """
    ends = config["eos_token_id"]  # GGUF has room for one
    ids = {"bos": config["bos_token_id"], "eos": ends[0] if isinstance(ends, list) else ends}
    keys = {f"tokenizer.ggml.{name}_token_id": u32(number) for name, number in ids.items()}
    raw = metadata.get("tokenizer", NO_TOKENIZER)
    if raw == NO_TOKENIZER:
        warning = "the artifact has no tokenizer, so the GGUF file has none"
        return {"tokenizer.ggml.model": text("none"), **keys}, [warning]
    try:
        document = json.loads(raw)
        tokens, types = _tokens(document, config["vocab_size"], path)
        merges = [_merge(pair, path) for pair in document["model"]["merges"]]
        splitting = _splitting(document["pre_tokenizer"], path)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise _unknown(path, f"{type(error).__name__}: {error}") from None
    told = metadata.get("tokenizer_config")
    settings = told if isinstance(told, dict) else {}
    pad = settings.get("pad_token")
    name = pad.get("content") if isinstance(pad, dict) else pad
    if name in tokens:
        keys["tokenizer.ggml.padding_token_id"] = u32(tokens.index(name))
    for option in ("add_bos_token", "add_eos_token"):
        if isinstance(settings.get(option), bool):
            keys[f"tokenizer.ggml.{option}"] = boolean(settings[option])
    known = {"tokenizer.ggml.model": text("gpt2")}
    warnings = []
    if splitting == _DEEPSEEK_V3:
        known["tokenizer.ggml.pre"] = text("deepseek-v3")
    else:
        warnings.append(
            "GGUF has no name for how this tokenizer splits text: tokenizer.ggml.pre is left out, "
            "and readers will split as they do by default"
        )
    return {
        **known,
        "tokenizer.ggml.tokens": text_array(tokens),
        "tokenizer.ggml.token_type": i32_array(types),
        "tokenizer.ggml.merges": text_array(merges),
        **keys,
    }, warnings


def _unknown(path: object, found: str) -> ExportError:
    return ExportError("the tokenizer is not byte-level BPE", path=path, found=found)


def _splitting(pre_tokenizer: Mapping[str, Any], path: object) -> list[Any]:
    """The splits before the byte alphabet."""
    steps: list[Any] = [pre_tokenizer]
    if pre_tokenizer["type"] == "Sequence":
        steps = list(pre_tokenizer["pretokenizers"])
    last = steps.pop()
    if last["type"] != "ByteLevel" or last["add_prefix_space"] or last.get("use_regex", True):
        raise _unknown(path, f"pre_tokenizer {last['type']}")
    return steps


def _tokens(
    document: Mapping[str, Any], vocab_size: int, path: object
) -> tuple[list[str], list[int]]:
    """Text and GGUF's type of each id; ids without a token are named and marked as unused."""
    model = document["model"]
    if model["type"] != "BPE":
        raise _unknown(path, f"model {model['type']}")
    added = document.get("added_tokens") or []
    held: dict[int, tuple[str, int]] = {n: (word, _NORMAL) for word, n in model["vocab"].items()}
    for token in added:
        word = token["content"]
        control = token["special"] or any(
            word.startswith(a) and word.endswith(b) for a, b in _MARKER_ENDS
        )
        # A marker that a user types is text: readers parse control tokens only where they are told.
        held[token["id"]] = word, _CONTROL if control else _USER_DEFINED
    if not all(type(n) is int and 0 <= n < vocab_size for n in held):
        most = f"ids below vocab_size {vocab_size}"
        raise ExportError("the tokenizer has other ids", path=path, expected=most)
    every = [held.get(n, (f"[PAD{n}]", _UNUSED)) for n in range(vocab_size)]
    return [word for word, _ in every], [kind for _, kind in every]


def _merge(pair: str | Sequence[str], path: object) -> str:
    """GGUF writes a merge as two tokens around a space."""
    parts = pair.split(" ") if isinstance(pair, str) else list(pair)
    if len(parts) != 2 or any(" " in part for part in parts):
        raise _unknown(path, f"merge {pair!r}")
    return " ".join(parts)
