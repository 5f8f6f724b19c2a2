"""Owns a folder as users have it: an artifact with tensors of most types, receipt and registry."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ds4q.registry.add import Wish, add
from ds4q.registry.entries import Registry
from tests.quantize import models

TAG = "deepseek-v4-flash-0731:fp4mix"
RECIPE = """
default = "fp4"
variant_107 = "dual"
[[rule]]
layers = 3
part = "gate-up"
type = "rocmfp2-mix"
[[rule]]
layers = 3
part = "down"
type = "rocmfp3-mix"
[[rule]]
layers = 0
experts = 3
part = "gate-up"
type = "rocmfp2-dual"
"""


def good_folder(folder: Path) -> Path:
    """``folder`` with flash.hfq, its receipt and a registry.json that names it by ``TAG``."""
    folder.mkdir(parents=True)
    source = folder.parent / "source"
    models.save(source, models.expert_tensors(), config=models.EXPERT_CONFIG)
    recipe = folder.parent / "mixed.toml"
    recipe.write_text(RECIPE)
    models.run(source, folder / "flash.hfq", recipe=str(recipe))
    nothing = Registry({}, {}, "", "a test")
    add(nothing, folder / "registry.json", folder / "flash.hfq", Wish(TAG))
    return folder


def put_registry(folder: Path, **changes: Any) -> None:
    """Change keys of the entry ``TAG``; None takes a key away."""
    path = folder / "registry.json"
    document = json.loads(path.read_text())
    entry = document["models"][TAG] | changes
    document["models"][TAG] = {key: value for key, value in entry.items() if value is not None}
    path.write_text(json.dumps(document))
