"""Owns files of text as windows of token ids, for measuring a model. Runs no model.

A window begins with BOS, as in training, and holds text of one file; windows do not overlap. So
every token of the text is predicted exactly once, from the text before it in its own window.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ds4q.artifact.files import TooLongError, read_small
from ds4q.runtime.errors import ConfigError, CorpusError
from ds4q.runtime.text.pieces import BOS
from ds4q.runtime.text.tokenizer import Tokenizer

I64 = npt.NDArray[np.int64]

WINDOW_TOKENS = 512
IDS_SUFFIX = ".ids"
MAX_TEXT_BYTES = 64 << 20  # some 16 million tokens; encoding takes many times the memory
_MAX_DIGITS = 18  # more would not fit an int64


def read_windows(
    paths: Iterable[str | os.PathLike[str]],
    *,
    tokenizer: Tokenizer | None,
    bos: int,
    vocab_size: int,
    window_tokens: int = WINDOW_TOKENS,
    limit_tokens: int | None = None,
) -> list[I64]:
    """The texts as windows: BOS and up to ``window_tokens`` - 1 tokens of one file.

    The last window of a file is as long as what is left, which is at least one token.

    Parameters
    ----------
    paths : UTF-8 texts, or decimal token ids (``.ids``; white space or commas between them)
    tokenizer : for texts; None refuses them
    bos : id that every window begins with, from ``bos_id``
    limit_tokens : read no more than so many tokens of text in all, BOS not counted

    Raises
    ------
    CorpusError : no tokens at all, not UTF-8, not a token id, no tokenizer for a text, a text that
        is too large
    NotRegularError : a pipe, a device
    OSError : a file cannot be read
    """
    if window_tokens < 2:
        raise CorpusError("window too short", expected="2 tokens or more", found=window_tokens)
    if limit_tokens is not None and limit_tokens < 1:
        raise CorpusError("no tokens asked for", expected="1 or more", found=limit_tokens)
    windows: list[I64] = []
    left = limit_tokens
    for path in map(Path, paths):
        ids = _read(path, tokenizer, vocab_size)[:left]
        if left is not None:
            left -= len(ids)
        starts = range(0, len(ids), window_tokens - 1)
        windows += [np.concatenate(([bos], ids[at : at + window_tokens - 1])) for at in starts]
        if left == 0:
            break
    if not windows:
        raise CorpusError("the texts hold no tokens", remedy="give a file with text in it")
    return windows


def bos_id(metadata: Mapping[str, Any], tokenizer: Tokenizer | None) -> int:
    """The id that a sequence begins with: by its name, else ``bos_token_id`` of the config."""
    if tokenizer is not None:
        return tokenizer.control(BOS)
    config = metadata.get("config")
    found = config.get("bos_token_id") if isinstance(config, Mapping) else None
    if type(found) is not int or found < 0:
        raise ConfigError("config key bos_token_id", expected="a token id", found=repr(found))
    return found


def _read(path: Path, tokenizer: Tokenizer | None, vocab_size: int) -> I64:
    raw = _bytes(path)
    if path.suffix.lower() == IDS_SUFFIX:
        ids = _parse_ids(raw, path)
    else:
        ids = _encode(raw, path, tokenizer)
    bad = np.flatnonzero(ids >= vocab_size)
    if bad.size:
        raise CorpusError(
            f"token {bad[0]} is not in the vocabulary",
            path=path,
            expected=f"0 to {vocab_size - 1}",
            found=int(ids[bad[0]]),
        )
    return ids


def _bytes(path: Path) -> bytes:
    """The whole file: a regular one, of a bounded size, since it is cut into tokens at once."""
    try:
        return read_small(path, MAX_TEXT_BYTES)
    except TooLongError as error:
        raise CorpusError(
            "the text is too large",
            path=path,
            expected=error.expected,
            found=error.found,
            remedy="give a part of it, or several smaller files",
        ) from None


def _parse_ids(raw: bytes, path: Path) -> I64:
    words = raw.replace(b",", b" ").split()
    for place, word in enumerate(words):
        if not word.isdigit() or len(word) > _MAX_DIGITS:
            raise CorpusError(
                f"token {place} is not a token id",
                path=path,
                expected="a decimal number",
                found=repr(word[:40])[1:],
            )
    return np.array([int(word) for word in words], np.int64)


def _encode(raw: bytes, path: Path, tokenizer: Tokenizer | None) -> I64:
    if tokenizer is None:
        raise CorpusError(
            "the artifact has no tokenizer to encode a text with",
            path=path,
            remedy=f"give token ids in a file whose name ends in {IDS_SUFFIX}",
        )
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CorpusError("text is not UTF-8", path=path, found=f"byte {error.start}") from None
    return np.array(tokenizer.encode(text), np.int64)
