"""Where ds4q keeps files by default, paths as people write them, links that lead nowhere.

Opens nothing.
"""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

from ds4q.artifact.errors import Ds4qError

HOME_VARIABLE = "DS4Q_HOME"
XDG_VARIABLE = "XDG_CACHE_HOME"
_QUOTED = re.compile(
    r"(?s)\$'(?=.*\\(?:x[89a-f]|ud[89a-f]))"
    r"((?:[^\\']|\\[\\']|\\x[89a-f][0-9a-f]|\\ud[89a-f][0-9a-f]{2})*)'"
)
_SURROGATE = re.compile("[\ud800-\udfff]")
_KEPT = ("registry.json", "models")  # in the home folder: what a user would miss


class PlaceError(Ds4qError):
    """A path that begins with ``~``, and no home folder to put in its place."""

    rule = "the home folder is not known"
    cure = f"set HOME, or give the whole path; {HOME_VARIABLE} names the folder of ds4q"


def expanded(path: str) -> str:
    """``path`` with a leading ``~`` or ``~user`` expanded as a shell does.

    A shell leaves ``--output=~/x`` and quoted values of variables as they are. A user that does
    not exist stays as it is written, as in a shell.

    Raises
    ------
    PlaceError : the home folder is not known
    """
    found = os.path.expanduser(path)
    if found.partition("/")[0] == "~":
        raise PlaceError(path=path)
    return found


def home_folder() -> Path:
    """The folder of models, of the user's registry and of what was compiled or downloaded.

    ``DS4Q_HOME``; else ``ds4q`` in ``XDG_CACHE_HOME``; else ``~/.cache/ds4q``. As earlier versions
    ignored ``XDG_CACHE_HOME``, models and a registry in ``~/.cache/ds4q`` stay in use until a
    folder ``ds4q`` is in ``XDG_CACHE_HOME``.

    Raises
    ------
    PlaceError : the home folder is needed and not known
    """
    if home := os.environ.get(HOME_VARIABLE):
        return Path(expanded(home))
    cache = expanded(os.environ.get(XDG_VARIABLE, ""))
    if not os.path.isabs(cache):  # the XDG specification says to ignore such a value
        return Path(expanded("~/.cache/ds4q"))
    folder = Path(cache, "ds4q")
    before = Path(os.path.expanduser("~/.cache/ds4q"))
    kept = any(os.path.lexists(before / name) for name in _KEPT)
    return before if kept and not folder.exists() else folder


def broken_link(path: str | os.PathLike[str]) -> str | None:
    """``broken link to TARGET`` where ``path`` is a symbolic link that leads nowhere, else None."""
    if not os.path.islink(path) or os.path.exists(path):
        return None
    return f"broken link to {os.readlink(path)}"


def reason(error: OSError) -> str:
    """What went wrong, as the system says it; a link that leads nowhere is called a broken link."""
    said = error.strerror or str(error)
    if error.errno != errno.ENOENT or error.filename is None or error.filename2 is not None:
        return said
    return broken_link(os.fsdecode(error.filename)) or said


def to_json(text: str) -> str:
    """``text`` as JSON can carry it: with a byte that is not UTF-8, it is quoted as by a shell.

    The byte ff becomes ``\\xff``, and the whole text ``$'...'``, in which a backslash stands before
    each backslash and apostrophe. A text that looks so already is quoted, too, so ``from_json``
    gives back every text.
    """
    if not _SURROGATE.search(text) and not _QUOTED.fullmatch(text):
        return text
    return f"$'{''.join(map(_quoted, text))}'"


def _quoted(character: str) -> str:
    code = ord(character)
    if character in "\\'":
        return f"\\{character}"
    if 0xDC80 <= code <= 0xDCFF:  # how Python carries a byte that is not UTF-8
        return f"\\x{code - 0xDC00:02x}"
    return f"\\u{code:04x}" if 0xD800 <= code <= 0xDFFF else character


def from_json(text: str) -> str:
    """The text of which ``to_json`` made ``text``."""
    match = _QUOTED.fullmatch(text)
    if match is None:
        return text
    return re.sub(r"\\(x..|u....|.)", _meant, match[1])


def _meant(match: re.Match[str]) -> str:
    said = match[1]
    if len(said) == 1:
        return said
    return chr(int(said[1:], 16) + (0xDC00 if said[0] == "x" else 0))
