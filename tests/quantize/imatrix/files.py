"""Owns imatrix files built by hand: ours, GGUF and the older format of llama.cpp. No product code.

The small model has 2 layers, 4 experts of which 2 see each token, hidden size 8 and width 4.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from ds4q.quantize.config import Dims

Array = npt.NDArray[Any]

LAYERS, EXPERTS, CHOSEN, HIDDEN, WIDTH, TOTAL = 2, 4, 2, 8, 4, 30
FINGERPRINT = hashlib.sha256(b"checkpoint").hexdigest()
TEXT = hashlib.sha256(b"text").hexdigest()
METADATA = {
    "format": "ds4q.imatrix.v1",
    "source_fingerprint": FINGERPRINT,
    "texts": f'["{TEXT}"]',
    "tokens": str(TOTAL),
    "window_tokens": "16",
}
COUNTS = ((20, 25, 15, 0), (30, 10, 19, 1))
"""Tokens by layer and expert; expert 3 of layer 0 sees none. Either row sums up to 2 x 30."""


def dims(**changes: Any) -> Dims:
    """The sizes of the small model, ``changes`` apart."""
    sizes: dict[str, Any] = {"layers": LAYERS, "experts": EXPERTS}
    sizes |= {"d": HIDDEN, "I": WIDTH, "K": CHOSEN} | changes
    return Dims(
        sizes={key: sizes[key] for key in ("d", "I", "K")},
        layers=sizes["layers"],
        experts=sizes["experts"],
        hash_layers=0,
        ratios=None,
        fp8_block=None,
        lacking=(),
        rope={},
    )


def tensors() -> dict[str, Array]:
    """The tensors of an imatrix of ours, in the order of the file."""
    rng = np.random.default_rng(5)
    found: dict[str, Array] = {}
    for layer, counts in enumerate(COUNTS):
        tokens = np.array(counts, "<i8")
        seen = tokens > 0
        prefix = f"layers.{layer}.ffn.experts"
        found[f"{prefix}.tokens"] = tokens
        found[f"{prefix}.gain"] = (rng.random(EXPERTS) * seen).astype("<f4")
        for part, width in (("gate_up", HIDDEN), ("down", WIDTH)):
            values = rng.random((EXPERTS, width)) * seen[:, None]
            found[f"{prefix}.{part}"] = values.astype("<f4")
    return found


def own(arrays: dict[str, Array], metadata: dict[str, Any] = METADATA, tail: bytes = b"") -> bytes:
    """A safetensors file; ``metadata`` may hold another digest of the data, or None for no key."""
    header: dict[str, Any] = {}
    data = b""
    for name, values in arrays.items():
        header[name] = {
            "dtype": {"<i8": "I64", "<f4": "F32", "<f8": "F64"}[values.dtype.str],
            "shape": list(values.shape),
            "data_offsets": [len(data), len(data) + values.nbytes],
        }
        data += values.tobytes()
    fields = {"tensors_xxh3": xxhash.xxh3_128_hexdigest(data)} | metadata
    fields = {key: value for key, value in fields.items() if value is not None}
    raw = json.dumps({"__metadata__": fields} | header).encode()
    return len(raw).to_bytes(8, "little") + raw + data + tail


def text(value: str | bytes) -> bytes:
    """A GGUF string."""
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def key(name: str, kind: int, value: bytes) -> bytes:
    """A GGUF metadata pair of that value type."""
    return text(name) + struct.pack("<I", kind) + value


KEYS = (
    key("general.type", 8, text("imatrix")),
    key("imatrix.datasets", 9, struct.pack("<IQ", 8, 2) + text("a.txt") + text("b.txt")),
    key("imatrix.chunk_count", 4, struct.pack("<I", 3)),
    key("imatrix.loss", 6, struct.pack("<f", 1.5)),
    key("imatrix.steps", 9, struct.pack("<IQ3H", 2, 3, 1, 2, 3)),
)


def gguf_tensors(shared: bool = False) -> dict[str, Array]:
    """Sums and counts, numpy shapes (the reverse of the file's): per expert, or one row for all."""
    found: dict[str, Array] = {}
    for layer, counts in enumerate(COUNTS):
        for word, part in (("gate", "gate_up"), ("up", "gate_up"), ("down", "down")):
            means = tensors()[f"layers.{layer}.ffn.experts.{part}"]
            rows = np.array(counts, "<f4")[:, None]
            sums = (means * rows).astype("<f4")
            if shared:
                sums, rows = sums.sum(axis=0, keepdims=True), rows.sum(axis=0, keepdims=True)
            found[f"blk.{layer}.ffn_{word}_exps.weight.in_sum2"] = sums
            found[f"blk.{layer}.ffn_{word}_exps.weight.counts"] = rows
    found["blk.0.attn_kv.weight.in_sum2"] = np.ones((1, HIDDEN), "<f4")
    found["blk.0.attn_kv.weight.counts"] = np.ones((1, 1), "<f4")
    return found


def gguf(
    arrays: dict[str, Array],
    keys: Sequence[bytes] = KEYS,
    *,
    version: int = 3,
    alignment: int = 32,
    kind: int = 0,
    tail: bytes = b"",
) -> bytes:
    """A GGUF file, the data of each tensor padded with zeros."""
    front = b"GGUF" + struct.pack("<IQQ", version, len(arrays), len(keys)) + b"".join(keys)
    data = b""
    for name, values in arrays.items():
        shape = values.shape[::-1]
        front += text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        front += struct.pack("<IQ", kind, len(data))
        data += values.tobytes() + bytes(-values.nbytes % alignment)
    return front + bytes(-len(front) % alignment) + data + tail


def legacy_vectors(rows: int = 1) -> dict[str, Array]:
    """Vectors by name, for one row that all experts share or for ``rows`` of them."""
    rng = np.random.default_rng(8)
    return {
        f"blk.{layer}.ffn_{word}_exps.weight": rng.random(rows * n).astype("<f4")
        for layer in range(LAYERS)
        for word, n in (("gate", HIDDEN), ("up", HIDDEN), ("down", WIDTH))
    }


def legacy(entries: Sequence[tuple[str | bytes, int, Array]], tail: bytes = b"") -> bytes:
    """Entries (name, calls, numbers) as llama.cpp's older format has them."""
    out = struct.pack("<i", len(entries))
    for name, calls, values in entries:
        raw = name.encode() if isinstance(name, str) else name
        out += struct.pack("<i", len(raw)) + raw
        out += struct.pack("<ii", calls, len(values)) + values.tobytes()
    return out + tail


def put(folder: Path, data: bytes) -> Path:
    """The bytes as a file."""
    path = folder / "some.imatrix"
    path.write_bytes(data)
    return path
