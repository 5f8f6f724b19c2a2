"""Owns where a registry document is read from: a file, a URL, the last copy of it, the bundled one.

Gives bytes and says where they are from; what they mean: ``entries.py``.
"""

from __future__ import annotations

import hashlib
import os
import time
import urllib.parse
import urllib.request
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from ds4q.artifact.errors import Ds4qError
from ds4q.artifact.files import NotRegularError, read_head, write_whole
from ds4q.artifact.places import expanded, home_folder
from ds4q.registry.document import read_whole
from ds4q.registry.errors import RefusedError, SourceError, TransferError
from ds4q.registry.remote import Remote, shown
from ds4q.registry.schema import MAX_DOCUMENT_BYTES, canonical, parse

URL_VARIABLE = "DS4Q_REGISTRY_URL"
NO_FETCH_VARIABLE = "DS4Q_NO_REGISTRY_FETCH"
BUNDLED = "bundled registry"

TIMEOUT_S = 3.5
FRESH_S = 24 * 3600


def local_registry_path() -> Path:
    """The user's own document, laid over the bundled one: where ``registry add`` writes."""
    return home_folder() / "registry.json"


def configured() -> str | None:
    """What ``DS4Q_REGISTRY_URL`` names; None where it is unset or fetching is switched off."""
    if os.environ.get(NO_FETCH_VARIABLE) == "1":
        return None
    url = os.environ.get(URL_VARIABLE, "")
    return (url if is_url(url) else expanded(url)) or None


def is_remote(origin: str) -> bool:
    """Whether reading ``origin`` needs a connection."""
    return origin.lower().startswith(("http://", "https://"))


def is_url(origin: str) -> bool:
    """Whether ``origin`` is meant as a URL, and be it a mistyped one: else it is a path."""
    return "://" in origin or origin.lower().startswith(("http:", "https:", "file:"))


def words_for(origin: str) -> str:
    """A path or URL for messages: without what may be a secret."""
    return shown(origin) if is_url(origin) else origin


def bundled() -> bytes:
    """The document that this version of ds4q ships."""
    return resources.files("ds4q.registry").joinpath("registry.json").read_bytes()


def read_file(origin: str) -> bytes:
    """A document at a path or ``file://`` URL, not more than a document may have.

    Raises
    ------
    SourceError : another kind of URL, an empty name, or no regular file there
    OSError : it cannot be read
    """
    try:
        return read_head(_path_of(origin), MAX_DOCUMENT_BYTES + 1)
    except NotRegularError as error:
        raise SourceError(error.rule, path=words_for(origin), found=error.found) from None
    except ValueError:  # a NUL
        raise SourceError("not a file name", path=words_for(origin)) from None


def _path_of(origin: str) -> Path:
    expected = "a path, or a URL of http, https or file"
    if not origin:
        raise SourceError("the name of the registry is empty", expected=expected)
    if not is_url(origin):
        return Path(origin)
    try:
        parts = urllib.parse.urlsplit(origin)
        if parts.scheme == "file" and parts.netloc in ("", "localhost"):
            return Path(urllib.request.url2pathname(parts.path))
    except ValueError:  # it has no parts that could be told
        pass
    raise SourceError("unknown kind of URL", path=words_for(origin), expected=expected)


def download(url: str) -> bytes:
    """A document from a web server, without credentials, in a few seconds or not at all.

    Raises
    ------
    SourceError : no answer in ``TIMEOUT_S``, or another than success
    """
    remedy = "check the URL and the connection, or give a file with --registry"
    try:
        return read_whole(Remote(url, {}), most_bytes=MAX_DOCUMENT_BYTES, within_s=TIMEOUT_S)
    except RefusedError as error:  # it is not a URL
        raise SourceError(error.what, path=shown(url), remedy=error.remedy) from None
    except TransferError as error:
        found = error.what if error.found is None else f"{error.what}: {error.found}"
        raise SourceError(path=shown(url), found=found, remedy=remedy) from None


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


def _digest(url: str) -> str:
    """What tells one URL from another where the whole of it, a secret perhaps, must not stand."""
    return hashlib.sha256(url.encode("utf-8", "surrogateescape")).hexdigest()


def last_copy(url: str) -> Copy | None:
    """The copy of ``url``, if there is one that can be read; what it holds is not checked."""
    try:
        kept = parse(read_file(str(_copy_path())), str(_copy_path()))
    except (OSError, Ds4qError):
        return None
    document, fetched_at = kept.get("registry"), kept.get("fetched_at")
    if kept.get("url_sha256") != _digest(url) or not isinstance(document, dict):
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
    kept = {
        "fetched_at": int(time.time() * 1000),
        "registry": document,
        "url": shown(url),
        "url_sha256": _digest(url),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, canonical(kept), mode=0o600, replace=True)  # in a folder of ds4q's own
