"""What the hub says of a repo, asked of a small hub of our own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ds4q.registry.errors import HubError
from ds4q.registry.hub import look_up
from tests.checks import check_refused
from tests.registry.hubs import COMMIT, REPO, hub_page
from tests.registry.server import Request, Server, serving


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server that the environment names as the hub, with a token for it."""
    (tmp_path / "hub").mkdir()
    with serving(tmp_path / "hub") as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url("").rstrip("/"))
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        yield server


def asked(hub: Server) -> list[Request]:
    """Requests about the repo; the library may have asked other things."""
    return [request for request in hub.requests if request.path.startswith("/api/models")]


def test_commit_sizes_digests_and_urls_come_from_the_hub(hub: Server) -> None:
    files = {"a b.fp4": (12, "a" * 64), "README.md": (5, None)}
    hub.pages[f"/api/models/{REPO}"] = hub_page(files)
    repo = look_up(REPO, None)
    assert repo.commit == COMMIT
    assert repo.headers == {"Authorization": "Bearer hf_secret"}
    there = repo.file("a b.fp4")
    assert (there.size_bytes, there.sha256) == (12, "a" * 64)
    assert there.url == hub.url(f"{REPO}/resolve/{COMMIT}/a%20b.fp4")
    assert repo.file("README.md").sha256 is None
    assert asked(hub)[0].headers["authorization"] == "Bearer hf_secret"


def test_a_revision_is_asked_for(hub: Server) -> None:
    hub.pages[f"/api/models/{REPO}/revision/v1.0"] = hub_page({})
    assert look_up(REPO, "v1.0").commit == COMMIT


def test_no_token_is_sent_where_there_is_none(hub: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    hub.pages[f"/api/models/{REPO}"] = hub_page({})
    assert look_up(REPO, None).headers == {}
    assert "authorization" not in asked(hub)[0].headers


def test_a_file_that_a_commit_lacks(hub: Server) -> None:
    hub.pages[f"/api/models/{REPO}"] = hub_page({"a.fp4": (1, None)})
    repo = look_up(REPO, None)
    check_refused(HubError, lambda: repo.file("A.fp4"), path=REPO, says=["A.fp4", COMMIT])


def answer(status: int, body: bytes, **headers: str) -> Any:
    def page(request: Request) -> tuple[int, dict[str, str], bytes]:
        return status, headers, body

    return page


@pytest.mark.parametrize(
    ("status", "body", "code"),
    [
        (404, b'{"error": "Repository not found"}', "RepoNotFound"),
        (401, b'{"error": "Invalid username or password."}', ""),
        (403, b'{"error": "gated"}', "GatedRepo"),
        (200, b"<html>a portal</html>", ""),
        (200, b"[]", ""),
        (200, b'{"id": "owner/name"}', ""),
        (200, b'{"sha": "%s", "siblings": [{"rfilename": 5}]}' % (b"a" * 40), ""),
        (200, b"[" * 100_000, ""),
        (200, b'{"a":' * 5000 + b"1" + b"}" * 5000, ""),
    ],
)
def test_an_answer_without_the_repo_is_one_line(
    status: int, body: bytes, code: str, hub: Server
) -> None:
    headers = {"X-Error-Code": code} if code else {}
    hub.pages[f"/api/models/{REPO}"] = answer(status, body, **headers)
    error = check_refused(HubError, lambda: look_up(REPO, None), path=REPO)
    assert "hf_secret" not in str(error)


@pytest.mark.parametrize("commit", [None, "", "main", "../../x", COMMIT[:-1], COMMIT.upper(), 5])
def test_what_is_no_commit_is_refused(commit: Any, hub: Server) -> None:
    hub.pages[f"/api/models/{REPO}"] = hub_page({}, commit)
    check_refused(HubError, lambda: look_up(REPO, None), path=REPO, says=["names no commit"])


def test_a_hub_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path) as gone:
        monkeypatch.setenv("HF_ENDPOINT", gone.url(""))
    check_refused(HubError, lambda: look_up(REPO, None), path=REPO)


def test_a_repo_of_another_form_is_refused_before_it_is_asked_for(hub: Server) -> None:
    check_refused(HubError, lambda: look_up("owner/name/../../x", None))
    assert asked(hub) == []
