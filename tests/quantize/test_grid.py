"""The grid of routed experts: sizes from whole and partial checkpoints, words, documents."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ds4q.artifact.types import HFP4G32, ROCMFP2, ROCMFP3
from ds4q.quantize.audit import audit
from ds4q.quantize.checkpoint import Checkpoint
from ds4q.quantize.grid import ExpertDims, TypeGrid, routed
from ds4q.quantize.recipe import EXPERT_TYPES
from tests.quantize import models
from tests.quantize.builders import RANDOM, TINY

WORDS = tuple(EXPERT_TYPES)


@pytest.mark.parametrize(
    ("folder", "expected"),
    [(TINY, ExpertDims(4, 16, 256, 256)), (RANDOM, ExpertDims(6, 16, 256, 128))],
)
def test_sizes_of_whole_checkpoints(folder: Path, expected: ExpertDims) -> None:
    with Checkpoint.open(folder) as checkpoint:
        audited = audit(checkpoint)
        assert ExpertDims.of(audited) == expected
        found = dict(routed(audited.units))
    assert len(found) == expected.layers * expected.experts * 3
    assert found[1, 2, "w2"].name == "layers.1.ffn.experts.2.w2.weight"


def test_a_partial_checkpoint_reaches_as_far_as_its_tensors(tmp_path: Path) -> None:
    with Checkpoint.open(models.mini(tmp_path / "m"), allow_partial=True) as checkpoint:
        audited = audit(checkpoint, allow_partial=True)
        assert ExpertDims.of(audited) == ExpertDims(1, 16, 256, 64)
        assert {place for place, _ in routed(audited.units)} == {
            (0, 0, "w1"),
            (0, 10, "w1"),
            (0, 2, "w2"),
        }


def test_a_grid_tells_types_and_variants() -> None:
    codes = np.zeros((2, 3, 2), np.uint8)
    codes[1, 2] = WORDS.index("rocmfp2-affine"), WORDS.index("rocmfp3")
    grid = TypeGrid(WORDS, codes)
    assert grid.type_of(0, 0, "down") is HFP4G32
    assert grid.type_of(1, 2, "gate-up") is ROCMFP2
    assert grid.type_of(1, 2, "down") is ROCMFP3
    assert grid.variant_107 == "affine"
    assert grid.fp6_code32 == ""
    assert grid.used() == ["fp4", "rocmfp3", "rocmfp2-affine"]


def test_documents_differ_where_types_do_and_only_there() -> None:
    codes = np.full((2, 3, 2), WORDS.index("rocmfp2"), np.uint8)
    grid = TypeGrid(WORDS, codes)
    other_word = TypeGrid(WORDS, np.full_like(codes, WORDS.index("rocmfp2-dual")))
    assert grid.document() == other_word.document()
    changed = codes.copy()
    changed[1, 0, 1] = WORDS.index("rocmfp3")
    swapped = codes.copy()
    swapped[0, 0, 1] = WORDS.index("rocmfp3")
    documents = [TypeGrid(WORDS, c).document() for c in (codes, changed, swapped)]
    documents.append(TypeGrid(WORDS, codes.reshape(3, 2, 2)).document())
    assert len({str(document) for document in documents}) == 4
