"""Owns the error classes of the registry room: what a document, a name or a transfer can break."""

from __future__ import annotations

from ds4q.artifact.errors import Ds4qError


class RegistryError(Ds4qError, ValueError):
    """A registry document, or what it says of a file, breaks a rule."""

    rule = "not a valid registry"


class UnsafeNameError(RegistryError):
    """A name that would lead out of the folder it is joined to."""

    rule = "unsafe name"
    cure = "use a plain file name"


class DocumentError(RegistryError):
    """A registry document that is not JSON, or that holds what its schema forbids."""

    rule = "not a registry document"


class UnknownTagError(RegistryError, KeyError):
    """A name that is no tag, no alias and no registered file name."""

    rule = "unknown tag"

    __str__ = Ds4qError.__str__  # KeyError would print the repr


class AmbiguousNameError(RegistryError):
    """A file name that several tags register."""

    rule = "file name belongs to several tags"


class UnknownArchError(RegistryError):
    """A tag whose architecture nobody can tell: nothing is guessed from a name that looks alike."""

    rule = "tag maps to no architecture"


class UnknownQuantError(RegistryError):
    """A file whose quantization has no word in the registry."""

    rule = "file maps to no known quant"


class SourceError(RegistryError):
    """A registry document that cannot be had: no such file, or a server that does not give it."""

    rule = "cannot get the registry"
