"""Owns strict JSON and the schema of registry files. What the values mean together: ``rules.py``.

``schema.json`` beside this file is what is checked, and what others may check with. Unknown keys
are told apart from bad values: a newer registry may say more than this version understands.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

from ds4q.registry.errors import DocumentError

MAX_DOCUMENT_BYTES = 4 << 20  # some 17,000 entries
MAX_NESTING = 32  # far from where Python gives up
_TYPES = {"object": "a JSON object", "string": "text"}  # where a schema has no words of its own
_SHOWN = 100  # characters of a value in a message
_LOOKED_AT = 2048  # bytes of what is no JSON: no URL is longer
_URL = r"((?:(?i:https?):/?/?|://)"  # mistyped ones, too
_CREDENTIALS = re.compile(
    _URL + r')(?:[^"\\]|\\.)*@'
)  # inside one JSON string; a password may hold '/'
_QUERY = re.compile(_URL + r'[^"?#;\\]*)[?#;](?:[^"\\]|\\.)*')

Kind = Literal["document", "curated", "listing"]


@dataclass(frozen=True, slots=True)
class Problem:
    """One broken rule of a registry file.

    Attributes
    ----------
    where : keys from the top, as ``("models", TAG, "dspark", "file")``
    fatal : the file cannot be used; else only strict checks refuse it
    """

    where: tuple[str, ...]
    what: str
    expected: str | None = None
    found: str | None = None
    fatal: bool = True

    @property
    def key(self) -> str:
        """``where`` for people; tags hold dots, so the parts are joined by ``: ``."""
        return _without_secrets(": ".join(self.where).removeprefix("models: "))

    def __str__(self) -> str:
        parts = [f"expected {self.expected}"] if self.expected else []
        parts += [f"found {self.found}"] if self.found else []
        text = f"{self.key}: {self.what}" if self.where else self.what
        return f"{text}: {', '.join(parts)}" if parts else text


def _without_secrets(text: str) -> str:
    return _QUERY.sub(r"\1", _CREDENTIALS.sub(r"\1", text))


def shown(value: Any) -> str:
    """``value`` as JSON has it, cut to what fits a message; URLs without what may be a secret."""
    text = _without_secrets(json.dumps(value, ensure_ascii=False))
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def parse(raw: bytes, origin: str) -> dict[str, Any]:
    """One strict JSON object: UTF-8, no key twice, no NaN, no infinity.

    Raises
    ------
    DocumentError : anything else, more than ``MAX_DOCUMENT_BYTES``, deeper than ``MAX_NESTING``
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) != len(pairs):
            twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
            both = " and ".join(shown(value) for name, value in pairs if name == twice)
            raise DocumentError(f"key {twice!r} stands twice", path=origin, found=both)
        return out

    if len(raw) > MAX_DOCUMENT_BYTES:
        found = f"{len(raw)} bytes"
        raise DocumentError(f"longer than {MAX_DOCUMENT_BYTES} bytes", path=origin, found=found)
    try:
        parsed = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
        # NaN, infinity (1e999 is one) and lone surrogates, which json.loads lets through.
        json.dumps(parsed, ensure_ascii=False, allow_nan=False).encode("utf-8")
    except DocumentError:
        raise
    except (ValueError, RecursionError) as error:  # also what json and the codecs raise
        begins = repr(_without_secrets(raw[:_LOOKED_AT].decode("latin-1")).encode("latin-1")[:40])[
            1:
        ]
        raise DocumentError(f"not JSON ({error})", path=origin, found=f"{begins}...") from None
    if not isinstance(parsed, dict):
        raise DocumentError("not a JSON object", path=origin, found=f"{raw[:40]!r}"[1:])
    if _deeper(parsed, MAX_NESTING):
        raise DocumentError(f"nested more than {MAX_NESTING} levels deep", path=origin)
    return parsed


def _deeper(value: Any, levels: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_deeper(each, levels - 1) for each in inner)


def canonical(document: Mapping[str, Any]) -> str:
    """JSON in the one layout of all that this room writes: sorted, two spaces, a newline."""
    text = json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return text + "\n"


def in_order(problems: Iterable[Problem], document: Mapping[str, Any]) -> list[Problem]:
    """``problems`` as their places follow each other in ``document``."""

    orders: dict[int, dict[str, int]] = {}  # of objects inside document, which keeps them alive

    def place(problem: Problem) -> list[int]:
        found, inner = [], document
        for key in problem.where:
            if not isinstance(inner, Mapping) or key not in inner:
                break
            if id(inner) not in orders:
                orders[id(inner)] = {name: number for number, name in enumerate(inner)}
            found.append(orders[id(inner)][key])
            inner = inner[key]
        return found

    return sorted(problems, key=place)


@cache
def _schema() -> dict[str, Any]:
    text = resources.files("ds4q.registry").joinpath("schema.json").read_text("utf-8")
    parsed: dict[str, Any] = json.loads(text)
    return parsed


def schema_problems(document: dict[str, Any], kind: Kind) -> list[Problem]:
    """What ``schema.json`` says against ``document``, in its order; unknown keys are not fatal."""
    return in_order(_schema_problems(document, kind), document)


def _schema_problems(document: dict[str, Any], kind: Kind) -> Iterator[Problem]:
    from jsonschema import Draft202012Validator  # 0.1 s that only a look at a document has to pay

    validator = Draft202012Validator(_schema())
    if kind != "document":
        validator = validator.evolve(schema={"$ref": f"#/$defs/{kind}"})
    for error in validator.iter_errors(document):
        where = tuple(str(part) for part in error.absolute_path)
        if error.validator == "additionalProperties":
            for key in error.instance:
                if key not in error.schema["properties"]:
                    yield Problem((*where, key), "unknown key", fatal=False)
        elif error.validator == "required":
            yield Problem(where, error.message)
        else:
            expected = error.schema.get("description") or _TYPES[error.schema["type"]]
            yield Problem(where, "bad value", expected, shown(error.instance))
