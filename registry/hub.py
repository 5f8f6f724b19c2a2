"""Owns what the hub says of a repo: commit, files, sizes, digests, and the token to fetch with.

Fetches no file. ``huggingface_hub`` finds the token and spells addresses; it is imported when the
hub is asked. The request itself goes through ``remote.py``, which limits its time and size.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from ds4q.artifact.errors import one_line
from ds4q.registry.document import read_whole
from ds4q.registry.errors import HubError, TransferError
from ds4q.registry.remote import Remote

ENDPOINT = "https://huggingface.co"
MAX_ANSWER_BYTES = 32 << 20
TIMEOUT_S = 60.0
COMMIT = re.compile("[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class HubFile:
    """One file of a commit; the digest is None for a small file that git itself holds."""

    url: str
    size_bytes: int | None
    sha256: str | None


@dataclass(frozen=True, slots=True)
class HubRepo:
    """A repo at a commit. ``headers`` (the token) are for the hub's own host only."""

    name: str
    commit: str
    files: Mapping[str, HubFile]
    headers: Mapping[str, str]

    def file(self, name: str) -> HubFile:
        """A file by its exact name; raises ``HubError`` where the commit has none."""
        try:
            return self.files[name]
        except KeyError:
            raise HubError(
                f"{name} is not in this repo at commit {self.commit}",
                path=self.name,
                remedy="look for it in the repo: it was moved, or the entry names another repo",
            ) from None


def look_up(repo: str, revision: str | None) -> HubRepo:
    """What the hub (``HF_ENDPOINT``, else huggingface.co) has under ``owner/name``.

    ``revision`` is a commit, tag or branch, None for the main branch. The token is the one that
    ``hf`` uses: ``HF_TOKEN``, else that of ``hf auth login``.

    Raises
    ------
    HubError : no such repo or revision, no access, or no answer within limits of time and size
    """
    from huggingface_hub import get_token, hf_hub_url
    from huggingface_hub.constants import is_offline_mode
    from huggingface_hub.utils import validate_repo_id

    endpoint = os.environ.get("HF_ENDPOINT", ENDPOINT).rstrip("/")
    try:
        validate_repo_id(repo)
    except ValueError as error:
        raise HubError("not the name of a repo", path=repo, found=one_line(str(error))) from None
    if is_offline_mode():
        remedy = "unset HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE"
        raise HubError("the environment forbids to ask the hub", path=repo, remedy=remedy)
    token = get_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    at = "" if revision is None else f"/revision/{quote(revision, safe='')}"
    try:
        asked = Remote(f"{endpoint}/api/models/{repo}{at}?blobs=true", headers)
        raw = read_whole(asked, most_bytes=MAX_ANSWER_BYTES, within_s=TIMEOUT_S)
    except TransferError as error:
        found = error.what if error.found is None else f"{error.what}: {error.found}"
        raise HubError(path=repo, found=f"{endpoint}: {found}") from None
    if len(raw) > MAX_ANSWER_BYTES:
        found = f"more than {MAX_ANSWER_BYTES >> 20} MiB"
        raise HubError("the hub's answer is too long", path=repo, found=found)
    try:
        document = json.loads(raw)
        commit, siblings = document.get("sha"), document.get("siblings") or []
        known = {_name(each["rfilename"]): each for each in siblings}
        sizes = {name: _size(each.get("size")) for name, each in known.items()}
        digests = {name: _digest(each.get("lfs")) for name, each in known.items()}
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        what = "the hub's answer does not describe a repo"
        raise HubError(what, path=repo, found=type(error).__name__) from None
    if not isinstance(commit, str) or not COMMIT.fullmatch(commit):
        said = None if commit is None else repr(commit)
        raise HubError("the hub names no commit of this repo", path=repo, found=said)
    files = {
        name: HubFile(
            hf_hub_url(repo, name, revision=commit, endpoint=endpoint), sizes[name], digests[name]
        )
        for name in known
        if name.isprintable()
    }
    return HubRepo(repo, commit, files, headers)


def _name(value: Any) -> str:
    if isinstance(value, str):
        return value
    raise ValueError("not a name")


def _size(value: Any) -> int | None:
    if value is None or (type(value) is int and value >= 0):
        return value
    raise ValueError("not a size")


def _digest(value: Any) -> str | None:
    """The digest of a large file; None for one that git itself holds."""
    digest: str | None = None if value is None else value["sha256"]
    if digest is None or re.fullmatch("[0-9a-f]{64}", digest):
        return digest
    raise ValueError("not a digest")
