"""Owns the mapping between text and token ids, from the artifact's own metadata. Knows no prompt.

Caller text and control tokens are kept apart: text is encoded by a tokenizer that was built from
``tokenizer.json`` with an empty added-token list, so text that spells a control token stays text;
a control token is reached by name only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
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
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise PromptError(
                "text is not valid Unicode",
                found=f"a lone surrogate at character {error.start}",
                remedy="pass UTF-8 text",
            ) from None
        # Of all that the library offers, only this lets other threads run meanwhile.
        (encoded,) = self._text.encode_batch_fast([text], add_special_tokens=False)
        return list(encoded.ids)

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
