"""Owns the error classes of the registry room: what a document, a name or a transfer can break."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

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


class GenerateError(RegistryError):
    """The curated file or the listing gives no registry; ``problems`` holds all, a line each."""

    rule = "cannot generate the registry"
    problems: tuple[str, ...] = ()

    @classmethod
    def of(cls, problems: Iterable[object], path: object) -> Self:
        """One error of many problems."""
        lines = tuple(str(problem) for problem in problems)
        more = f"; and {len(lines) - 1} more" if len(lines) > 1 else ""
        error = cls(lines[0] + more, path=path)
        error.problems = lines
        return error


EITHER = "either the server or the registry entry is wrong: compare with what the publisher says"


class TransferError(Ds4qError):
    """A file could not be fetched; what came so far is kept."""

    rule = "cannot be fetched"
    cure = "pull again"


class RefusedError(TransferError):
    """The server says no: asking again would not help."""

    rule = "the server refuses"
    cure = "check the address and your access"


class SizeError(TransferError):
    """The server's file has another length than the registry says."""

    rule = "the server's file has another size than registered"
    cure = EITHER


class DigestError(TransferError):
    """Bytes were received whole, and are not the registered ones."""

    rule = "SHA-256 of the fetched file differs from its registry entry"


class UnfinishedError(TransferError):
    """A partial file that this download did not leave stands in its place."""

    rule = "an unfinished file of something else lies here"
    cure = "finish that job, or remove the file"


class ExistsError(TransferError):
    """A file stands at the final name already."""

    rule = "file exists"
    cure = "replace it with --force"


class SpaceError(TransferError):
    """The disk cannot hold what would be fetched."""

    rule = "not enough free space (No space left on device)"
    cure = "free some space, or name another folder with --models-dir"


class HubError(TransferError):
    """The hub does not tell where a file is."""

    rule = "the hub does not answer for this repo"
    cure = "check the network, the repo's name, and for a private repo 'hf auth login'"


class OtherFileError(TransferError):
    """A file of the registered name is there, and is not the registered file."""

    rule = "the file that is there is not the registered one"
    cure = "it is left as it is: --force replaces it"


class UnverifiedError(TransferError):
    """Files whose digest nobody published: what arrives could not be checked."""

    rule = "no digest is published"
    cure = "fetch without that check by --allow-unverified"


class LocalOnlyError(TransferError):
    """An entry without a repo: the file is made here, not fetched."""

    rule = "this entry is local only and names no place to pull from"


class PullError(TransferError):
    """The trunk is there, and not all that belongs to it."""

    rule = "not all files could be pulled"
