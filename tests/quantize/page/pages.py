"""Owns what the tests of the page share: rows, a model of Flash's size, and a reader of HTML."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import numpy as np

from ds4q.artifact import types
from ds4q.artifact.types import TensorType
from ds4q.quantize.measure import ErrorSums

VOID = {"meta", "link", "img", "br", "hr", "input"}
SVG_LEAVES = {"path", "rect"}

Row = dict[str, Any]


def row(name: str, kind: TensorType | str, shape: tuple[int, ...], nbytes: int = 0) -> Row:
    """One tensor as ``ds4q inspect`` lists it."""
    label = kind
    if isinstance(kind, TensorType):
        label, nbytes = kind.name, nbytes or kind.payload_bytes(shape)
    return {"name": name, "type": label, "shape": list(shape), "bytes": nbytes}


def expert(
    layer: int, number: int, gate_up: TensorType, down: TensorType, block: str = "layers"
) -> list[Row]:
    """The three tensors of one expert, 128 x 256."""
    stem = f"{block}.{layer}.ffn.experts.{number}"
    return [
        row(f"{stem}.{w}.weight", kind, shape)
        for w, kind, shape in (
            ("w1", gate_up, (128, 256)),
            ("w2", down, (256, 128)),
            ("w3", gate_up, (128, 256)),
        )
    ]


def sums(error: float, source: float) -> ErrorSums:
    """Sums whose NRMSE is the root of ``error / source``."""
    return ErrorSums(np.array([error, source, source, source - error / 2]))


def document(rows: list[Row], **changes: Any) -> dict[str, Any]:
    """What inspect says of an artifact of ``rows`` whose index takes 4,096 bytes."""
    payload = sum(r["bytes"] for r in rows)
    return {
        "kind": "artifact",
        "path": "/somewhere/model.hfq",
        "bytes": 4096 + payload,
        "version": 1,
        "data_offset": 4096,
        "tensors": len(rows),
        "metadata": {},
    } | changes


def flash() -> tuple[list[Row], dict[str, ErrorSums]]:
    """43 layers of 256 experts, types and errors without any order: the worst case for a page."""
    rng = np.random.default_rng(7)
    kinds = (types.HFP4G32, *types.ROCMFPX)
    rows: list[Row] = []
    errors: dict[str, ErrorSums] = {}
    for layer in range(43):
        for number in range(256):
            gate_up, down = (kinds[i] for i in rng.integers(0, len(kinds), 2))
            held = expert(layer, number, gate_up, down)
            for tensor in held:
                tensor["bytes"] *= 64  # 2048 x 4096
                if tensor["type"] != types.HFP4G32.name:
                    errors[tensor["name"]] = sums(float(rng.uniform(0.001, 0.2)), 1.0)
            rows += held
    return rows, errors


class Page(HTMLParser):
    """A page taken apart; ``ValueError`` where tags do not nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self.feed(text)
        self.close()
        if self.open:
            raise ValueError(f"never closed: {self.open}")

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in SVG_LEAVES:
            raise ValueError(f"<{tag}/> is no empty element of HTML")
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            raise ValueError(f"</{tag}> closes another element")

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        elif not self.open or self.open[-1] != "style":
            self.texts.append(data)

    def text(self) -> str:
        """What a reader sees, in one line."""
        return " ".join(" ".join(self.texts).split())

    def attributes(self, name: str) -> list[str]:
        """Values of one attribute, in order."""
        return [attrs[name] or "" for _, attrs in self.tags if name in attrs]
