"""Owns random artifacts of true Flash shapes: a few layers, whole. Nothing is quantized here.

Names, types, offsets and metadata are what ``ds4q quantize`` plans for a checkpoint of such a
config; payloads are drawn: FP4 codes uniform with scales as a trained model has them, all other
weights gaussian. A large tensor repeats a random tile of rows, shifted, so that writing is fast.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from benchmarks.flash_plan import listing
from ds4q.artifact.formats import codec_for, hfp4g32
from ds4q.artifact.hfq import Reader
from ds4q.artifact.receipt import Receipt, TensorRecord, receipt_path
from ds4q.artifact.types import HFP4G32, TIDI32, TYPES
from ds4q.artifact.writer import PartialFile
from ds4q.quantize.audit import audit
from ds4q.quantize.checkpoint import Checkpoint
from ds4q.quantize.config import check_config
from ds4q.quantize.deepseek4 import Inventory
from ds4q.quantize.plan import Options, Output, PlannedTensor, make_plan
from ds4q.quantize.recipe import find_recipe
from tests.quantize.builders import FLASH, write_model

U8 = npt.NDArray[np.uint8]

TILE_ROWS = 64
EXPERT_SCALES = (114, 121)  # exponent bytes of FP4 blocks
DEVIATION = 0.02  # of gaussian weights


def flash_config(ratios: tuple[int, ...], hash_layers: int = 0) -> dict[str, Any]:
    """The published config, cut to layers of these compress ratios and without a draft."""
    kept = {key: value for key, value in FLASH.items() if not key.startswith("dspark")}
    return kept | {
        "num_hidden_layers": len(ratios),
        "compress_ratios": list(ratios),
        "num_hash_layers": hash_layers,
        "num_nextn_predict_layers": 0,
    }


def write(path: Path, recipe: str, config: Mapping[str, Any]) -> Output:
    """Write a random artifact of ``recipe`` at ``path``; the same config gives the same bytes."""
    with tempfile.TemporaryDirectory() as temporary:
        tensors = listing(Inventory(check_config(dict(config), "config.json")))
        folder = write_model(Path(temporary) / "source", tensors, dict(config))
        with Checkpoint.open(folder) as checkpoint:
            options = Options(find_recipe(recipe))
            plan = make_plan(checkpoint, audit(checkpoint), path, options, "benchmark")
            output = plan.trunk
            file = PartialFile(path, output.layout.file_bytes)
            file.allocate()
            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                jobs = enumerate(output.tensors)
                list(pool.map(lambda job: _fill(file, job[1], job[0], config), jobs))
            file.pwrite(output.layout.front(output.sealed("0" * 64)), 0)
            os.replace(file.path, path)
            file.close()
    return output


def put_receipt(path: Path) -> None:
    """Write the receipt of an artifact of ``write`` beside it, without digests of sources."""
    with Reader(path) as reader:
        ours = reader.metadata["ds4q"]
        records = tuple(
            TensorRecord(
                name,
                TYPES[entry.type_id].name,
                entry.shape,
                entry.nbytes,
                xxhash.xxh3_128(reader.read(name).data).hexdigest(),
                (),
            )
            for name, entry in reader.tensors.items()
        )
        receipt = Receipt(
            file_bytes=reader.file_bytes,
            sha256="0" * 64,
            index_xxh3=reader.index_xxh3,
            metadata_xxh3=reader.metadata_xxh3,
            recipe=ours["recipe"],
            tool_version=ours["tool_version"],
            source_fingerprint=ours["source_fingerprint"],
            source_digest=ours.get("source_digest", "0" * 64),
            partial=False,
            skipped=(),
            tensors=records,
        )
    receipt_path(path).write_bytes(receipt.encode())


def _fill(file: PartialFile, tensor: PlannedTensor, seed: int, config: Mapping[str, Any]) -> None:
    """Write a tensor's payload: its tile again and again, each time cut at another row."""
    rng = np.random.default_rng(seed)
    tile = _tile(tensor, rng, config)
    row_bytes = tensor.row_bytes
    for first in range(0, tensor.rows, len(tile)):
        count = min(len(tile), tensor.rows - first)
        turned = np.roll(tile, int(rng.integers(len(tile))), axis=0)[:count]
        file.pwrite(np.ascontiguousarray(turned), tensor.entry.offset + first * row_bytes)


def _tile(tensor: PlannedTensor, rng: np.random.Generator, config: Mapping[str, Any]) -> U8:
    """Packed rows, ``(rows, row bytes)``."""
    rows, k = min(tensor.rows, TILE_ROWS), tensor.k
    if tensor.target is HFP4G32:
        codes = rng.integers(0, 256, (rows, k // 2), np.uint8)
        return hfp4g32.repack(codes, rng.integers(*EXPERT_SCALES, (rows, k // 32), np.uint8))
    if tensor.target is TIDI32:
        experts = config["n_routed_experts"]
        ids = np.stack([rng.permutation(experts)[:k] for _ in range(rows)])
        return ids.astype("<i4").view(np.uint8).reshape(rows, -1)
    values = rng.standard_normal((rows, k), np.float32) * np.float32(DEVIATION)
    if tensor.unit.name.endswith("norm.weight"):
        values += np.float32(1)
    return codec_for(tensor.target.id).encode(values).reshape(rows, -1)
