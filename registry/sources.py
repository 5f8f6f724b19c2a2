"""Owns where a registry document is read from: a file, a URL, the last copy of it, the bundled one.

Gives bytes and says where they are from; what they mean: ``entries.py``.
"""

from __future__ import annotations

import http.client
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from ds4q.artifact.errors import Ds4qError
from ds4q.registry.errors import SourceError
from ds4q.registry.schema import MAX_DOCUMENT_BYTES, canonical, parse

URL_VARIABLE = "DS4Q_REGISTRY_URL"
NO_FETCH_VARIABLE = "DS4Q_NO_REGISTRY_FETCH"
HOME_VARIABLE = "DS4Q_HOME"
BUNDLED = "bundled registry"

TIMEOUT_S = 3.5
FRESH_S = 24 * 3600
_PIECE_BYTES = 1 << 16


def home_folder() -> Path:
    """Where ds4q keeps what is the user's: ``DS4Q_HOME`` or ~/.cache/ds4q."""
    home = os.environ.get(HOME_VARIABLE)
    return Path(home) if home else Path.home() / ".cache" / "ds4q"


def local_registry_path() -> Path:
    """The user's own document, laid over the bundled one: where ``registry add`` writes."""
    return home_folder() / "registry.json"


def configured() -> str | None:
    """What ``DS4Q_REGISTRY_URL`` names; None where it is unset or fetching is switched off."""
    if os.environ.get(NO_FETCH_VARIABLE) == "1":
        return None
    return os.environ.get(URL_VARIABLE) or None


def is_remote(origin: str) -> bool:
    """Whether reading ``origin`` needs a connection."""
    return origin.lower().startswith(("http://", "https://"))


def bundled() -> bytes:
    """The document that this version of ds4q ships."""
    return resources.files("ds4q.registry").joinpath("registry.json").read_bytes()


def read_file(origin: str) -> bytes:
    """A document at a path or ``file://`` URL, not more than a document may have.

    Raises
    ------
    SourceError : another kind of URL, or no regular file there
    OSError : it cannot be read
    """
    path = Path(origin)
    if "://" in origin:
        parts = urllib.parse.urlsplit(origin)
        if parts.scheme != "file" or parts.netloc not in ("", "localhost"):
            expected = "a path, or a URL of http, https or file"
            raise SourceError("unknown kind of URL", path=origin, expected=expected)
        path = Path(urllib.request.url2pathname(parts.path))
    if "\0" in str(path) or (path.exists() and not path.is_file()):  # a named pipe would hang
        raise SourceError("not a regular file", path=origin)
    with open(path, "rb") as file:
        return file.read(MAX_DOCUMENT_BYTES + 1)


def download(url: str) -> bytes:
    """A document from a web server, without credentials, in a few seconds or not at all.

    Raises
    ------
    SourceError : no answer in ``TIMEOUT_S``, or another than success
    """
    deadline_s = time.monotonic() + TIMEOUT_S
    remedy = "check the URL and the connection, or give a file with --registry"
    try:
        raw = bytearray()
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            while len(raw) <= MAX_DOCUMENT_BYTES and (piece := answer.read1(_PIECE_BYTES)):
                raw += piece
                if time.monotonic() > deadline_s:
                    raise TimeoutError(f"not there after {TIMEOUT_S} s")
            promised = answer.length  # what Content-Length still promises; None without one
    except urllib.error.HTTPError as error:
        with error:  # it holds the connection
            raise SourceError(
                path=url, found=f"{error.code} {error.reason}", remedy=remedy
            ) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        why = getattr(error, "reason", None) or str(error) or type(error).__name__
        raise SourceError(path=url, found=why, remedy=remedy) from None
    if promised and len(raw) <= MAX_DOCUMENT_BYTES:
        found = f"{len(raw)} of {len(raw) + promised} bytes"
        raise SourceError("the answer ends early", path=url, found=found, remedy=remedy)
    return bytes(raw)


@dataclass(frozen=True, slots=True)
class Copy:
    """What was downloaded last from a URL, and when by this machine's clock."""

    document: dict[str, Any]
    fetched_at_s: float

    @property
    def fresh(self) -> bool:
        """Younger than a day; a time in the future is not believed."""
        return 0 <= time.time() - self.fetched_at_s < FRESH_S


def _copy_path() -> Path:
    return home_folder() / "registry.cache.json"


def last_copy(url: str) -> Copy | None:
    """The copy of ``url``, if there is one that can be read; what it holds is not checked."""
    try:
        kept = parse(read_file(str(_copy_path())), str(_copy_path()))
    except (OSError, Ds4qError):
        return None
    document, fetched_at = kept.get("registry"), kept.get("fetched_at")
    if kept.get("url") != url or not isinstance(document, dict):
        return None
    if type(fetched_at) is not int:
        return None
    return Copy(document, fetched_at / 1000)


def keep_copy(url: str, document: dict[str, Any]) -> None:
    """Remember what ``url`` gave, in place of what was remembered before.

    Raises
    ------
    OSError : there is no room, or no permission; the copy before stays
    """
    path = _copy_path()
    kept = {"fetched_at": int(time.time() * 1000), "registry": document, "url": url}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, canonical(kept))


def write_whole(path: Path, text: str) -> None:
    """Put ``text`` at ``path`` at once: readers see what was there before, or all of it.

    Raises
    ------
    OSError : nothing is left behind then
    """
    number = 0
    while True:
        temporary = path.with_name(f".{path.name}.part.{os.getpid()}.{number}")
        try:
            handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            break
        except FileExistsError:
            number += 1
    try:
        with open(handle, "wb") as file:
            file.write(text.encode("utf-8"))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
