"""What a server tells of itself: metrics, the live view, and the page's files."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ds4q.runtime.errors import RunError
from ds4q.runtime.serve import page
from ds4q.runtime.serve.documents import Health, Live
from tests.runtime.serve.scripted import ScriptedEngine
from tests.runtime.serve.served import MODEL, PATIENCE_S, Served, serving

CHAT = "/v1/chat/completions"

PHASE = {
    "accesses": 48,
    "distinct": 36,
    "hits": 5,
    "warm_hits": 2,
    "prefetched": 1,
    "compulsory": 20,
    "misses": 8,
    "evictions": 7,
    "bytes": 1000,
    "wait_s": 0.25,
}
COUNTERS: Mapping[str, Any] = {
    "prefill": PHASE,
    "decode": {**PHASE, "hits": 30, "misses": 1},
    "prefetch": {"issued": 4, "used": 3, "bytes": 400},
    "slots": 6,
    "reads": {
        "prefill_read_p50_us": 100,
        "prefill_read_p99_us": 2000,
        "decode_read_p50_us": 50,
        "decode_read_p99_us": 500,
    },
}


class PagedEngine(ScriptedEngine):
    """One whose experts are paged."""

    def cache_counters(self) -> dict[str, Any]:
        return dict(COUNTERS)

    def experts_view(self) -> Any:
        return SimpleNamespace(
            routed=np.array([[3, 0, 1], [0, 2, 0]], np.int64),
            resident=np.array([[True, False, False], [False, True, True]]),
        )


@pytest.fixture(scope="module")
def paged() -> Iterator[Served]:
    about = {"device": "a GPU", "kv_type": "f16"}
    with serving(PagedEngine(default=b"abc"), about=about) as served:
        yield served


def scrape(served: Served) -> dict[tuple[str, str], float]:
    """Value by (name, labels) of what Prometheus would read."""
    response = served.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    return {
        (sample.name, ",".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def test_requests_tokens_and_times_are_counted(served: Served) -> None:
    before = scrape(served)
    served.script("abc")
    served.chat("count me")
    served.chat("count me", stream=True)
    served.chat(max_tokens=0)
    after = scrape(served)

    def more(name: str, labels: str = "") -> float:
        return after[name, labels] - before.get((name, labels), 0)

    endpoint = "/v1/chat/completions"
    assert more("ds4q_requests_total", f"{endpoint},stop") == 2
    assert more("ds4q_requests_total", f"{endpoint},refused_400") == 1
    assert more("ds4q_prompt_tokens_total") == 24
    assert more("ds4q_cached_tokens_total") == 11
    assert more("ds4q_completion_tokens_total") == 8
    assert more("ds4q_time_to_first_token_seconds_count") == 2
    assert more("ds4q_time_per_token_seconds_count") == 2
    assert more("ds4q_prefix_cache_hits_total") == 1
    assert after["ds4q_prefix_cache_limit_bytes", ""] == 1 << 20
    assert after["ds4q_requests_running", ""] == after["ds4q_requests_waiting", ""] == 0
    assert after["ds4q_state", "ready"] == 1
    assert after["ds4q_state", "loading"] == 0


def test_a_failure_of_the_model_is_failed_whole_and_as_a_stream(served: Served) -> None:
    before = requests(served)
    served.script("abcdef")
    served.engine.fails = lambda ids: RunError("broken") if ids[-1:] == [99] else None
    try:
        assert served.chat().status_code == 500
        assert "RunError" in served.chat(stream=True).text
    finally:
        served.engine.fails = lambda ids: None
    assert requests(served) - before == Counter(failed=2)


def test_a_client_that_leaves_inside_its_body_has_cancelled(served: Served) -> None:
    before = requests(served)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{{"
    with socket.create_connection(served.address, timeout=PATIENCE_S) as connection:
        connection.sendall(head.encode())
    for _ in range(int(PATIENCE_S / 0.01)):
        if more := requests(served) - before:
            break
        threading.Event().wait(0.01)
    assert more == Counter(cancelled=1)


def requests(served: Served) -> Counter[str]:
    """Chats so far by outcome."""
    return Counter(
        {
            labels.removeprefix(f"{CHAT},"): int(value)
            for (name, labels), value in scrape(served).items()
            if name == "ds4q_requests_total" and labels.startswith(CHAT)
        }
    )


def test_paths_that_are_none_do_not_become_labels(served: Served) -> None:
    served.http.get("/v1/guess-1")
    served.http.get("/guess-2")
    labels = {labels for name, labels in scrape(served) if name == "ds4q_requests_total"}
    assert "other,refused_404" in labels
    assert not any("guess" in each for each in labels)


def test_the_expert_cache_is_told_by_phase(paged: Served) -> None:
    found = scrape(paged)
    for phase in ("prefill", "decode"):
        for name, key in {
            "accesses": "accesses",
            "requests": "distinct",
            "hits": "hits",
            "warm_hits": "warm_hits",
            "prefetched": "prefetched",
            "compulsory_misses": "compulsory",
            "misses": "misses",
            "evictions": "evictions",
            "read_bytes": "bytes",
            "wait_seconds": "wait_s",
        }.items():
            assert found[f"ds4q_expert_cache_{name}_total", phase] == COUNTERS[phase][key]
    assert found["ds4q_expert_read_latency_seconds", "decode,0.5"] == 50e-6
    assert found["ds4q_expert_read_latency_seconds", "prefill,0.99"] == 2e-3
    assert found["ds4q_expert_prefetch_used_total", ""] == 3
    assert found["ds4q_expert_cache_slots", ""] == 6


def test_without_a_cache_there_are_no_metrics_of_one(served: Served) -> None:
    assert not any("expert" in name for name, _ in scrape(served))


def test_the_live_view_has_rates_and_the_expert_map(paged: Served) -> None:
    paged.chat("live")
    told = paged.http.get("/live").json()
    Live.model_validate(told)
    assert (told["state"], told["model"]) == ("ready", MODEL)
    assert (told["device"], told["kv_type"], told["max_context"]) == ("a GPU", "f16", 4096)
    assert told["sampling"] == {"temperature": 0, "top_p": 1}
    assert told["efforts"] == ["low"]
    assert told["completion_tokens"] >= 4
    assert told["tokens_per_s"] > 0
    assert set(told["prefix"]) >= {"bytes", "limit_bytes", "entries", "hits", "queries"}
    assert told["experts"] == {
        "layers": 2,
        "experts": 3,
        "routed": [[3, 0, 1], [0, 2, 0]],
        "resident": [[1, 0, 0], [0, 1, 1]],
        "slots": 6,
        "hits": 5 + 30 + 2 * 3,
        "misses": 8 + 1,
        "compulsory": 40,
        "evictions": 14,
        "bytes": 2000,
    }


def test_the_live_view_can_leave_the_map_out(paged: Served) -> None:
    experts = paged.http.get("/live?experts=0").json()["experts"]
    assert experts["slots"] == 6
    assert "routed" not in experts


def test_the_live_view_without_a_cache(served: Served) -> None:
    assert served.http.get("/live").json()["experts"] is None


@pytest.mark.parametrize("path", ["/", "/health"])
def test_head_is_answered_as_get_without_a_body(served: Served, path: str) -> None:
    got = served.http.get(path)
    raw = served.raw(
        f"HEAD {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
    )
    head, _, body = raw.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert f"content-type: {got.headers['content-type']}".encode() in head.lower()
    assert f"content-length: {len(got.content)}".encode() in head.lower()
    assert body == b""


def test_health_is_what_the_document_says(served: Served) -> None:
    response = served.http.get("/health")
    assert response.status_code == 200
    Health.model_validate(response.json())
    assert response.json()["status"] == "ready"


@pytest.mark.parametrize("name", list(page.FILES))
def test_the_page_s_files_are_served_with_their_policy(served: Served, name: str) -> None:
    for path in (f"/page/{name}", "/") if name == "index.html" else (f"/page/{name}",):
        response = served.http.get(path)
        assert response.status_code == 200
        assert response.content == page.read(name)
        assert response.headers["content-type"] == page.FILES[name]
        for header, value in page.HEADERS.items():
            assert response.headers[header] == value
