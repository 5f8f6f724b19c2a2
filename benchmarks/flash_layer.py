"""Owns a synthetic checkpoint of true Flash shapes: one layer's experts and the embedding.

Random legal FP4 (codes uniform, scales as a trained model has them), laid out as a re-saved shard:
all scales before all weights. The same seed always writes the same bytes.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np

HIDDEN, WIDTH, VOCAB = 4096, 2048, 129280
CONFIG = {"model_type": "deepseek_v4"}


def _write(path: Path, tensors: list[tuple[str, str, list[int], int]], seed: int) -> None:
    """Write one shard; (name, dtype, shape, bytes) of each tensor, in file order."""
    header, at = {}, 0
    for name, dtype, shape, nbytes in tensors:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    rng = np.random.default_rng(seed)
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for _, dtype, _, nbytes in tensors:
            if dtype == "F8_E8M0":
                block = rng.integers(112, 126, nbytes, dtype=np.uint8)
            elif dtype == "BF16":
                values = rng.standard_normal(nbytes // 2, dtype=np.float32) * np.float32(0.02)
                block = (values.view(np.uint32) >> 16).astype("<u2")
            else:
                block = np.frombuffer(rng.bytes(nbytes), dtype=np.uint8)
            out.write(block.tobytes())


def write(folder: Path, experts: int = 256, embedding: bool = True) -> int:
    """Write the checkpoint into ``folder``; returns its payload bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    shapes = {"w1": (WIDTH, HIDDEN), "w2": (HIDDEN, WIDTH), "w3": (WIDTH, HIDDEN)}
    scales, weights = [], []
    for expert in sorted(map(str, range(experts))):
        for projection, (rows, cols) in shapes.items():
            stem = f"layers.3.ffn.experts.{expert}.{projection}"
            scales.append((f"{stem}.scale", "F8_E8M0", [rows, cols // 32], rows * cols // 32))
            weights.append((f"{stem}.weight", "I8", [rows, cols // 2], rows * cols // 2))
    shards = {"model-00002-of-00002.safetensors": scales + weights}
    embed = [("embed.weight", "BF16", [VOCAB, HIDDEN], VOCAB * HIDDEN * 2)]
    shards["model-00001-of-00002.safetensors"] = embed if embedding else []
    names: dict[str, str] = {}
    for seed, (name, tensors) in enumerate(sorted(shards.items())):
        if tensors:  # a shard that the index does not name is refused
            _write(folder / name, tensors, seed)
        names |= {tensor[0]: name for tensor in tensors}
    total = sum(tensor[3] for tensors in shards.values() for tensor in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return total
