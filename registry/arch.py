"""Owns what a tag and a file name say: architecture id, release, quantization. Opens no file.

The tables are hipfire's; for DeepSeek-V4 a tag counts only if it is spelled exactly as its releases
are, so that a new neighbour (``deepseek-v4-flash-lite``) is refused rather than taken for Flash.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ds4q.registry.errors import UnknownArchError, UnknownQuantError

DEEPSEEK4 = 9

ARCH_NAMES = {
    0: "LLaMA / Mistral",
    1: "Qwen3",
    5: "Qwen3.5/3.6/3.8 dense",
    6: "Qwen3.5/3.6/3.8 MoE",
    7: "Qwen2 dense",
    8: "dots.ocr",
    DEEPSEEK4: "DeepSeek V4",
    10: "MiniMax-M2",
    11: "LFM2.5",
    12: "Cohere2-MoE",
    13: "Gemma 4",
    14: "Muse Glimmer",
    15: "Maple-Preview",
    16: "Spark-X2.5 or Qwen3.8 Flash-Next",  # claimed twice; nothing here decides on it
    20: "DFlash draft",
    21: "Qwen3.5 MTP head",
    22: "Gemma 4 EAGLE draft",
    23: "Muse Glimmer DFlash draft",
    40: "FLUX.1 trunk",
    41: "T5",
    42: "CLIP-L",
    43: "VAE",
    44: "spare",
    45: "FLUX.2 trunk",
    46: "FLUX.2 Qwen3 encoder",
    47: "SD/SDXL",
    0xFF: "toy, never shipped",
    0xFFFFFFFF: "unclaimed",
}

# Families whose id depends on nothing else. A family is the tag up to its first colon.
_FAMILIES = {
    "bonsai": 5,
    "nex-n2": 6,
    "qwen3": 1,
    "minimax": 10,
    "lfm2.5": 11,
    "north-mini-code": 12,
    "maple-preview": 15,
    "vibethinker": 7,
    "flux": 40,
    "flux.schnell": 40,
    "flux.dev": 40,
}
_ORNITH = frozenset({"ornith-1.5", "ornith1.5", "ornith"})
_DENSE_OR_MOE = _ORNITH | {
    "qwen3.5",
    "qwen3.6",
    "qwen3.8",
    "qwopus",
    "qwopus3.6",
    "carnice",
}
# The two rolling names, or a date of 4 or 8 digits behind the first: nothing else that begins so.
_DEEPSEEK = re.compile(
    r"deepseek-v4-flash(?:-(?P<date>[0-9]{4}|[0-9]{8})(?![0-9]))?(?P<preview>-preview)?"
)
_LOOKS_DEEPSEEK = "deepseek"
CURRENT_RELEASE = "0731"  # what `deepseek-v4-flash` without a date means

_EFFORT_NATIVE = _ORNITH | {"qwen3.8", "muse-glimmer"}

_MQ = re.compile(r"[-.](mq[0-9])\.hfq\Z|\.(mq[0-9])(?:-xts?|-pro)?\Z")
OWN_RECIPES = {"fp4": "fp4", "fp4-q8": "fp4q8", "fp4-f16": "fp4p"}
MIXED = "fp4mix"  # whatever holds ROCmFPX types
KNOWN_QUANTS = frozenset(
    [
        "mq2",
        "mq2lloyd",
        "mq2lloydu",
        "mq2r",
        "mq3",
        "mq3p",
        "mq4",
        "mq4p",
        "mq4r",
        "mq5",
        "mq6",
        "mq6q8",
        "mq6q8-pleq8",
        "mfp4",
        "tq2",
        "bq1",
        "hf4",
        "hf6",
        "q8",
        "hfq",
        "mq2rxt",
    ]
) | {*OWN_RECIPES.values(), MIXED}


def family(tag: str) -> str:
    """``tag`` up to its first colon."""
    return tag.partition(":")[0]


def arch_id_for(tag: str, file: str) -> int:
    """The architecture id of the trunk or draft that ``tag`` names and ``file`` holds.

    Raises
    ------
    UnknownArchError : no rule knows the tag; that must stop a run, never be skipped
    """
    name = family(tag)
    if name == "muse-glimmer":
        return 23 if "dflash" in file else 14
    if "dflash" in file:
        return 20
    if name == "qwen3.8" and ("flash-next" in tag or "flash-next" in file):
        return 16
    if name in _DENSE_OR_MOE:
        return 6 if "a3b" in tag else 5
    if _DEEPSEEK.fullmatch(name):
        return DEEPSEEK4
    if name.startswith("minimax-"):
        return _FAMILIES["minimax"]
    if name in _FAMILIES:
        return _FAMILIES[name]
    raise UnknownArchError(
        f"tag {tag!r} maps to no architecture",
        expected="deepseek-v4-flash, with -0731 or -20260731 and -preview at most, before any ':'",
        found=repr(name),
    )


def arch_fault(tag: str, file: str, arch_id: int) -> str | None:
    """What is wrong with ``arch_id`` for this tag, if anything; a family that no rule knows may
    carry the id of its file, unless it looks like a DeepSeek that it is not.
    """
    try:
        expected = arch_id_for(tag, file)
    except UnknownArchError as error:
        return str(error) if tag.casefold().startswith(_LOOKS_DEEPSEEK) else None
    if arch_id == expected:
        return None
    return f"arch_id {arch_id} is not that of the tag, {expected} ({ARCH_NAMES[expected]})"


def release(tag: str, file: str) -> str | None:
    """Which DeepSeek-V4-Flash a trunk is: month and day, or ``preview``; None for other models."""
    match = _DEEPSEEK.fullmatch(family(tag))
    if match is None:
        return None
    for said in (match, _DEEPSEEK.match(file)):  # a tag without a date may name an older file
        if said and said["preview"]:
            return "preview"
        if said and said["date"]:
            return said["date"][-len(CURRENT_RELEASE) :]
    return CURRENT_RELEASE


def effort_native(tag: str) -> bool:
    """Whether a model takes a reasoning effort, so that a thinking budget means nothing to it."""
    if "draft" in tag or "dflash" in tag:
        return False
    name = family(tag)
    return name in _EFFORT_NATIVE or _DEEPSEEK.fullmatch(name) is not None


def quant_for(file: str, ours: Mapping[str, Any] | None = None) -> str:
    """The registry's word for how a file is quantized.

    Parameters
    ----------
    file : its name, which says it for files of other programs
    ours : metadata object ``ds4q`` of a file that ds4q wrote; its recipe counts, not the name

    Raises
    ------
    UnknownQuantError : neither says a word of ``KNOWN_QUANTS``
    """
    if ours is None:
        match = _MQ.search(file)
        word = (match[1] or match[2]) if match else file.rpartition(".")[2]
        if word not in KNOWN_QUANTS:
            raise UnknownQuantError(f"file {file!r} maps to no known quant", found=repr(word))
        return word
    # A recipe of rules may have any name; its digest tells it from ours.
    recipe = None if "recipe_sha256" in ours else ours.get("recipe")
    if isinstance(recipe, str) and recipe in OWN_RECIPES:
        return OWN_RECIPES[recipe]
    if ours.get("private_qt") is True:
        return MIXED
    raise UnknownQuantError(
        f"recipe of {file!r} maps to no known quant",
        expected="fp4, fp4-q8, fp4-f16, or one with ROCmFPX types",
        found=repr(ours.get("recipe")),
    )
