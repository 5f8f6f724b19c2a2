"""Owns what Prometheus is told: counts of requests, times, and the state of what serves them.

Requests are counted here; the scheduler, the prefix cache and the expert cache count for
themselves, and are asked when somebody scrapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from ds4q.runtime.serve.follow import Follower
from ds4q.runtime.serve.service import Service

MEDIA_TYPE = CONTENT_TYPE_LATEST
FIRST_TOKEN_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
TOKEN_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
CLIENT_CLOSED_REQUEST = 499  # nginx's; nobody reads it
STATES = ("loading", "ready", "failed", "draining")
PHASES = ("prefill", "decode")

_EXPERT_COUNTS = {  # of a phase's counters: name of the metric, key, help
    "accesses": ("accesses", "Choices of an expert by a token."),
    "requests": ("distinct", "Distinct experts that a layer asked for."),
    "hits": ("hits", "Experts that were in memory."),
    "warm_hits": ("warm_hits", "Experts that the warm start had brought."),
    "prefetched": ("prefetched", "Experts that had been read ahead."),
    "compulsory_misses": ("compulsory", "Experts read for the first time."),
    "misses": ("misses", "Experts read again after an eviction."),
    "evictions": ("evictions", "Experts that gave way to others."),
    "read_bytes": ("bytes", "Bytes of experts that were read on demand."),
    "wait_seconds": ("wait_s", "Seconds that the model waited for experts."),
}


def outcome_of(status: int) -> str:
    """How a request has ended that was answered with this status and no result."""
    return {500: "failed", CLIENT_CLOSED_REQUEST: "cancelled"}.get(status, f"refused_{status}")


class Metrics:
    """The metrics of one server, in a registry of its own."""

    def __init__(self, service: Service) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "ds4q_requests",
            "Requests, by endpoint and by how they ended: stop, length, tool_calls, cancelled, "
            "failed, or refused with a status.",
            ["endpoint", "outcome"],
            registry=self._registry,
        )
        self._first_token = Histogram(
            "ds4q_time_to_first_token_seconds",
            "From a request's place in the queue to its first token.",
            buckets=FIRST_TOKEN_BUCKETS_S,
            registry=self._registry,
        )
        self._token = Histogram(
            "ds4q_time_per_token_seconds",
            "Mean time between two tokens of an answer.",
            buckets=TOKEN_BUCKETS_S,
            registry=self._registry,
        )
        self._registry.register(_Told(service))

    def count(self, endpoint: str, outcome: str) -> None:
        """Count a request that has ended."""
        self._requests.labels(endpoint, outcome).inc()

    def time(self, follower: Follower) -> None:
        """Take the times of an answer that has ended one way or another."""
        if follower.first_token_s is not None:
            self._first_token.observe(follower.first_token_s)
        if follower.token_s is not None:
            self._token.observe(follower.token_s)

    def text(self) -> bytes:
        """The metrics in Prometheus's text format."""
        return generate_latest(self._registry)


class _Told:
    """What others count, asked at each scrape."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def describe(self) -> Iterable[Metric]:
        """Nothing beforehand: there is no scheduler yet."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """All families, as they stand."""
        state = GaugeMetricFamily("ds4q_state", "1 for the state of the server.", labels=["state"])
        now, _ = self._service.condition()
        for each in STATES:
            state.add_metric([each], float(now == each))
        yield state
        done, total = self._service.progress
        yield _gauge("ds4q_load_bytes", "Bytes of the model that have been read.", done)
        yield _gauge("ds4q_load_bytes_expected", "Bytes of the model that are to be read.", total)
        scheduler, engine = self._service.scheduler, self._service.engine
        if scheduler is not None:
            yield from _of_scheduler(scheduler.stats())
        counters = engine.cache_counters() if engine is not None else None
        if counters is not None:
            yield from _of_experts(counters)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)


def _of_scheduler(stats: Any) -> Iterator[Metric]:
    yield _gauge("ds4q_requests_running", "Requests that the model works on.", stats.running)
    yield _gauge("ds4q_requests_waiting", "Requests in the queue.", stats.waiting)
    yield _counter("ds4q_prompt_tokens", "Tokens of prompts.", stats.prompt_tokens)
    yield _counter(
        "ds4q_cached_tokens", "Tokens of prompts that needed no computing.", stats.cached_tokens
    )
    yield _counter("ds4q_completion_tokens", "Tokens of answers.", stats.completion_tokens)
    prefix = stats.prefix
    yield _gauge("ds4q_prefix_cache_bytes", "Bytes of kept snapshots.", prefix.bytes)
    yield _gauge("ds4q_prefix_cache_limit_bytes", "Bytes that may be kept.", prefix.limit_bytes)
    yield _gauge("ds4q_prefix_cache_entries", "Snapshots that are kept.", prefix.entries)
    yield _counter("ds4q_prefix_cache_queries", "Prompts that were looked up.", prefix.queries)
    yield _counter("ds4q_prefix_cache_hits", "Prompts with a known beginning.", prefix.hits)


def _of_experts(counters: Mapping[str, Any]) -> Iterator[Metric]:
    for name, (key, text) in _EXPERT_COUNTS.items():
        family = CounterMetricFamily(f"ds4q_expert_cache_{name}", text, labels=["phase"])
        for phase in PHASES:
            family.add_metric([phase], counters[phase][key])
        yield family
    ahead = counters["prefetch"]
    yield _counter("ds4q_expert_prefetch_reads", "Experts read ahead.", ahead["issued"])
    yield _counter("ds4q_expert_prefetch_used", "Of those, experts that were used.", ahead["used"])
    yield _counter("ds4q_expert_prefetch_bytes", "Bytes of experts read ahead.", ahead["bytes"])
    yield _gauge("ds4q_expert_cache_slots", "Experts of a layer that fit.", counters["slots"])
    latency = GaugeMetricFamily(
        "ds4q_expert_read_latency_seconds",
        "Time to read one expert, to within 5 %.",
        labels=["phase", "quantile"],
    )
    for phase in PHASES:
        for percent in (50, 99):
            read_us = counters["reads"][f"{phase}_read_p{percent}_us"]
            latency.add_metric([phase, f"{percent / 100:g}"], read_us / 1e6)
    yield latency
