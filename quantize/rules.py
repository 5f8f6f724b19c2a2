"""Owns TOML recipes: ordered rules that give each routed expert its types, read and judged.

Writing a plan back as such a recipe is ``ruletext.py``'s. Types are words, never numbers. The first
rule that selects a tensor decides; ``default`` takes what no rule selects::

    default = "rocmfp2-mix"

    [dense]
    recipe = "fp4-q8"

    [[rule]]                       # every selector must agree; one that is absent selects all
    type = "rocmfp3"
    layers = "0-9,42"              # ids: "0-9,42", 7, or a list of such
    part = "down"                  # "gate-up" (w1 and w3) or "down" (w2)
    experts = [0, "4-7"]
    hotness = "0-31"               # rank within the layer, 0 the most used; needs an imatrix
    match = '\\.w2\\.weight$'        # a regular expression, found anywhere in the tensor's name
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from ds4q.artifact.tables import expert_name
from ds4q.artifact.types import ROCMFP2, ROCMFP3_MIX, ROCMFP6, TensorType
from ds4q.quantize.checkpoint import read_text
from ds4q.quantize.errors import JobError
from ds4q.quantize.grid import PROJECTIONS, ExpertDims, TypeGrid
from ds4q.quantize.recipe import DENSE_RECIPES, EXPERT_TYPES, PARTS, RECIPES, Recipe

Counts = Callable[[int], npt.NDArray[np.int64]]  # layer -> tokens that each expert was given
Bools = npt.NDArray[np.bool_]
Owners = npt.NDArray[np.int32]  # (layers, experts, 3): the rule of a tensor, 0 the default

MAX_NAME = 64
BUDGET = "budget"  # the name of planned recipes, kept by the file that repeats one

_TOP_KEYS = ("default", "dense", "description", "name", "rule", "variant_107")
_RULE_KEYS = ("experts", "hotness", "layers", "match", "part", "type")
_RANGE = re.compile(r"([0-9]{1,9})(?:\s*-\s*([0-9]{1,9}))?", re.ASCII)


class RecipeError(JobError):
    """A recipe file that cannot be read, or that does not fit the model."""

    rule = "not a usable recipe"


@dataclass(frozen=True, slots=True)
class _Rule:
    """One rule and where it stands; ``number`` 0 is the default."""

    path: Path
    number: int
    keys: Mapping[str, Any]

    @property
    def title(self) -> str:
        """How messages call it."""
        return f"rule {self.number}" if self.number else "default"

    def fail(self, what: str, **more: Any) -> NoReturn:
        """Refuse the file because of this rule."""
        raise RecipeError(f"{self.title}: {what}", path=self.path, **more)

    @property
    def word(self) -> str:
        """The type that it gives."""
        return str(self.keys["type"])

    @property
    def kind(self) -> TensorType:
        """The type that its word names."""
        return EXPERT_TYPES[self.word][0]


def load_recipe(path: Path, dims: ExpertDims, counts: Counts | None = None) -> Recipe:
    """Read a TOML recipe for a model of ``dims``.

    Parameters
    ----------
    counts : an imatrix's routing counts, which rules with ``hotness`` need

    Raises
    ------
    RecipeError : the file is not TOML, or a rule of it is wrong; names the rule and the remedy
    """
    document = _parse(path)
    rules = _rules(path, document)
    owners = _assign(rules, dims, counts)
    _judge(rules, owners, dims)
    words = tuple(EXPERT_TYPES)
    codes = np.array([words.index(rule.word) for rule in rules], np.uint8)
    grid = TypeGrid(words, codes[owners[:, :, [0, 2]]])
    variant = document.get("variant_107", grid.variant_107)
    if variant != grid.variant_107:
        raise RecipeError(
            "variant_107 is not what the rules say",
            path=path,
            expected=repr(grid.variant_107) if grid.variant_107 else "no such key",
            found=repr(variant),
            remedy="the word of a type names its variant: rocmfp2-affine; leave variant_107 out",
        )
    return Recipe(
        _name(path, document),
        dense=_dense(path, document),
        experts=grid,
        variant_107=grid.variant_107,
        fp6_code32=grid.fp6_code32,
    )


def _parse(path: Path) -> dict[str, Any]:
    raw = read_text(path)
    if raw is None:
        raise RecipeError("no such file", path=path)
    try:
        document = tomllib.loads(raw.decode("utf-8"))
        repr(document)  # TOML's 0xfff... has more digits than a message could quote
    except UnicodeDecodeError as error:
        raise RecipeError("not UTF-8", path=path, found=f"byte {error.start}") from None
    except RecursionError:
        raise RecipeError("nested too deeply", path=path) from None
    except tomllib.TOMLDecodeError as error:
        raise RecipeError("not TOML", path=path, found=str(error)) from None
    except ValueError as error:  # a number of more digits than Python reads or writes
        raise RecipeError("not usable TOML", path=path, found=str(error)) from None
    _known(document, _TOP_KEYS, path, "the recipe")
    for key in ("description", "name", "variant_107"):
        if not isinstance(document.get(key, ""), str):
            raise RecipeError(f"{key} is not text", path=path, found=repr(document[key]))
    return document


def _known(table: Mapping[str, Any], keys: Sequence[str], path: Path, where: str) -> None:
    odd = sorted(table.keys() - set(keys))
    if odd:
        raise RecipeError(
            f"unknown key in {where}", path=path, expected=", ".join(keys), found=repr(odd[0])
        )


def _name(path: Path, document: Mapping[str, Any]) -> str:
    """The file's stem, or what the file calls itself."""
    name: str = document.get("name", path.stem)
    if not name or not name.isprintable() or len(name) > MAX_NAME:
        raise RecipeError(
            "not a name for a recipe",
            path=path,
            expected=f"1 to {MAX_NAME} printable characters",
            found=repr(name),
            remedy='give the recipe a name = "..."',
        )
    if name in RECIPES:
        raise RecipeError(
            f"{name} is the name of a built-in recipe",
            path=path,
            remedy='rename the file, or give the recipe another name = "..."',
        )
    return name


def _dense(path: Path, document: Mapping[str, Any]) -> str:
    table = document.get("dense", {})
    if not isinstance(table, dict):
        raise RecipeError(
            "dense is not a table", path=path, found=repr(table), remedy="write [dense]"
        )
    _known(table, ("recipe",), path, "[dense]")
    word = table.get("recipe", "fp4-q8")
    if not isinstance(word, str) or word not in DENSE_RECIPES:
        raise RecipeError(
            "unknown recipe of dense tensors",
            path=path,
            expected=" or ".join(DENSE_RECIPES),
            found=repr(word),
        )
    return word


def _rules(path: Path, document: Mapping[str, Any]) -> list[_Rule]:
    """The default, then the rules; each with a known type and known keys."""
    if "default" not in document:
        raise RecipeError(
            "no default",
            path=path,
            remedy='add default = "fp4": the type of experts that no rule selects',
        )
    tables = document.get("rule", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise RecipeError(
            "rule is not a list of tables", path=path, remedy="begin each rule with [[rule]]"
        )
    rules = [_Rule(path, 0, {"type": document["default"]})]
    for number, table in enumerate(tables, 1):
        _known(table, _RULE_KEYS, path, f"rule {number}")
        rules.append(_Rule(path, number, table))
        if "type" not in table:
            rules[-1].fail("no type", remedy='add type = "..."', expected=_words())
    for rule in rules:
        word = rule.keys["type"]
        if not isinstance(word, str) or word not in EXPERT_TYPES:
            number_like = isinstance(word, int | float) or str(word).isdecimal()
            what = "types are words, never numbers" if number_like else "unknown type"
            rule.fail(what, expected=_words(), found=repr(word))
    for kind, what in ((ROCMFP2, "variants"), (ROCMFP6, "meanings of code 32")):
        _one_variant(rules, kind, what)
    return rules


def _words() -> str:
    *some, last = EXPERT_TYPES
    return f"{', '.join(some)} or {last}"


def _one_variant(rules: list[_Rule], kind: TensorType, what: str) -> None:
    told = [rule for rule in rules if rule.kind is kind]
    for rule in told[1:]:
        variants = [EXPERT_TYPES[r.word][1] for r in (told[0], rule)]
        if variants[0] != variants[1]:
            rule.fail(
                f"two {what} of {kind.name}",
                expected=f"{variants[0]} as in the {told[0].title}",
                found=variants[1],
                remedy="an artifact has one for all its tensors: use one word throughout",
            )


# ---------------------------------------------------------------- which rule a tensor gets


def _assign(rules: list[_Rule], dims: ExpertDims, counts: Counts | None) -> Owners:
    """The number of the first rule that selects each tensor."""
    if not dims.layers * dims.experts:
        raise RecipeError(
            "the checkpoint has no routed experts that rules could select", path=rules[0].path
        )
    owners = np.zeros((dims.layers, dims.experts, len(PROJECTIONS)), np.int32)
    for rule in rules[1:]:
        selected = _selected(rule, dims, counts)
        if not selected.any():
            rule.fail(
                "matches nothing",
                remedy="its selectors have no tensor in common: correct or remove it",
            )
        fresh = selected & (owners == 0)
        if not fresh.any():
            places = np.argwhere(selected).tolist()
            earlier = [rules[owners[tuple(place)]] for place in places]
            at = next((i for i, other in enumerate(earlier) if other.kind is not rule.kind), 0)
            what = "two types for one tensor" if earlier[at].kind is not rule.kind else "no use"
            rule.fail(
                f"{what}: earlier rules select all that it selects",
                tensor=_tensor_name(*places[at]),
                expected=f"{earlier[at].word} ({earlier[at].title})",
                found=rule.word,
                remedy="the first rule that selects a tensor decides: reorder or remove it",
            )
        owners[fresh] = rule.number
    return owners


def _selected(rule: _Rule, dims: ExpertDims, counts: Counts | None) -> Bools:
    """Which tensors a rule selects, ``(layers, experts, 3)``."""
    chosen = np.ones((dims.layers, dims.experts, len(PROJECTIONS)), np.bool_)
    keys = rule.keys
    if "layers" in keys:
        chosen &= _ids(rule, "layers", dims.layers)[:, None, None]
    if "experts" in keys:
        chosen &= _ids(rule, "experts", dims.experts)[:, None]
    if "hotness" in keys:
        ranks = _ids(rule, "hotness", dims.experts)
        if counts is None:
            rule.fail("hotness needs routing counts", remedy="give --imatrix FILE")
        for layer in range(dims.layers):
            # A stable sort: of two experts that are used alike, the lower id is the hotter.
            order = np.argsort(-counts(layer), kind="stable")
            hot = np.zeros(dims.experts, np.bool_)
            hot[order[ranks]] = True
            chosen[layer] &= hot[:, None]
    if "part" in keys:
        if keys["part"] not in PARTS:
            rule.fail("unknown part", expected=" or ".join(PARTS), found=repr(keys["part"]))
        down = keys["part"] == "down"
        chosen &= np.array([not down, not down, down])
    if "match" in keys:
        pattern = _pattern(rule)
        for place in np.argwhere(chosen).tolist():
            chosen[tuple(place)] = pattern.search(_tensor_name(*place)) is not None
    return chosen


def _tensor_name(layer: int, expert: int, projection: int) -> str:
    return expert_name(layer, expert, PROJECTIONS[projection])


def _pattern(rule: _Rule) -> re.Pattern[str]:
    text = rule.keys["match"]
    if not isinstance(text, str):
        rule.fail("match is not text", found=repr(text))
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        rule.fail("match is not a regular expression", found=f"{text!r}: {error}")


def _ids(rule: _Rule, key: str, limit: int) -> Bools:
    """``"0-9,42"``, a number, or a list of such, as flags of ``0 .. limit``."""
    value = rule.keys[key]
    flags = np.zeros(limit, np.bool_)
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, int) and not isinstance(item, bool):
            texts = [str(item)]
        elif isinstance(item, str):
            texts = item.split(",")
        else:
            _bad_ids(rule, key, item)
        for text in texts:
            found = _RANGE.fullmatch(text.strip())
            if found is None:
                _bad_ids(rule, key, item)
            first = int(found[1])
            last = first if found[2] is None else int(found[2])
            if last < first:
                _bad_ids(rule, key, item)
            if last >= limit:
                rule.fail(f"{key} out of range", expected=f"0..{limit - 1}", found=text.strip())
            flags[first : last + 1] = True
    if not flags.any():
        rule.fail(f"matches nothing: {key} is empty", remedy=f"leave {key} out to select all")
    return flags


def _bad_ids(rule: _Rule, key: str, item: Any) -> NoReturn:
    rule.fail(
        f"{key} is not a list of ids", expected='"0-9,42", 7, or a list of such', found=repr(item)
    )


# ---------------------------------------------------------------- what the types must keep to


def _judge(rules: list[_Rule], owners: Owners, dims: ExpertDims) -> None:
    """Refuse types that no artifact may combine; an error names the rule that chose the type."""
    _judge_pairs(rules, owners)
    for rule in rules:
        mine = owners == rule.number
        for part, at in zip(PARTS, (0, 2), strict=True):
            if not mine[:, :, at].any():
                continue
            if rule.kind is ROCMFP3_MIX and part == "gate-up":
                rule.fail(
                    f"{rule.word} is for down only",
                    tensor=_tensor_name(*np.argwhere(mine[:, :, :2]).tolist()[0]),
                    remedy='add part = "down", and another type for gate-up',
                )
            if rule.kind.row_multiple and dims.k(part) % rule.kind.row_multiple:
                rule.fail(
                    f"{rule.word} cannot hold rows of this model's {part}",
                    expected=f"a multiple of {rule.kind.row_multiple}",
                    found=dims.k(part),
                    remedy="choose a type that can",
                )
    _judge_tables(rules, owners)


def _judge_pairs(rules: list[_Rule], owners: Owners) -> None:
    """w1 and w3 of one expert take one type."""
    ids = np.array([rule.kind.id for rule in rules])[owners]
    for layer, expert in np.argwhere(ids[:, :, 0] != ids[:, :, 1]).tolist():
        first, second = (rules[owners[layer, expert, at]] for at in (0, 1))
        later = max(first, second, key=lambda rule: rule.number)
        later.fail(
            "two types for the gate and up of one expert",
            tensor=_tensor_name(layer, expert, int(later is second)),
            expected=f"w1 ({first.word}, {first.title}) and w3 ({second.word}, {second.title}) "
            "of one type",
            remedy='select both: part = "gate-up", or a match that both names fulfil',
        )


def _judge_tables(rules: list[_Rule], owners: Owners) -> None:
    """The mixed experts of one (layer, projection) share a table, so they share a type."""
    mixed = np.array([rule.kind.id if rule.kind.coding == "row" else 0 for rule in rules])
    for layer, row in enumerate(mixed[owners[:, :, 2]]):
        kinds = np.unique(row[row > 0])
        if len(kinds) > 1:
            holders = [int(np.argmax(row == kind)) for kind in kinds]
            one, other = (rules[owners[layer, expert, 2]] for expert in holders)
            later = max(one, other, key=lambda rule: rule.number)
            later.fail(
                f"both kinds of mixed types among the down projections of layer {layer}",
                expected=f"{one.word} ({one.title}) or {other.word} ({other.title})",
                tensor=_tensor_name(layer, holders[int(later is other)], 2),
                remedy="use one of them for all mixed experts of the layer's down projections",
            )
