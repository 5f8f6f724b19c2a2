"""Owns small checkpoints of nothing but routed experts, and statistics for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ds4q.quantize.audit import Audit, audit
from ds4q.quantize.checkpoint import Checkpoint
from ds4q.quantize.grid import PROJECTIONS
from ds4q.quantize.imatrix import Imatrix, LayerStatistics, read_imatrix, write_imatrix
from tests.quantize import models

LAYERS, EXPERTS, WIDTH, K = 2, 3, 6, 128
TOKENS = 2000


def values(rng: np.random.Generator, rows: int, k: int) -> dict[str, npt.NDArray[np.uint8]]:
    """FP4 of roughly normal weights, with a spread of scales: codes and scale bytes."""
    magnitudes = np.minimum(np.abs(rng.standard_normal((rows, k))) * 2.6, 7.4).astype(np.uint8)
    codes = magnitudes | rng.integers(0, 2, (rows, k), dtype=np.uint8) << 3
    scales = rng.integers(118, 124, (rows, k // 32), dtype=np.uint8)
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    return {"codes": packed.astype(np.uint8), "scales": scales}


def write(
    folder: Path,
    *,
    layers: int = LAYERS,
    experts: int = EXPERTS,
    rows: int = WIDTH,
    k: int = K,
    down_k: int = K,
    seed: int = 0,
    without: tuple[str, ...] = (),
) -> Path:
    """A part of a model; ``without`` are beginnings of names to leave out."""
    rng = np.random.default_rng(seed)
    tensors: dict[str, models.Tensor] = {}
    for layer in range(layers):
        for expert in range(experts):
            for projection in PROJECTIONS:
                stem = f"layers.{layer}.ffn.experts.{expert}.{projection}"
                made = values(rng, rows, down_k if projection == "w2" else k)
                if not stem.startswith(without or ("-",)):
                    tensors |= models.fp4(made["codes"], made["scales"], stem)
    return models.save(folder, tensors, config={"model_type": "deepseek_v4"})


@contextmanager
def opened(folder: Path) -> Iterator[tuple[Checkpoint, Audit]]:
    """The checkpoint and its audit."""
    with Checkpoint.open(folder, allow_partial=True) as checkpoint:
        yield checkpoint, audit(checkpoint, allow_partial=True)


def statistics(
    path: Path, *, layers: int = LAYERS, experts: int = EXPERTS, seed: int = 0
) -> Imatrix:
    """An imatrix with uneven columns, uneven use, and an expert that was never used."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(layers):
        shares = rng.dirichlet(np.full(experts - 1, 4.0))
        tokens = np.append(rng.multinomial(TOKENS, shares), 0)
        used = (tokens > 0).astype(np.float32)
        gain = rng.random(experts, np.float32) * used
        gate_up, down = (
            rng.gamma(0.5, 2, (experts, K)).astype(np.float32) * used[:, None] for _ in range(2)
        )
        found.append(LayerStatistics(tokens, gain, gate_up, down))
    digest = "0" * 64
    write_imatrix(
        path, found, fingerprint=digest, total_tokens=TOKENS, window_tokens=100, texts=[digest]
    )
    return read_imatrix(path, dims=None, fingerprint=None)
