"""Owns what the page's live view is told: state, rates, queue, caches, the expert map."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ds4q.runtime.serve.metrics import PHASES
from ds4q.runtime.serve.refusal import Refusal
from ds4q.runtime.serve.respond import Object
from ds4q.runtime.serve.serving import Serving

EFFORTS = ("low", "high", "max")
_TOTALS = {
    "hits": ("hits", "warm_hits", "prefetched"),
    "misses": ("misses",),
    "compulsory": ("compulsory",),
    "evictions": ("evictions",),
    "bytes": ("bytes",),
}


def live(serving: Serving, about: Mapping[str, str], began: float, *, with_map: bool) -> Object:
    """The document of ``/live``.

    Parameters
    ----------
    about : ``device`` and ``kv_type`` in words
    began : when the server did, by ``time.monotonic``
    with_map : with how often each expert was chosen, and which are in memory
    """
    service = serving.service
    scheduler, engine = service.scheduler, service.engine
    state, error = service.condition()
    stats = None if scheduler is None else scheduler.stats()
    return {
        "state": state,
        "error": None if error is None else Refusal.of(error).message,
        "progress": list(service.progress),
        "model": serving.model_name,
        "uptime_s": round(time.monotonic() - began, 3),
        "device": about.get("device"),
        "kv_type": about.get("kv_type"),
        "max_context": serving.max_context,
        "default_max_tokens": serving.limits.default_max_tokens,
        "sampling": serving.sampling,
        "efforts": _efforts(serving),
        "running": stats.running if stats else 0,
        "waiting": stats.waiting if stats else 0,
        "tokens_per_s": stats.tokens_per_s if stats else 0.0,
        "prompt_tokens": stats.prompt_tokens if stats else 0,
        "cached_tokens": stats.cached_tokens if stats else 0,
        "completion_tokens": stats.completion_tokens if stats else 0,
        "prefix": asdict(stats.prefix) if stats else None,
        "experts": None if engine is None else _experts(engine, with_map=with_map),
    }


def _efforts(serving: Serving) -> list[str]:
    known = {} if serving.encoding is None else serving.encoding.efforts
    return [each for each in EFFORTS if each == "low" or each in known]


def _experts(engine: Any, *, with_map: bool) -> Object | None:
    """Totals of the expert cache over both phases, and the map; None where there is neither."""
    counters = engine.cache_counters()
    view = engine.experts_view() if with_map else None
    if counters is None and view is None:
        return None
    told: Object = {}
    if counters is not None:
        told["slots"] = counters["slots"]
        for name, keys in _TOTALS.items():
            told[name] = sum(counters[phase][key] for phase in PHASES for key in keys)
    if view is not None:
        layers, experts = view.routed.shape
        told |= {
            "layers": layers,
            "experts": experts,
            "routed": view.routed.tolist(),
            "resident": view.resident.astype(int).tolist(),
        }
    return told
