"""Owns small checkpoints with real values, and the jobs that tests run over them.

Writes safetensors by itself. ``mini`` has one tensor of every kind, a draft, and scales that lie in
another shard than their weights; one job over it takes milliseconds.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ds4q import api
from ds4q.artifact.types import BF16, F32, HFP4G32
from ds4q.quantize import convert
from ds4q.quantize.job import Summary

Array = npt.NDArray[Any]


class Tensor(NamedTuple):
    """One tensor of a shard: safetensors dtype, shape in the header, the data's bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


Tensors = Mapping[str, Tensor]
CONFIG: dict[str, Any] = {"model_type": "deepseek_v4", "n_routed_experts": 16}


def bf16(values: Array) -> Tensor:
    """Values cut to their upper halves."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16
    return Tensor("BF16", values.shape, bits.astype("<u2").tobytes())


def f32(values: Array) -> Tensor:
    """Values as they are."""
    return Tensor("F32", values.shape, values.astype("<f4").tobytes())


def fp4(codes: Array, scales: Array, name: str) -> dict[str, Tensor]:
    """An expert's weight ``[M, K/2]`` and scale ``[M, K/32]``; ``name`` without the suffix."""
    return {
        f"{name}.weight": Tensor("I8", codes.shape, codes.astype(np.uint8).tobytes()),
        f"{name}.scale": Tensor("F8_E8M0", scales.shape, scales.astype(np.uint8).tobytes()),
    }


def fp8(codes: Array, scales: Array, name: str) -> dict[str, Tensor]:
    """A dense weight ``[M, K]`` with its grid of E8M0 bytes."""
    return {
        f"{name}.weight": Tensor("F8_E4M3", codes.shape, codes.astype(np.uint8).tobytes()),
        f"{name}.scale": Tensor("F8_E8M0", scales.shape, scales.astype(np.uint8).tobytes()),
    }


def random_fp4(rng: np.random.Generator, rows: int, k: int, name: str) -> dict[str, Tensor]:
    """Uniform codes; scales as a trained model has them, no two neighbours equal by a rule."""
    codes = rng.integers(0, 256, (rows, k // 2), dtype=np.uint8)
    return fp4(codes, rng.integers(100, 140, (rows, k // 32), dtype=np.uint8), name)


def random_fp8(rng: np.random.Generator, rows: int, k: int, name: str) -> dict[str, Tensor]:
    """Any code but the two NaNs."""
    codes = rng.integers(0, 256, (rows, k), dtype=np.uint8)
    codes[codes & 127 == 127] = 0x38
    grid = rng.integers(115, 130, (math.ceil(rows / 128), math.ceil(k / 128)), dtype=np.uint8)
    return fp8(codes, grid, name)


def mini_tensors(seed: int = 0) -> dict[str, Tensor]:
    """Part of a model: layer 0 and one DSpark stage, every kind of tensor, some of 96 rows."""
    rng = np.random.default_rng(seed)
    out: dict[str, Tensor] = {}
    for stem in ("layers.0.ffn.experts.0", "layers.0.ffn.experts.10", "mtp.0.ffn.experts.2"):
        out |= random_fp4(rng, 96, 256, f"{stem}.w1")
    out |= random_fp4(rng, 4, 64, "layers.0.ffn.experts.2.w2")
    out |= random_fp8(rng, 200, 320, "layers.0.attn.wq_a")
    out |= random_fp8(rng, 128, 128, "mtp.0.attn.wkv")
    out["layers.0.attn_norm.weight"] = bf16(rng.standard_normal(64))
    out["mtp.0.main_norm.weight"] = bf16(rng.standard_normal(64))
    out["layers.0.ffn.gate.weight"] = bf16(rng.standard_normal((16, 64)))
    out["layers.0.hc_attn_base"] = f32(rng.standard_normal(24))
    ids = rng.integers(0, 16, (32, 2))
    out["layers.0.ffn.gate.tid2eid"] = Tensor("I64", ids.shape, ids.astype("<i8").tobytes())
    return out


EXPERT_CONFIG = CONFIG | {"n_routed_experts": 4}


@functools.cache
def expert_tensors(
    layers: tuple[int, ...] = (0, 3),
    experts: int = 4,
    d: int = 256,
    width: int = 128,
    seed: int = 0,
) -> Tensors:
    """Routed experts of some layers, whole; weights as a trained model has them, no two alike."""
    rng = np.random.default_rng(seed)
    out: dict[str, Tensor] = {}
    for layer in layers:
        for expert in range(experts):
            for w, rows, k in (("w1", width, d), ("w2", d, width), ("w3", width, d)):
                codes, scales = gaussian_fp4(rng, rows, k)
                out |= fp4(codes, scales, f"layers.{layer}.ffn.experts.{expert}.{w}")
    return out


def gaussian_fp4(rng: np.random.Generator, rows: int, k: int) -> tuple[Array, Array]:
    """Codes ``(rows, k/2)`` and scale bytes ``(rows, k/32)`` of heavy-tailed weights."""
    x = rng.standard_t(5, (rows, k // 32, 32)).astype(np.float32) * np.float32(0.03)
    exponent = np.ceil(np.log2(np.abs(x).max(axis=2) / 6 + 1e-30)).astype(np.int64)
    scaled = np.abs(x) / np.exp2(exponent[:, :, None])
    codes = np.searchsorted([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], scaled).astype(np.uint8)
    codes |= np.where(x < 0, 8, 0).astype(np.uint8)
    flat = codes.reshape(rows, k)
    packed = flat[:, 0::2] | flat[:, 1::2] << 4
    return packed, (exponent + 127).astype(np.uint8)


def by_kind(name: str) -> str:
    """Scales apart from weights."""
    return "scales" if name.endswith(".scale") else "weights"


def save(
    folder: Path,
    tensors: Tensors,
    *,
    shard_of: Callable[[str], str] = by_kind,
    config: Mapping[str, Any] | None = None,
    prefix: str = "",
) -> Path:
    """Write ``tensors`` as a checkpoint folder, in their order, with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    shards: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        shards.setdefault(f"model-{shard_of(name)}.safetensors", {})[prefix + name] = tensor
    for file, held in shards.items():
        write_shard(folder / file, held)
    index = {name: file for file, held in shards.items() for name in held}
    total = sum(len(tensor.data) for tensor in tensors.values())
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": index})
    )
    (folder / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    return folder


def write_shard(path: Path, tensors: Tensors) -> None:
    """One safetensors file."""
    header, at = {}, 0
    for name, tensor in tensors.items():
        end = at + len(tensor.data)
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [at, end],
        }
        at = end
    write_raw(path, header, b"".join(tensor.data for tensor in tensors.values()))


def write_raw(path: Path, header: Mapping[str, Any], data: bytes) -> None:
    """One safetensors file with a header of any content."""
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def mini(folder: Path, seed: int = 0) -> Path:
    """The small checkpoint; quantize it with ``allow_partial``."""
    return save(folder, mini_tensors(seed))


def run(source: Path, out: Path, **options: Any) -> Summary:
    """Quantize in this process, without words."""
    quiet: dict[str, Any] = {"allow_partial": True, "warn": lambda text: None}
    return api.quantize(source, out, **(quiet | options))


def digests(folder: Path, stem: str = "") -> dict[str, str]:
    """SHA-256 of every file of ``folder`` whose name begins with ``stem``."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if path.name.startswith(stem)
    }


def warm_up() -> None:
    """Compile what a job needs, in this thread."""
    codes = np.zeros((1, 64), np.uint8)
    rows = convert.Rows("fp4", 0, 1, 128, codes.reshape(-1), np.full(4, 127, np.uint8))
    convert.pack(rows, HFP4G32, np.zeros(HFP4G32.row_bytes(128), np.uint8), lossless=True)
    grid = np.ones((1, 1), np.float32)
    rows = convert.Rows("fp8", 0, 1, 32, codes.reshape(-1)[:32], grid, (128, 128))
    convert.pack(rows, BF16, np.zeros(64, np.uint8), lossless=True)
    rows = convert.Rows("bf16", 0, 1, 32, codes.reshape(-1))
    convert.pack(rows, BF16, np.zeros(64, np.uint8), lossless=True)
    rows = convert.Rows("f32", 0, 1, 16, codes.reshape(-1))
    convert.pack(rows, F32, np.zeros(64, np.uint8), lossless=True)


def digests_below(folder: Path) -> dict[str, str]:
    """SHA-256 of every file in ``folder`` and below."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def mount(*words: object) -> bool:
    """Whether ``mount WORDS`` worked: it takes root, and a machine that lets root do it."""
    try:
        return subprocess.run(["mount", *map(str, words)], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False
