"""Owns the texts of a release's prompt encoder: read as data, never run. Renders no prompt.

DeepSeek publishes the encoder as ``encoding/encoding_dsv4.py`` beside the weights. A few of its
constants are part of the model's format and of no other file: what asks for more effort, and the
heading of a response format. The source is parsed, and these constants are taken out of the tree.
"""

from __future__ import annotations

import ast
import hashlib
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds4q.quantize.checkpoint import read_text
from ds4q.quantize.errors import EncodingError, FileKindError

FOLDER = "encoding"
FILE = "encoding_dsv4.py"
KEY = "encoding"  # in the metadata object ``ds4q``

EFFORTS = ("low", "high", "max")
PREVIEW = "REASONING_EFFORT_MAX"  # one text, for the highest effort
PROMPTS = "REASONING_EFFORT_PROMPTS"  # a text for each effort, since 0731
HEADING = "response_format_template"
_SCHEMA = "{schema}"  # where the heading's template has the JSON

MAX_FILE_BYTES = 1 << 20  # the published ones have 30 kB
MAX_TEXT_CHARS = 1 << 16

# SHA-256 of the published texts. Another text is reported, and used: the model's file is right.
_ABSOLUTE = "f7a24f3b3050d4a83781e9b755b316aae2ec1d9dc87562541d90bcb04d7350f7"
KNOWN = {
    PREVIEW: _ABSOLUTE,
    f"{PROMPTS}.low": hashlib.sha256(b"").hexdigest(),
    f"{PROMPTS}.high": _ABSOLUTE,
    f"{PROMPTS}.max": "53fb31b8392ec5b4a926481943efc67636748f137c1a49d493a7af4d4fa55d2c",
    HEADING: "5200f58413f49f3957c43beddbc97bead023232cb5934fad0c1997c30c139112",
}


@dataclass(frozen=True, slots=True)
class Encoding:
    """The texts of a release's prompt format that no other file holds.

    Attributes
    ----------
    release : ``0731`` or ``preview``, by the constants that the file has; None for neither
    efforts : effort -> what a prompt in thinking mode begins with; an effort may be absent
    response_format : what stands before the JSON of a response format; None where it is absent
    sha256 : name of a constant -> SHA-256 (hex) of its UTF-8
    notes : one line for each text that differs from the known one
    """

    release: str | None
    efforts: Mapping[str, str]
    response_format: str | None
    sha256: Mapping[str, str]
    notes: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """What an artifact's metadata holds: texts and hashes by the name of the constant."""
        texts = {name: self._text(name) for name in self.sha256}
        return {"sha256": dict(self.sha256), "texts": texts}

    def _text(self, name: str) -> str:
        if name == HEADING:
            return self.response_format or ""
        return self.efforts["max" if name == PREVIEW else name.removeprefix(f"{PROMPTS}.")]


def parse_encoding(path: Path) -> Encoding:
    """The texts of ``encoding_dsv4.py``.

    Parameters
    ----------
    path : the file, the folder that holds it, or a checkpoint with the folder ``encoding/``

    Raises
    ------
    EncodingError : no such file, or one whose constants are not plain text
    SourceError : it cannot be read
    """
    places = [path / FILE, path / FOLDER / FILE] if path.is_dir() else [path]
    for place in places:
        try:
            raw = read_text(place)
        except FileKindError:
            raise EncodingError("not a regular file", path=place) from None
        if raw is not None:
            return _read(raw, place)
    raise EncodingError(f"no {FILE}", path=path)


def encoding_in(folder: Path) -> Encoding | None:
    """The texts of ``encoding/encoding_dsv4.py`` in ``folder``; None where it is not there."""
    place = folder / FOLDER / FILE
    raw = read_text(place) if place.parent.is_dir() else None
    return None if raw is None else _read(raw, place)


def find_encoding(artifact: Path, metadata: Mapping[str, Any]) -> Encoding | None:
    """The texts in an artifact's metadata, else those of the folder ``encoding/`` beside it."""
    found = encoding_from_metadata(metadata, path=artifact)
    return encoding_in(artifact.parent) if found is None else found


def encoding_from_metadata(metadata: Mapping[str, Any], *, path: object = None) -> Encoding | None:
    """The texts that ``quantize`` copied; None where the source had none.

    Raises ``EncodingError`` for texts that are not those of their hashes.
    """
    ours = metadata.get("ds4q")
    found = ours.get(KEY) if isinstance(ours, Mapping) else None
    if found is None:
        return None
    where = f"metadata ds4q.{KEY}"
    texts = found.get("texts") if isinstance(found, Mapping) else None
    if not isinstance(texts, Mapping) or not texts.keys() <= KNOWN.keys():
        raise EncodingError(f"{where} holds no texts", path=path)
    for name, text in texts.items():
        if not isinstance(text, str):
            raise EncodingError(f"{where}: {name} is not text", path=path)
    encoding = _encoding(texts, where if path is None else f"{path}: {where}")
    if found.get("sha256") != encoding.sha256:
        raise EncodingError(f"{where}: texts and hashes disagree", path=path)
    return encoding


def _encoding(texts: Mapping[str, str], where: str) -> Encoding:
    """The texts by what they are for; ``where`` they are from, for notes."""
    digests = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
    efforts = {"low": ""}
    release = None
    if any(name.startswith(PROMPTS) for name in texts):
        release = "0731"
        efforts |= {e: texts[f"{PROMPTS}.{e}"] for e in EFFORTS if f"{PROMPTS}.{e}" in texts}
    elif PREVIEW in texts:
        release = "preview"
        efforts |= {"high": "", "max": texts[PREVIEW]}
    notes = tuple(
        f"{where}: {name} has another text than the releases known here (sha256 {digest}); "
        "it is used"
        for name, digest in digests.items()
        if digest != KNOWN[name]
    )
    return Encoding(release, efforts, texts.get(HEADING), digests, notes)


def _read(raw: bytes, path: Path) -> Encoding:
    if len(raw) > MAX_FILE_BYTES:
        raise EncodingError(
            "the file is too long", path=path, expected=f"<= {MAX_FILE_BYTES} bytes", found=len(raw)
        )
    try:
        source = raw.decode("utf-8-sig")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what Python thinks of the source's style
            tree = ast.parse(source)
    except UnicodeDecodeError as error:
        raise EncodingError("not UTF-8", path=path, found=f"byte {error.start}") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise EncodingError("not Python", path=path, found=error) from None
    texts = _Constants(tree, path).texts()
    if not texts:
        raise EncodingError(
            "none of the format's constants", path=path, expected=f"{PROMPTS}, {PREVIEW}, {HEADING}"
        )
    return _encoding(texts, str(path))


class _Constants:
    """What a module assigns to names at its top level, as far as it is text or a table of texts."""

    def __init__(self, tree: ast.Module, path: Path) -> None:
        self._path = path
        self._values: dict[str, ast.expr] = {}
        self._known: dict[str, str] = {}  # a chain of a = b + b is worked out once for each name
        for node in tree.body:
            if not isinstance(node, ast.Assign | ast.AnnAssign):
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if node.value is not None:
                self._values |= {t.id: node.value for t in targets if isinstance(t, ast.Name)}
        # Wherever else a name is bound (in a branch, by +=), its value would have to be run for.
        self._bound = Counter(
            node.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
        )

    def texts(self) -> dict[str, str]:
        """Name of a constant -> its text; of the heading what stands before the JSON."""
        texts: dict[str, str] = {}
        try:
            if self._bound[PROMPTS]:
                texts |= self._prompts()
            elif self._bound[PREVIEW]:
                texts[PREVIEW] = self._named(PREVIEW, ())
            if self._bound[HEADING]:
                texts[HEADING] = self._heading()
        except RecursionError:
            raise EncodingError("nested too deeply", path=self._path) from None
        return texts

    def _prompts(self) -> dict[str, str]:
        table = self._value(PROMPTS)
        if not isinstance(table, ast.Dict):
            raise self._refused(PROMPTS, "a dictionary", table)
        texts = {}
        for key, value in zip(table.keys, table.values, strict=True):
            if key is None:  # **other
                raise self._refused(PROMPTS, "a dictionary of texts", table)
            effort = self._text(key, ())
            none = isinstance(value, ast.Constant) and value.value is None
            if effort in EFFORTS:
                texts[f"{PROMPTS}.{effort}"] = "" if none else self._text(value, ())
        return texts

    def _heading(self) -> str:
        heading, _, behind = self._named(HEADING, ()).partition(_SCHEMA)
        if behind or "{" in heading or "}" in heading:
            raise EncodingError(
                f"{HEADING} is not understood",
                path=self._path,
                expected=f"a heading, then {_SCHEMA}",
                found=repr(heading + behind)[-80:],
            )
        return heading

    def _value(self, name: str) -> ast.expr:
        if self._bound[name] != 1 or name not in self._values:
            raise EncodingError(
                f"{name} is not one plain assignment",
                path=self._path,
                found=f"{self._bound[name]} assignments",
            )
        return self._values[name]

    def _named(self, name: str, outer: tuple[str, ...]) -> str:
        if name in outer:
            raise EncodingError(f"{name} is defined by itself", path=self._path)
        if name not in self._known:
            self._known[name] = self._text(self._value(name), (*outer, name))
        return self._known[name]

    def _text(self, node: ast.expr, outer: tuple[str, ...]) -> str:
        """The string that ``node`` is: literals, names of such, and sums of them."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        elif isinstance(node, ast.Name):
            text = self._named(node.id, outer)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            text = self._text(node.left, outer) + self._text(node.right, outer)
        else:
            raise self._refused("a constant", "plain text", node)
        if len(text) > MAX_TEXT_CHARS:
            raise EncodingError(
                "a constant is too long", path=self._path, expected=f"<= {MAX_TEXT_CHARS}"
            )
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise EncodingError("a constant holds a lone surrogate", path=self._path) from None
        return text

    def _refused(self, what: str, expected: str, node: ast.expr) -> EncodingError:
        return EncodingError(
            f"{what} in line {node.lineno} is not {expected}",
            path=self._path,
            found=type(node).__name__,
        )
