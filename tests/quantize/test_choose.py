"""Which recipe a job uses, and words that do not fit each other."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from ds4q.artifact.types import ROCMFP2, ROCMFP3
from ds4q.quantize.audit import audit
from ds4q.quantize.checkpoint import Checkpoint
from ds4q.quantize.choose import (
    Choice,
    PerProjectionError,
    TargetError,
    VariantChoiceError,
    Wish,
    choose,
)
from ds4q.quantize.errors import JobError
from ds4q.quantize.recipe import RECIPES
from tests.checks import check_refused
from tests.quantize import models

LEGAL = [
    Wish("fp4"),
    Wish("mix2"),
    Wish("rocmfp2", "sign"),
    Wish("rocmfp23", "dual"),
    Wish("some/where.toml"),
    Wish("budget", target_bpw=2.75),
    Wish("budget", "affine", target_bytes=98 * 10**9),
    Wish("budget", target_bpw=2.75, per_projection=True),
]
REFUSED: list[tuple[Wish, type[JobError], str]] = [
    (Wish("budget"), TargetError, "no target with recipe budget"),
    (Wish("budget", None, 10, 3.0), TargetError, "two targets"),
    (Wish("mix", target_bpw=3.0), TargetError, "one target with recipe mix"),
    (Wish("x.toml", target_bytes=5), TargetError, "one target"),
    (Wish("budget", target_bpw=math.nan), TargetError, "not a number of bits"),
    (Wish("budget", target_bpw=math.inf), TargetError, "not a number of bits"),
    (Wish("budget", target_bpw=-1.0), TargetError, "not a number of bits"),
    (Wish("mix", "dual"), VariantChoiceError, "dual with recipe mix"),
    (Wish("rocmfp2-affine", "affine"), VariantChoiceError, "affine with recipe rocmfp2-affine"),
    (Wish("rocmfp2-affine", "dual"), VariantChoiceError, "dual"),
    (Wish("x.toml", "dual"), VariantChoiceError, "name the variant in the file"),
    (Wish("Mix"), JobError, "unknown recipe"),
    (Wish("mix", per_projection=True), PerProjectionError, "found recipe mix; it is for --recipe"),
    (Wish("x.toml", per_projection=True), PerProjectionError, "found recipe x.toml"),
    (Wish("budget", per_projection=True), TargetError, "no target"),
]


@pytest.mark.parametrize("wish", LEGAL)
def test_words_that_fit(wish: Wish) -> None:
    wish.check()


@pytest.mark.parametrize(("wish", "kind", "says"), REFUSED)
def test_words_that_do_not_fit(wish: Wish, kind: type[JobError], says: str) -> None:
    check_refused(kind, wish.check, says=[says])


def chosen(source: Path, wish: Wish) -> Choice:
    def refuse(*arguments: Any) -> Any:
        raise AssertionError("nothing is measured for a named recipe")

    with Checkpoint.open(source, allow_partial=True) as checkpoint:
        audited = audit(checkpoint, allow_partial=True)
        return choose(
            wish,
            checkpoint,
            audited,
            None,
            units=refuse,
            file_bytes=refuse,
            threads=1,
            progress=refuse,
        )


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("choose") / "s"
    return models.save(folder, models.expert_tensors(), config=models.EXPERT_CONFIG)


def test_a_name_is_its_recipe(source: Path) -> None:
    assert chosen(source, Wish("mix")) == Choice(RECIPES["mix"])


def test_a_variant_takes_the_place_of_the_usual_one(source: Path) -> None:
    recipe = chosen(source, Wish("rocmfp23", "sign")).recipe
    assert recipe.variant_of(ROCMFP2) == "sign"
    assert recipe.experts.type_of(0, 0, "gate-up") is ROCMFP2
    assert recipe.experts.type_of(0, 0, "down") is ROCMFP3


def test_a_file_is_read(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text('default = "rocmfp3"\n')
    recipe = chosen(source, Wish(str(path))).recipe
    assert recipe.name == "own"
    assert recipe.experts.type_of(3, 2, "down") is ROCMFP3
