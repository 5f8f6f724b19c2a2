"""Owns the mapping between text and token ids, from the artifact's own metadata. Knows no prompt.

Caller text and control tokens are kept apart: text is encoded by a tokenizer that was built from
``tokenizer.json`` with an empty added-token list, so text that spells a control token stays text;
a control token is reached by name only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

import tokenizers

from ds4q.runtime.errors import ControlTokenError, PromptError, TokenizerError


def _byte_alphabet() -> dict[str, int]:
    """The 256 printable characters that byte-level BPE writes bytes as (GPT-2, encoder.py)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1)]
    plain += range(ord("®"), ord("ÿ") + 1)
    alphabet = {chr(byte): byte for byte in plain}
    others = (byte for byte in range(256) if byte not in set(plain))
    alphabet.update({chr(256 + number): byte for number, byte in enumerate(others)})
    return alphabet


BYTE_OF_CHAR = _byte_alphabet()
WHOLE = {"BPE", "ByteLevel", "Digits", "Split"}  # parts of a tokenizer that leave no byte out

PART_CHARACTERS = 1 << 16
"""A longer text is encoded in parts: the library takes about 120 bytes of memory a character."""

RUN_CHARACTERS = 1 << 18
"""The most beyond a part's length until a text can be split, where memory is bounded."""

_BYTE_LEVEL = {"add_prefix_space": False, "use_regex": False}
_DEEPSEEK = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"""
    "[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|"
    "\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)
"""How DeepSeek's tokenizer cuts a text into words, one pattern after the other."""

_KANJI = "\u4e00-\u9fa5"
_KANA = "\u3040-\u30ff"
_DEEPSEEK_SPLITS = re.compile(
    r"[^\W_](?=[ \t\r\n])|\n(?=[A-Za-z])|[A-Za-z](?=[0-9])|[0-9](?=[ !-/:-~])"
    f"|[{_KANJI}](?=[^{_KANJI}{_KANA}])|[^{_KANJI}{_KANA}](?=[{_KANJI}])"
)
"""Ends where a text can be split without changing an id, under ``_DEEPSEEK``.

No pattern looks behind, so what follows a word's end is cut as if the text began there. It remains
that a word ends here, and would end here if the text did. A letter before white space or a digit
ends a run of letters, which only the next character can lengthen. A digit before anything that is
not a number ends a run of numbers, and a change into or out of Chinese and Japanese letters is an
end by the second pattern. A line break before a letter ends a run of white space that the fourth
alternative takes whole; only the fifth, which is tried after it, looks ahead.
"""

_ANYWHERE = re.compile("(?s:.)")  # a vocabulary without merges: each byte is a token


class Tokenizer:
    """A byte-level BPE tokenizer.

    Parameters
    ----------
    source : the text of ``tokenizer.json``
    path : the artifact, for messages

    Attributes
    ----------
    controls : text of each added token -> its id
    """

    def __init__(self, source: str, *, path: object = None) -> None:
        self.path = path
        try:
            parsed = json.loads(source)
            self.controls = {
                str(token["content"]): int(token["id"]) for token in parsed["added_tokens"]
            }
            # Truncation and padding would silently change a prompt; generation wants neither.
            parsed.update(added_tokens=[], truncation=None, padding=None)
            self._text = tokenizers.Tokenizer.from_str(json.dumps(parsed, ensure_ascii=False))
            decoder = (parsed.get("decoder") or {}).get("type")
            self._keeps_all = _keeps_all(parsed)
            self._splits = _splits(parsed)
        except Exception as error:  # the library raises bare Exception for a malformed file
            lacks = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise TokenizerError(path=path, found=lacks) from None
        if decoder != "ByteLevel":
            raise TokenizerError(
                "tokenizer is not byte-level",
                path=path,
                expected="decoder ByteLevel",
                found=decoder,
            )
        missing = [
            byte for char, byte in BYTE_OF_CHAR.items() if self._text.token_to_id(char) is None
        ]
        if missing:
            raise TokenizerError(
                "tokenizer has no token for some bytes: text would be lost",
                path=path,
                expected="all 256",
                found=f"none for byte {missing[0]:#04x}",
            )
        self._bytes: dict[int, bytes] = {}  # of the tokens that were looked at
        self._control_texts = {number: text for text, number in self.controls.items()}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], *, path: object = None) -> Tokenizer | None:
        """The artifact's tokenizer; None where it carries none (absent, null, empty or ``{}``)."""
        source = metadata.get("tokenizer")
        if source is None or (isinstance(source, str) and source.strip() in ("", "{}")):
            return None
        if not isinstance(source, str):
            raise TokenizerError(
                path=path, expected="the text of tokenizer.json", found=type(source).__name__
            )
        return cls(source, path=path)

    def encode(self, text: str) -> list[int]:
        """Ids of caller text: no BOS, and never a control token whatever the text spells."""
        return [token for part in self.encode_parts(text) for token in part]

    def encode_parts(self, text: str, *, bounded: bool = False) -> Iterator[list[int]]:
        """``encode`` in parts of about ``PART_CHARACTERS``, so that memory does not grow with text.

        Parameters
        ----------
        bounded : refuse a text with a longer part, which would take its memory

        Raises
        ------
        PromptError : the text is not Unicode; ``bounded``: it cannot be split into short parts
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise PromptError(
                "text is not valid Unicode",
                found=f"a lone surrogate at character {error.start}",
                remedy="pass UTF-8 text",
            ) from None
        for part in self._parts(text, bounded=bounded):
            # Of all that the library offers, only this lets other threads run meanwhile.
            (encoded,) = self._text.encode_batch_fast([part], add_special_tokens=False)
            yield encoded.ids

    def _parts(self, text: str, *, bounded: bool) -> Iterator[str]:
        """``text`` in parts whose ids, joined, are those of the whole."""
        start = 0
        while self._splits is not None and len(text) - start > PART_CHARACTERS:
            least = start + PART_CHARACTERS
            most = least + RUN_CHARACTERS if bounded else len(text)
            found = self._splits.search(text, least - 1, most)
            if found is None and most < len(text):
                raise PromptError(
                    f"{RUN_CHARACTERS:,} characters from character {least:,} on cannot be split "
                    "into words",
                    remedy="break up the longest word or run of one character",
                )
            if found is None:
                break
            yield text[start : found.end()]
            start = found.end()
        yield text[start:]

    def least_tokens(self, text: str) -> int:
        """A lower bound of the tokens of ``text``, from its bytes; 0 where there is none."""
        longest = self.longest_bytes
        return 0 if longest is None else -(-len(text.encode("utf-8", "replace")) // longest)

    @cached_property
    def longest_bytes(self) -> int | None:
        """The most bytes of a text that one token stands for; None where there is no such number.

        N tokens are then of a text of at most N times so many bytes.
        """
        if not self._keeps_all:
            return None
        return max(map(len, self._text.get_vocab(with_added_tokens=False)))  # a character a byte

    def control(self, text: str) -> int:
        """The id of the control token ``text``; ``ControlTokenError`` where there is none."""
        try:
            return self.controls[text]
        except KeyError:
            raise ControlTokenError(path=self.path, expected=text) from None

    def token_bytes(self, token: int) -> bytes:
        """The bytes that ``token`` stands for; empty for an id that the vocabulary does not use."""
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._bytes_of(token)
        return known

    def _bytes_of(self, token: int) -> bytes:
        control = self._control_texts.get(token)
        if control is not None:
            return control.encode("utf-8")
        text = self._text.id_to_token(token)
        if text is None:
            return b""
        try:
            return bytes(BYTE_OF_CHAR[char] for char in text)
        except KeyError:  # not written in the byte alphabet: the library's decoder takes it as text
            return str(text).encode("utf-8")

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of ``tokens``; bytes that are not UTF-8 become U+FFFD."""
        joined = b"".join(self.token_bytes(token) for token in tokens)
        return joined.decode("utf-8", errors="replace")


def _splits(parsed: Mapping[str, Any]) -> re.Pattern[str] | None:
    """Where a text can be split, see ``_DEEPSEEK_SPLITS``; None where that is not known."""
    normalizer, before = parsed.get("normalizer") or {}, parsed.get("pre_tokenizer") or {}
    parts = before.get("pretokenizers", [before])
    byte_level = parts[-1] if parts else {}
    plain = byte_level.get("type") == "ByteLevel" and all(
        byte_level.get(key) is value for key, value in _BYTE_LEVEL.items()
    )
    if normalizer.get("normalizers", normalizer) or not plain or parsed["model"].get("dropout"):
        return None
    if len(parts) == 1 and not parsed["model"].get("merges"):
        return _ANYWHERE
    cuts = tuple(
        part.get("pattern", {}).get("Regex")
        for part in parts[:-1]
        if part.get("type") == "Split"
        and part.get("behavior") == "Isolated"
        and part.get("invert") is False
    )
    return _DEEPSEEK_SPLITS if len(cuts) == len(parts) - 1 and cuts == _DEEPSEEK else None


def _keeps_all(parsed: Mapping[str, Any]) -> bool:
    """Whether each byte of a text is in one of its tokens: none is dropped or rewritten before."""
    normalizer, before = parsed.get("normalizer") or {}, parsed.get("pre_tokenizer") or {}
    parts = before.get("pretokenizers", [before])
    kinds = {part.get("type") for part in parts}
    removed = any(part.get("behavior") == "Removed" for part in parts)
    return (
        not normalizer.get("normalizers", normalizer)
        and "ByteLevel" in kinds
        and {*kinds, parsed["model"].get("type")} <= WHOLE
        and not removed
    )
