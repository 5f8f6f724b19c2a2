"""Owns a small trunk of nothing but routed experts under a whole config, quantized in many ways."""

from __future__ import annotations

import json
from pathlib import Path

from tests.quantize import models, routed
from tests.quantize.builders import TINY, config_of

LAYERS, EXPERTS, D = 2, 3, 128
SIZES = {
    "compress_ratios": [0, 4],
    "hidden_size": D,
    "moe_intermediate_size": D,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "num_hash_layers": 1,
    "num_hidden_layers": LAYERS,
}


def write(folder: Path, *, without: tuple[str, ...] = ()) -> Path:
    """The checkpoint; ``without`` are beginnings of names to leave out."""
    routed.write(folder, layers=LAYERS, experts=EXPERTS, rows=D, k=D, down_k=D, without=without)
    (folder / "config.json").write_text(json.dumps(config_of(TINY) | SIZES))
    return folder


def artifact(source: Path, out: Path, recipe: str = "fp4") -> Path:
    """The checkpoint quantized by a named recipe, or by the text of a TOML one."""
    if "=" in recipe:
        file = out.with_suffix(".toml")
        file.write_text(recipe)
        recipe = str(file)
    models.run(source, out, recipe=recipe)
    return out
