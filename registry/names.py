"""Owns what a name may be: of files, and which suffixes artifacts carry. Opens nothing."""

from __future__ import annotations

import re

from ds4q.registry.errors import UnsafeNameError

MAX_NAME_BYTES = 255  # of one path component, on every file system in use
MAX_FILE_BYTES = 240  # of a registered file: what a download adds must be a name, too

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


UNFINISHED_SUFFIXES = (".partial", ".partial.blocks")
"""How files of a download that is not done are called: what ``blocks.py`` keeps."""

DOCUMENTS = frozenset({"registry.json", "registry.cache.json"})
"""Names of registry documents, which a model of that name would replace."""

_DEVICES = re.compile(r"(con|prn|aux|nul|com[0-9¹²³]|lpt[0-9¹²³])(\.|$)", re.IGNORECASE)
"""What Windows opens as a device, in any folder and with any suffix."""

_BYTES = {code: None for code in range(0xDC80, 0xDD00)}  # of a name that are not UTF-8

_SPECIAL = frozenset('<>:"|?*')  # patterns, drives and streams, to shells and to other systems


def plain_name(name: str, *, what: str, path: object = None) -> str:
    """``name``, if a registry may give it to a file of the models folder.

    Parameters
    ----------
    name : from a registry, a server or a user
    what : what it names, for the message: ``"file of deepseek-v4-flash:fp4"``
    path : the document that holds it

    Raises
    ------
    UnsafeNameError : as ``inner_name``; or it begins or ends with a space, begins with ``-``, ends
        with a dot, is a device on Windows (``CON``, ``aux.hfq``), holds one of ``<>:"|?*``, is that
        of an unfinished download or of a registry document, or leaves no room for what an
        unfinished download adds to it
    """
    inner_name(name, what=what, path=path)
    if name != name.strip():
        fault = "begins or ends with a space"
    elif name.startswith("-"):
        fault = "begins with '-', as options of commands do"
    elif name.endswith("."):
        fault = "ends with a dot, which Windows leaves out"
    elif _DEVICES.match(name):
        fault = "is a device on Windows"
    elif special := sorted(_SPECIAL & set(name)):
        fault = f"holds {special[0]!r}"
    elif name.casefold().endswith(UNFINISHED_SUFFIXES):
        fault = "is that of an unfinished download"
    elif name.casefold() in DOCUMENTS:
        fault = "is that of a registry document"
    elif len(name.encode("utf-8", "surrogateescape")) > MAX_FILE_BYTES:
        fault = f"is longer than {MAX_FILE_BYTES} bytes"
    else:
        return name
    raise _unsafe(name, fault, what, path)


def inner_name(name: str, *, what: str, path: object = None) -> str:
    """``name``, if it can only ever mean a file directly inside the folder that it is joined to.

    Parameters are those of ``plain_name``.

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
    elif not name.translate(_BYTES).isprintable():
        fault = "holds a character that does not print"
    elif not fits(name):
        fault = f"is longer than {MAX_NAME_BYTES} bytes"
    else:
        return name
    raise _unsafe(name, fault, what, path)


def inner_path(name: str, *, what: str, path: object = None) -> str:
    """``name``, if it can only ever mean a file in or below the folder that it is joined to.

    Parameters are those of ``plain_name``.

    Raises
    ------
    UnsafeNameError : absolute; or an empty part, ``.`` or ``..``; or a backslash or NUL in it
    """
    if "\\" in name or "\0" in name:
        fault = "holds a backslash or NUL"
    elif not {"", ".", ".."}.isdisjoint(name.split("/")):
        fault = "is no path inside a folder"
    else:
        return name
    raise _unsafe(name, fault, what, path)


def fits(name: str) -> bool:
    """Whether a name is short enough for a file of that name to be."""
    return len(name.encode("utf-8", "surrogateescape")) <= MAX_NAME_BYTES


def _unsafe(name: str, fault: str, what: str, path: object) -> UnsafeNameError:
    return UnsafeNameError(f"unsafe name: {what} {fault}", path=path, found=repr(name))
