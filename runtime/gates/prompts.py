"""Owns the prompts that a model continues in the neutrality gate. Runs no model.

They are cut to lengths at which a paged model could go wrong: one token, fewer than a window of
attention, a window and one to either side of it, more tokens than one batch has slots for.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from ds4q.artifact.files import read_small
from ds4q.runtime.config import ModelConfig
from ds4q.runtime.errors import CorpusError, TokenError
from ds4q.runtime.generate import check_prompt
from ds4q.runtime.text.chat import encode_raw
from ds4q.runtime.text.tokenizer import Tokenizer

SEED = 20260805
LONGEST = 300
MAX_BYTES = 64 << 20

TEXT = """\
The lighthouse keeper wrote one line a day for thirty-one years. Most lines tell of wind, of ships
that passed, of oil that was late. On 14 March 1902 he wrote: "Nothing moved today." His daughter,
who kept the light after him, counted 11,322 lines and found 46 that speak of people.

def lines_about(people, diary):
    return [line for line in diary if any(name in line for name in people)]

She sorted them by year and sent a copy to the museum in Bergen, where it lay in a drawer until
a student asked for old weather. Die Zahlen waren genauer als die der Sternwarte; le vent, surtout,
avait été mesuré trois fois par jour. The student built a table: year, month, days with a gale,
days of calm, visibility in miles. 1897 had 61 gales, 1898 had 44, 1899 had 72.

What does such a record show? First, that a careful person without instruments beats a careless one
with them. Second, that errors repeat: whenever the keeper was ill, the wind came from the north.
Third, that a gap says something, too; for nine days in 1911 there is no line at all, and on the
tenth only this: "The lamp is lit again. I was not alone. x = 3 * (7 + 5) - 1, she says, is 35."
"""


def lengths(config: ModelConfig, positions: int) -> list[int]:
    """Tokens of the built-in prompts, short ones first; each leaves a position for an answer."""
    window = config.sliding_window
    wanted = {1, 7, window - 1, window, window + 1, LONGEST}
    return sorted({max(1, min(length, positions - 1)) for length in wanted})


def built_in(config: ModelConfig, tokenizer: Tokenizer | None, positions: int) -> list[list[int]]:
    """Prompts of those lengths: BOS and text, from another place each; else seeded token ids."""
    wanted = lengths(config, positions)
    if tokenizer is None:
        draws = np.random.default_rng(SEED)
        return [draws.integers(config.vocab_size, size=length).tolist() for length in wanted]
    bos, *text = encode_raw(tokenizer, TEXT)
    prompts = []
    for number, length in enumerate(wanted):
        start = number * len(text) // len(wanted)
        turned = text[start:] + text[:start]
        repeats = -(-length // len(turned))
        prompts.append([bos, *(turned * repeats)][:length])
    return prompts


def read(
    path: str | os.PathLike[str], *, tokenizer: Tokenizer | None, vocab_size: int, positions: int
) -> list[list[int]]:
    """The prompts of a JSONL file, one object a line: ``{"text": "..."}`` or ``{"ids": [1, 2]}``.

    A text is read as it is, after BOS; ids are taken as they are.

    Raises
    ------
    CorpusError, TokenError : no prompts, a line that is not a prompt, or one beyond the vocabulary
        or the context
    NotRegularError, TooLongError : not a file of at most ``MAX_BYTES``; nothing was read
    OSError : the file cannot be read
    """
    prompts = []
    for number, line in enumerate(read_small(path, MAX_BYTES).splitlines(), start=1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        ids = _ids(line, tokenizer, place)
        try:
            check_prompt(ids, vocab_size)
        except TokenError as error:
            raise error.located(path=place) from None
        if len(ids) >= positions:
            raise CorpusError(
                "a prompt that fills the context",
                path=place,
                expected=f"fewer than {positions} tokens",
                found=len(ids),
            )
        prompts.append(ids)
    if not prompts:
        raise CorpusError("no prompts", path=path, remedy='write lines like {"text": "Hello"}')
    return prompts


def _ids(line: bytes, tokenizer: Tokenizer | None, place: str) -> list[int]:
    try:
        found: Any = json.loads(line)
    except (ValueError, RecursionError) as error:  # JSON or UTF-8, or lists in lists
        raise CorpusError("not JSON", path=place, found=str(error)) from None
    one = isinstance(found, Mapping) and ("text" in found) != ("ids" in found)
    if one and isinstance(text := found.get("text"), str):
        if tokenizer is None:
            raise CorpusError(
                "the artifact has no tokenizer for a text", path=place, remedy="give ids"
            )
        return encode_raw(tokenizer, text)
    ids = found.get("ids") if one else None
    if isinstance(ids, list) and all(type(token) is int for token in ids):
        return ids
    raise CorpusError("not a prompt", path=place, expected='"text", or "ids" with a list of ids')
