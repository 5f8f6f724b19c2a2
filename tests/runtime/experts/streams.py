"""Owns seeded streams of expert choices, and traces and workloads made of them. Decides nothing.

L layers, T tokens, K experts a token, E experts.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt
import zstandard

from ds4q.artifact.newfile import NewFile
from ds4q.runtime.experts.header import Header
from ds4q.runtime.experts.policy import make_policies, parameters_of
from ds4q.runtime.experts.replay import Asked, Cache, Workload, bands
from ds4q.runtime.experts.store import Phase
from ds4q.runtime.experts.trace import Outcome, Recorder

I64 = npt.NDArray[np.int64]


def header(
    *,
    layers: int = 2,
    experts: int = 16,
    top_k: int = 3,
    slots: int = 5,
    policy: str = "lru",
    warm_start: str = "",
) -> Header:
    """Of an artifact whose experts take 10 bytes each, in slots of 12."""
    return Header(
        artifact="0123456789abcdef" * 2,
        layers=layers,
        hash_layers=1,
        experts=experts,
        owned=(0, experts),
        top_k=top_k,
        hidden=8,
        slots=slots,
        slot_bytes=(12,) * layers,
        expert_bytes=((10,),) * layers,
        policy=policy,
        parameters=parameters_of(policy),
        warm_start=warm_start,
    )


def skewed(seed: int, layers: int, tokens: int, experts: int, k: int) -> I64:
    """[L, T, K]: some experts are chosen more often than others, all the time alike."""
    rng = np.random.default_rng(seed)
    liking = -1.2 * np.log(1 + np.array([rng.permutation(experts) for _ in range(layers)]))
    noise = rng.gumbel(size=(layers, tokens, experts))
    return np.argsort(-(liking[:, None] + noise), axis=-1)[..., :k]


def workload(ids: I64, experts: int) -> Workload:
    """``ids`` [L, T, K] decoded token by token."""
    layers, tokens, k = ids.shape
    steps = tuple(
        Asked(layer, "decode", tuple(ids[layer, token].tolist()), k)
        for token in range(tokens)
        for layer in range(layers)
    )
    made = header(layers=layers, experts=experts, top_k=k)
    return Workload(made, steps, {"prefill": 0, "decode": tokens})


def record(path: Path, ids: I64, made: Header, prompt: int = 0) -> Path:
    """A trace of ``ids`` [L, T, K]; the first ``prompt`` tokens are one batch."""
    layers, tokens, _ = ids.shape
    cache = Cache(make_policies(made.policy, layers, made.slots, made.experts), made.slots)
    recorder = Recorder(NewFile(path), made)
    starts = [*([0] if prompt else []), *range(prompt, tokens)]
    for number, start in enumerate(starts):
        batch = prompt if prompt and start == 0 else 1
        phase: Phase = "prefill" if batch > 1 else "decode"
        for layer in range(layers):
            chosen = ids[layer, start : start + batch]
            distinct = list(dict.fromkeys(chosen.ravel().tolist()))
            for band in bands(distinct, made.slots):
                met, _ = cache.serve(layer, band)
                read = sum(o in (Outcome.COMPULSORY, Outcome.MISS) for o in met)
                recorder.dispatch(
                    number, 0, phase, start, layer, chosen, band, met,
                    nbytes=read * made.bytes_of(layer, 0),
                )  # fmt: skip
    recorder.close()
    return path


def altered(path: Path, records: bytes) -> Path:
    """``path`` with other records, packed as they should be."""
    raw = path.read_bytes()
    (length,) = struct.unpack_from("<I", raw, 4)
    path.write_bytes(raw[: 8 + length] + zstandard.ZstdCompressor().compress(records))
    return path


def end(count: int) -> bytes:
    """The last record of a trace."""
    return struct.pack("<BQ", 0, count)
