"""Owns what a name may be: of files, and which suffixes artifacts carry. Opens nothing."""

from __future__ import annotations

from ds4q.registry.errors import UnsafeNameError

MAX_NAME_BYTES = 255  # of one path component, on every file system in use

ARTIFACT_SUFFIXES = frozenset(
    [
        ".hf4",
        ".hf6",
        ".hfq",
        ".mq2",
        ".mq2lloyd",
        ".mq2lloydu",
        ".mq2r",
        ".mq2rxt",
        ".mq3",
        ".mq3p",
        ".mq4",
        ".mq4p",
        ".mq4r",
        ".mq5",
        ".mq6",
        ".mfp4",
        ".q8",
        ".fp4",
        ".fp4q8",
        ".fp4p",
        ".fp4mix",
    ]
)
"""What files with the magic ``HFQM`` are called: hipfire's suffixes, and ours."""


def plain_name(name: str, *, what: str, path: object = None) -> str:
    """``name``, if it can only ever mean a file directly inside the folder that it is joined to.

    Parameters
    ----------
    name : from a registry, a server or a user
    what : what it names, for the message: ``"file of deepseek-v4-flash:fp4"``
    path : the document that holds it

    Raises
    ------
    UnsafeNameError : empty, too long, holds ``/``, ``\\``, ``..`` or what does not print (NUL is
        among that), or begins with a dot: files of ours that begin so are temporary
    """
    if not name:
        fault = "is empty"
    elif name.startswith("."):
        fault = "begins with a dot"
    elif ".." in name:
        fault = "holds '..'"
    elif "/" in name or "\\" in name:
        fault = "holds a separator"
    elif not name.isprintable():
        fault = "holds a character that does not print"
    elif len(name.encode("utf-8")) > MAX_NAME_BYTES:
        fault = f"is longer than {MAX_NAME_BYTES} bytes"
    else:
        return name
    raise UnsafeNameError(f"unsafe name: {what} {fault}", path=path, found=repr(name))
