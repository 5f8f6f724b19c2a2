"""Owns the identifiers that the fidelity gate has models copy. Runs no model.

They look like the names of a program and end in digits beside the letters that digits are mistaken
for: a field report of a quantized model tells of 0 becoming o (Luce-Org/lucebox issue 660).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

SEED = 20260805
SHORTEST, LONGEST = 8, 32

WORDS = (
    "active", "align", "array", "batch", "bias", "block", "buffer", "cache", "chunk", "config",
    "count", "cursor", "data", "decode", "depth", "device", "error", "event", "field", "file",
    "filter", "format", "frame", "group", "handle", "header", "index", "input", "item", "kernel",
    "label", "layer", "length", "level", "limit", "line", "list", "load", "local", "lock",
    "match", "memory", "message", "model", "module", "name", "node", "number", "object", "offset",
    "output", "packet", "parse", "path", "pool", "queue", "reader", "record", "result", "route",
    "scale", "score", "size", "source", "stack", "state", "stream", "string", "table", "target",
    "task", "test", "text", "token", "type", "value", "vector", "width", "write",
)  # fmt: skip


def _pascal(words: Sequence[str]) -> str:
    return "".join(word.capitalize() for word in words)


STYLES: dict[str, tuple[Callable[[Sequence[str]], str], str]] = {
    "snake_case": (lambda words: "_".join(words) + "_", "ol"),
    "camelCase": (lambda words: words[0] + _pascal(words[1:]), "Ol"),
    "PascalCase": (_pascal, "Ol"),
    "SCREAMING_SNAKE": (lambda words: "_".join(words).upper() + "_", "OI"),
    "dotted.path": (lambda words: ".".join(words) + "_", "ol"),
}
"""Name of a style -> how it joins words, and its letters that look like the digits 0 and 1."""


def identifiers(seed: int = SEED) -> Iterator[str]:
    """Different identifiers of ``SHORTEST`` to ``LONGEST`` characters, the styles in turn.

    The same seed gives the same ones with every version of Python: only ``Random.random`` is
    called, whose numbers the language promises to keep.
    """
    draws = random.Random(seed)
    known = {""}

    def below(count: int) -> int:
        return int(draws.random() * count)

    while True:
        for join, letters in STYLES.values():
            name = ""
            while name in known or not SHORTEST <= len(name) <= LONGEST:
                words = [WORDS[below(len(WORDS))] for _ in range(1 + below(4))]
                name = join(words) + _tail(letters, below)
            known.add(name)
            yield name


def _tail(letters: str, below: Callable[[int], int]) -> str:
    """Two to five characters: pairs of a letter and the digit that it looks like, and a digit."""
    tail = ""
    for _ in range(1 + below(2)):
        place = below(2)
        pair = letters[place] + "01"[place]
        tail += pair[::-1] if below(2) else pair
    return tail + str(below(10)) if below(2) else tail
