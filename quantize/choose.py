"""Owns which recipe a job uses: a name, a file of rules, or a plan for a budget.

What the names mean is ``recipe.py``'s, what rules mean ``rules.py``'s, how a budget is spent
``budget.py``'s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ds4q.quantize.audit import Audit, Unit
from ds4q.quantize.checkpoint import Checkpoint
from ds4q.quantize.errors import JobError
from ds4q.quantize.grid import ExpertDims
from ds4q.quantize.recipe import Recipe, find_recipe
from ds4q.quantize.rules import BUDGET, load_recipe

if TYPE_CHECKING:
    from ds4q.quantize.budget import BudgetPlan
    from ds4q.quantize.imatrix import Imatrix

Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
OPEN_VARIANT = ("rocmfp2", "rocmfp23")  # named recipes that leave the variant to the user


class VariantChoiceError(JobError):
    """A variant of type 107 that the recipe has no room for."""

    rule = "--variant-107 does not fit the recipe"
    cure = f"it is for the recipes {', '.join(OPEN_VARIANT)} and {BUDGET}"


class PerProjectionError(JobError):
    """A plan by layer and projection where nothing is planned."""

    rule = "--per-projection does not fit the recipe"
    cure = f"it is for --recipe {BUDGET}: rules have one type wherever none of them selects experts"


class TargetError(JobError):
    """A size target where none belongs, two of them, or none where one is needed."""

    rule = "size target does not fit the recipe"
    cure = f"give --target-size or --target-bpw with --recipe {BUDGET}, and only there"


@dataclass(frozen=True, slots=True)
class Wish:
    """What the user asked for.

    ``recipe`` is a name or the path of a ``.toml`` file; ``target_bytes`` is of the whole trunk
    file, ``target_bpw`` in bits per weight of its routed experts. ``per_projection`` has a budget
    give all experts of a layer one type for gate and up, and one for down.
    """

    recipe: str
    variant_107: str | None = None
    target_bytes: int | None = None
    target_bpw: float | None = None
    per_projection: bool = False

    @property
    def is_file(self) -> bool:
        """Whether the recipe is a file of rules."""
        return self.recipe.endswith(".toml")

    def check(self) -> None:
        """Refuse what the words alone show to be wrong, before any file is opened."""
        given = (self.target_bytes is not None) + (self.target_bpw is not None)
        if given != (self.recipe == BUDGET):
            count = ("no target", "one target", "two targets")[given]
            raise TargetError(found=f"{count} with recipe {self.recipe}")
        if self.target_bpw is not None and not 0 < self.target_bpw < math.inf:
            raise TargetError("not a number of bits per weight", found=self.target_bpw, remedy="")
        if self.recipe == BUDGET:
            return
        if self.per_projection:
            raise PerProjectionError(found=f"recipe {self.recipe}")
        if self.is_file:
            if self.variant_107 is not None:
                found = f"{self.variant_107} with {self.recipe}"
                remedy = "name the variant in the file: its words for type 107 are variants"
                raise VariantChoiceError(found=found, remedy=remedy)
            return
        known = find_recipe(self.recipe)
        if self.variant_107 is not None and self.recipe not in OPEN_VARIANT:
            found = f"{self.variant_107} with recipe {known.name}"
            raise VariantChoiceError(found=found)


@dataclass(frozen=True, slots=True)
class Choice:
    """The recipe of a job, and the plan that made it where a budget was given."""

    recipe: Recipe
    budget: BudgetPlan | None = None


def choose(
    wish: Wish,
    checkpoint: Checkpoint,
    audit: Audit,
    imatrix: Imatrix | None,
    *,
    units: Callable[[], Iterable[Unit]],
    file_bytes: Callable[[Recipe], int],
    threads: int,
    progress: Progress,
) -> Choice:
    """Find, load or compute the recipe.

    Parameters
    ----------
    units : tensors that go into the trunk, for whoever spends a budget on them
    file_bytes : length of the trunk file that a recipe leads to

    Raises
    ------
    JobError : an unknown name, a file that is no recipe, options that do not fit each other, a
        budget that no choice of types can keep
    """
    wish.check()
    if wish.recipe == BUDGET:
        from ds4q.quantize.budget import plan_budget

        planned = plan_budget(
            checkpoint,
            audit,
            imatrix=imatrix,
            variant_107=wish.variant_107,
            target_bpw=wish.target_bpw,
            target_bytes=wish.target_bytes,
            file_bytes=file_bytes,
            threads=threads,
            progress=progress,
            units=units(),
            per_projection=wish.per_projection,
        )
        return Choice(planned.recipe, planned)
    if wish.is_file:
        counts = None if imatrix is None else imatrix.tokens
        return Choice(load_recipe(Path(wish.recipe), ExpertDims.of(audit), counts))
    recipe = find_recipe(wish.recipe)
    if wish.variant_107 is not None:
        recipe = replace(recipe, variant_107=wish.variant_107)
    return Choice(recipe)
