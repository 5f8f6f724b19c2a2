"""Owns turning a checkpoint folder under ``tests/data`` into an HFQ file, without ``quantize``.

A second, independent way from checkpoint to artifact: what the runtime's tests load does not depend
on the room that they do not test.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from ds4q.artifact.formats import codec_for
from ds4q.artifact.formats.hfp4g32 import repack
from ds4q.artifact.hfq import ARCH_DEEPSEEK4, Reader
from ds4q.artifact.numeric import E4M3, E8M0, bf16_to_f32
from ds4q.artifact.receipt import Receipt, TensorRecord, receipt_path
from ds4q.artifact.types import BF16, F16, F32, HFP4G32, TIDI32, TYPES, TensorType
from ds4q.artifact.writer import TensorSpec, layout

DATA = Path(__file__).parents[1] / "data"
Array = npt.NDArray[Any]
Packed = tuple[TensorType, tuple[int, ...], Array]  # type, logical shape, payload

_DTYPES = {
    "F32": "<f4",
    "BF16": "<u2",
    "I64": "<i8",
    "I8": "u1",
    "F8_E4M3": "u1",
    "F8_E8M0": "u1",
}


def read_checkpoint(folder: Path) -> Iterator[tuple[str, str, Array]]:
    """(name, dtype, raw values) of every tensor of the folder's shards."""
    for shard in sorted(folder.glob("*.safetensors")):
        raw = shard.read_bytes()
        start = 8 + int.from_bytes(raw[:8], "little")
        for name, info in json.loads(raw[8:start]).items():
            if name == "__metadata__":
                continue
            low, high = info["data_offsets"]
            values = np.frombuffer(raw[start + low : start + high], _DTYPES[info["dtype"]])
            yield name, info["dtype"], values.reshape(info["shape"])


def pack(folder: Path, dense: TensorType | None = None) -> dict[str, Packed]:
    """The backbone's tensors as an artifact holds them.

    ``dense`` None keeps every value exact (FP8 as BF16); a type re-encodes the dense matrices, and
    F16 takes the rest, as in hipfire's recipes.
    """
    tensors = {name: (dtype, raw) for name, dtype, raw in read_checkpoint(folder)}
    packed: dict[str, Packed] = {}
    for name, (dtype, raw) in tensors.items():
        if name.startswith("mtp.") or name.endswith(".scale"):
            continue
        if dtype == "I8":
            rows, cols = raw.shape
            scales = tensors[name.removesuffix("weight") + "scale"][1]
            packed[name] = (HFP4G32, (rows, 2 * cols), repack(raw, scales).reshape(-1))
        elif dtype == "I64":
            packed[name] = (TIDI32, raw.shape, codec_for(TIDI32.id).encode(raw))
        else:
            kind, values = F32, raw
            if dtype == "F8_E4M3":
                scale = E8M0[tensors[name.removesuffix("weight") + "scale"][1]]
                spread = scale.repeat(128, axis=0).repeat(128, axis=1)
                kind, values = BF16, E4M3[raw] * spread[: raw.shape[0], : raw.shape[1]]
            elif dtype == "BF16":
                kind, values = BF16, bf16_to_f32(raw)
            if dense is not None:
                kind = dense if values.ndim == 2 and name.endswith(".weight") else F16
            packed[name] = (kind, values.shape, codec_for(kind.id).encode(values))
    return packed


def write(path: Path, config: dict[str, Any], tensors: dict[str, Packed], **metadata: Any) -> Path:
    """Write ``tensors``, sorted by name, as an HFQ file with ``config`` in its metadata."""
    front = json.dumps({"config": config} | metadata, sort_keys=True).encode()
    names = sorted(tensors)
    specs = [TensorSpec(name, tensors[name][0].id, tensors[name][1]) for name in names]
    plan = layout(specs, len(front), arch_id=ARCH_DEEPSEEK4)
    payloads = b"".join(tensors[name][2].tobytes() for name in names)
    path.write_bytes(plan.front(front) + payloads)
    return path


def config_of(folder: Path) -> dict[str, Any]:
    """The folder's config.json."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def put_receipt(path: Path) -> Path:
    """A receipt of the artifact as it is now, beside it; its digests of sources are made up."""
    with Reader(path) as reader:
        ours = reader.metadata.get("ds4q", {})
        receipt = Receipt(
            file_bytes=reader.file_bytes,
            sha256="5" * 64,
            index_xxh3=reader.index_xxh3,
            metadata_xxh3=reader.metadata_xxh3,
            recipe=ours.get("recipe", "fp4"),
            tool_version=ours.get("tool_version", "0"),
            source_fingerprint=ours.get("source_fingerprint", "7" * 64),
            source_digest=ours.get("source_digest", "8" * 64),
            partial=False,
            skipped=(),
            tensors=tuple(
                TensorRecord(
                    name,
                    TYPES[entry.type_id].name,
                    entry.shape,
                    entry.nbytes,
                    xxhash.xxh3_128(reader.read(name).data).hexdigest(),
                    (),
                )
                for name, entry in reader.tensors.items()
            ),
        )
    receipt_path(path).write_bytes(receipt.encode())
    return path
