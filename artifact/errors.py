"""Owns the error classes of the artifact room, and the one-line message of every room's errors.

A class stands for one broken rule; an instance carries where (``path``, ``tensor``), what was
``expected``, what was ``found`` and the ``remedy``. Nothing here is caught: the command line prints
``str(error)`` and exits 1.
"""

from __future__ import annotations

import io
from typing import Any, ClassVar, Self

MAX_VALUE = 500
"""Characters of ``tensor``, ``expected`` and ``found`` that a message shows."""

MAX_WORDS = 2000
"""Characters of ``what`` and ``remedy`` that a message shows: they may quote a file, too."""

MAX_PATH = 4096
"""Characters of ``path`` that a message shows."""


def one_line(text: str) -> str:
    """``text`` as one line without anything that a terminal obeys or that hides other text.

    Control characters (C0, C1), bidirectional controls, zero-width characters and line separators
    become ``\\xNN``, ``\\uNNNN`` or ``\\UNNNNNNNN``; so does a byte of a file name that is not
    UTF-8, as ``\\xNN``. Everything foreign that reaches a terminal or a log passes through here.
    """
    return text if text.isprintable() else "".join(map(_shown, text))


def _shown(character: str) -> str:
    if character.isprintable():
        return character
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # how Python carries a byte that is not UTF-8
        code -= 0xDC00
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def cut(text: str, limit: int = MAX_VALUE) -> str:
    """``text`` up to ``limit`` characters; of a longer text the beginning and the length."""
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text):,} characters)"


def escape_unencodable(*streams: Any) -> None:
    """Let text streams escape characters that their encoding lacks, instead of failing."""
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


class Ds4qError(Exception):
    """A broken rule as one line: ``path: tensor: what: expected X, found Y; remedy``.

    The line shows at most ``MAX_VALUE`` characters of each value, ``MAX_WORDS`` of ``what`` and of
    ``remedy`` and ``MAX_PATH`` of the path; the attributes keep the whole values.

    Parameters
    ----------
    what : overrides the class's ``rule``, the plain words for what is wrong
    path : file or folder that breaks the rule
    tensor : tensor name, where one is known
    expected, found : values, formatted with ``str``
    remedy : overrides the class's ``cure``, what the user can do
    """

    rule: ClassVar[str] = "failed"
    cure: ClassVar[str] = ""

    def __init__(
        self,
        what: str | None = None,
        *,
        path: object = None,
        tensor: str | None = None,
        expected: Any = None,
        found: Any = None,
        remedy: str | None = None,
    ) -> None:
        self.what = self.rule if what is None else what
        self.path = None if path is None else str(path)
        self.tensor = tensor
        self.expected = expected
        self.found = found
        self.remedy = self.cure if remedy is None else remedy
        super().__init__(self._message())

    def located(self, *, path: object = None, tensor: str | None = None) -> Self:
        """The same error with ``path`` and ``tensor`` filled in where they were unknown."""
        return type(self)(
            self.what,
            path=self.path if self.path is not None else path,
            tensor=self.tensor if self.tensor is not None else tensor,
            expected=self.expected,
            found=self.found,
            remedy=self.remedy,
        )

    def _message(self) -> str:
        where = f"{cut(self.path, MAX_PATH)}: " if self.path else ""
        where += f"{cut(self.tensor)}: " if self.tensor else ""
        seen = []
        if self.expected is not None:
            seen.append(f"expected {cut(str(self.expected))}")
        if self.found is not None:
            seen.append(f"found {cut(str(self.found))}")
        text = where + cut(self.what, MAX_WORDS)
        if seen:
            text += ": " + ", ".join(seen)
        if self.remedy:
            text += "; " + cut(self.remedy, MAX_WORDS)
        return one_line(text)


class ThreadRefusedError(Ds4qError):
    """The system starts no further thread for this user."""

    rule = "no thread could be started"
    cure = "use fewer --threads, or raise the limits on processes and memory (ulimit -u, ulimit -v)"

    @classmethod
    def of(cls, error: BaseException) -> Self | None:
        """This error, if ``error`` is what Python raises then; else None."""
        refused = isinstance(error, RuntimeError) and str(error) == "can't start new thread"
        return cls() if refused else None


class ArtifactError(Ds4qError, ValueError):
    """The bytes of an artifact, receipt or packed tensor break a rule of the format."""

    rule = "not a valid artifact"


class TruncatedError(ArtifactError):
    """The file ends before what its own fields promise."""

    rule = "file is too short"
    cure = "copy or download the file again"


class MagicError(ArtifactError):
    """The first four bytes are not ``HFQM``."""

    rule = "not an HFQ file"


class VersionError(ArtifactError):
    """A container version that this reader does not know."""

    rule = "unsupported HFQ version"


class HeaderError(ArtifactError):
    """A header field is out of its range."""

    rule = "bad header field"


class MetadataError(ArtifactError):
    """The metadata is not one strict JSON object."""

    rule = "bad metadata"


class IndexFieldError(ArtifactError):
    """The tensor index is inconsistent, or runs into the payload."""

    rule = "bad tensor index"


class DuplicateTensorError(ArtifactError):
    """Two index entries carry one name."""

    rule = "tensor appears twice"


class PayloadBoundsError(ArtifactError):
    """A payload lies outside the file, or on top of another."""

    rule = "payload out of bounds"


class TensorTypeError(ArtifactError):
    """A type number that is reserved, unknown or has no codec here."""

    rule = "tensor type cannot be decoded"


class PayloadSizeError(ArtifactError):
    """A payload's length is not what type and shape demand."""

    rule = "payload length does not fit type and shape"


class CodingError(ArtifactError):
    """A payload whose meaning is not told, told twice, or told in an unknown word.

    ``rule_id`` is the short name of the broken rule in FORMAT.md; the message begins with it.
    """

    rule = "the artifact does not say how to decode this tensor"

    @classmethod
    def of(cls, rule_id: str, what: str, **where: Any) -> Self:
        """An error whose message begins with ``rule_id``, as in ``mix-row-unmapped: ...``."""
        return cls(f"{rule_id}: {what}", **where)


class PayloadValueError(ArtifactError):
    """Payload bytes that the type forbids: a NaN scale, a bad row header, an id out of range."""

    rule = "illegal payload bytes"


class UnknownTensorError(ArtifactError, KeyError):
    """A tensor that the artifact does not hold."""

    rule = "no such tensor"

    __str__ = Ds4qError.__str__  # KeyError would print the repr


class ReceiptError(ArtifactError):
    """A receipt that cannot be read, or that belongs to another file."""

    rule = "bad receipt"


class ChangedError(ArtifactError):
    """The file was replaced or modified while it was open."""

    rule = "file changed while it was open"
    cure = "run the command again on a file that nothing writes to"
