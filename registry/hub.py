"""Owns what the hub says of a repo: commit, files, sizes, digests, and the token to fetch with.

Fetches no file. ``huggingface_hub`` is imported when the hub is asked, and not before.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ds4q.registry.errors import HubError

ENDPOINT = "https://huggingface.co"
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
                remedy="the registry entry is stale, or names another repo",
            ) from None


def look_up(repo: str, revision: str | None) -> HubRepo:
    """What the hub (``HF_ENDPOINT``, else huggingface.co) has under ``owner/name``.

    ``revision`` is a commit, tag or branch, None for the main branch. The token is the one that
    ``hf`` uses: ``HF_TOKEN``, else that of ``hf auth login``.

    Raises
    ------
    HubError : no such repo or revision, no access, or no answer
    """
    from huggingface_hub import HfApi, get_token, hf_hub_url
    from huggingface_hub.errors import HTTPError

    endpoint = os.environ.get("HF_ENDPOINT", ENDPOINT).rstrip("/")
    try:
        token = get_token()
        info = HfApi(endpoint=endpoint, token=token or False, library_name="ds4q").model_info(
            repo, revision=revision, files_metadata=True
        )
    except (HTTPError, OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        said = str(error).strip().splitlines() or [""]
        raise HubError(path=repo, found=said[0] or type(error).__name__) from error
    if not isinstance(info.sha, str) or not COMMIT.fullmatch(info.sha):
        found = None if info.sha is None else repr(info.sha)
        raise HubError("the hub names no commit of this repo", path=repo, found=found)
    files = {}
    for each in info.siblings or ():
        url = hf_hub_url(repo, each.rfilename, revision=info.sha, endpoint=endpoint)
        sha256 = each.lfs.sha256 if each.lfs else None
        files[each.rfilename] = HubFile(url, each.size, sha256)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return HubRepo(repo, info.sha, files, headers)
