"""Artifacts with re-encoded experts against a twin whose experts are the decoded float32 values."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ds4q import api
from ds4q.artifact.codings import Codings
from ds4q.artifact.formats import codec_for
from ds4q.artifact.hfq import Reader
from ds4q.artifact.types import F32, RAW, ROCMFPX, TYPES
from ds4q.runtime.engine import Engine
from ds4q.runtime.gates import Fidelity
from ds4q.runtime.generate import generate
from ds4q.runtime.sampling import Sampler
from tests.runtime.artifacts import DATA, Packed, write

SOURCE = DATA / "ds4-tiny"
MARGIN = 0.01  # of greedy logits, below which float32 orders may pick another token
TOLERANCE = 2e-3


def twin(path: Path, out: Path) -> Path:
    """The artifact with every re-encoded expert decoded to F32: no table or scale is left."""
    tensors: dict[str, Packed] = {}
    with Reader(path) as reader:
        codings = Codings.of(reader)
        for entry in reader.tensors.values():
            kind, payload = TYPES[entry.type_id], reader.read(entry.name)
            if kind is RAW:
                continue
            if kind in ROCMFPX:
                values = codings.codec(entry).decode(payload, entry.shape)
                kind, payload = F32, codec_for(F32.id).encode(values)
            tensors[entry.name] = kind, entry.shape, payload
        metadata = {k: v for k, v in reader.metadata.items() if k not in ("ds4q", "rocmfpx")}
    config = metadata.pop("config")
    for key in ("hipfire_quant_recipe", "hipfire_recipe_census"):
        del metadata[key]
    return write(out, config, tensors, **metadata)


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("budget", {"target_bpw": 3.0}),
        ("mix", {}),
        pytest.param("rocmfp2-sign", {}, marks=pytest.mark.slow),
        pytest.param("rocmfp2-affine", {}, marks=pytest.mark.slow),
        pytest.param("rocmfp6-neg32", {}, marks=pytest.mark.slow),
    ],
)
def test_ids_are_those_of_a_float32_reference(
    recipe: str, options: dict[str, float], tmp_path: Path
) -> None:
    path = tmp_path / "x.hfq"
    api.quantize(SOURCE, path, recipe=recipe, threads=2, **options)  # type: ignore[arg-type]
    ours = Engine.load(path, threads=2)
    reference = Engine.load(twin(path, tmp_path / "f32.hfq"), threads=1)
    expected = json.loads((SOURCE / "expected.json").read_text())
    prompts = [item["prompt"] for name, item in expected.items() if not name.startswith("_")]
    assert len(prompts) >= 5
    steps = 0
    for prompt in prompts:
        found, wanted = (
            generate(
                engine,
                prompt,
                max_tokens=24,
                context_tokens=512,
                sampler=Sampler(temperature=0, top_p=1, seed=0),
                stop_ids=[257],
            )
            for engine in (ours, reference)
        )
        list(found)
        list(wanted)
        logits = reference.forward(reference.new_state(), [*prompt, *wanted.ids][:-1], "all")[
            len(prompt) - 1 :
        ]
        best = np.sort(logits, axis=1)
        margins = best[:, -1] - best[:, -2]
        sure = len(margins) if (margins > MARGIN).all() else int(np.argmax(margins <= MARGIN))
        assert found.ids[:sure] == wanted.ids[:sure]
        steps += sure
        own = ours.forward(ours.new_state(), [*prompt, *wanted.ids][:-1], "all")
        assert np.abs(own[len(prompt) - 1 :] - logits).max() < TOLERANCE
    assert steps > 100  # most steps are sure


@pytest.mark.slow
def test_a_budget_of_three_bits_copies_every_identifier(
    tiny_artifact: Path, tmp_path: Path
) -> None:
    """Type 107 is read as ``dual``; the planner itself takes ``sign``, which misses a near tie."""
    imatrix, path = tmp_path / "tiny.imatrix", tmp_path / "x.hfq"
    text = DATA / "text" / "calibration.txt"
    api.calibrate(tiny_artifact, [text], imatrix, limit_tokens=65_536, threads=2)
    api.quantize(
        SOURCE,
        path,
        recipe="budget",
        target_bpw=3.0,
        variant_107="dual",
        imatrix=imatrix,
        threads=2,
    )
    report = api.verify(path, gates=[Fidelity(tiny_artifact, fast=True)], threads=2)
    figures = next(check for check in report.checks if check.name == "fidelity").figures
    assert (figures["exact"], figures["of"]) == (20, 20)
