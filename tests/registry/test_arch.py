"""A tag maps to its architecture exactly as releases are spelled, and a neighbour to none."""

from __future__ import annotations

import pytest

from ds4q.registry.arch import (
    ARCH_NAMES,
    KNOWN_QUANTS,
    arch_fault,
    arch_id_for,
    effort_native,
    quant_for,
    release,
)
from ds4q.registry.errors import UnknownArchError, UnknownQuantError
from tests.checks import check_refused


@pytest.mark.parametrize(
    "tag",
    [
        "deepseek-v4-flash",
        "deepseek-v4-flash:mq2r",
        "deepseek-v4-flash-preview",
        "deepseek-v4-flash-0731",
        "deepseek-v4-flash-0731:fp4",
        "deepseek-v4-flash-20260731",
        "deepseek-v4-flash-0731-preview",
        "deepseek-v4-flash:lite",
    ],
)
def test_a_release_of_flash_is_deepseek4(tag: str) -> None:
    assert arch_id_for(tag, "x.fp4") == 9


@pytest.mark.parametrize(
    "tag",
    [
        "deepseek-v4-flash-lite",
        "deepseek-v4-flash-",
        "deepseek-v4-flashx",
        "deepseek-v4-flash-073",
        "deepseek-v4-flash-07311",
        "deepseek-v4-flash-0731x",
        "deepseek-v4-flash-0731-",
        "deepseek-v4-flash-preview-0731",
        "deepseek-v4-flash-\u0660\u0667\u0663\u0661",  # digits, but not ours
        "deepseek-v4-flash\n",
        "deepseek-v4-fl",
        "deepseek-v4.1-flash",
        "deepseek-v4-pro",
        "deepseek-v4",
        "DeepSeek-V4-Flash",
        "x-deepseek-v4-flash",
        "",
        "ds4-tiny",
    ],
)
def test_what_only_looks_like_a_release_stops_the_run(tag: str) -> None:
    error = check_refused(
        UnknownArchError, lambda: arch_id_for(tag, "x.fp4"), says=["maps to no architecture"]
    )
    assert error.found == repr(tag)


@pytest.mark.parametrize(
    ("tag", "file", "arch_id"),
    [
        ("muse-glimmer:9b", "x.mq4", 14),
        ("muse-glimmer:draft", "x-dflash.mq4", 23),
        ("anything", "x-dflash.mq4", 20),
        ("bonsai", "x.mq4", 5),
        ("qwen3.8:flash-next", "x.mq4", 16),
        ("qwen3.8:80b", "qwen3.8-flash-next.mq4", 16),
        ("qwen3.8:9b", "x.mq4", 5),
        ("qwen3.5:35b-a3b", "x.mq4", 6),
        ("qwopus3.6", "x.mq4", 5),
        ("nex-n2", "x.mq4", 6),
        ("ornith-1.5:9b-a3b", "x.mq4", 6),
        ("ornith", "x.mq4", 5),
        ("qwen3:8b", "x.mq4", 1),
        ("minimax", "x.mq4", 10),
        ("minimax-m2", "x.mq4", 10),
        ("lfm2.5:8b", "x.mq4", 11),
        ("north-mini-code", "x.mq4", 12),
        ("maple-preview", "x.mq4", 15),
        ("vibethinker", "x.mq4", 7),
        ("flux.dev", "x.mq4", 40),
    ],
)
def test_other_families_have_the_ids_of_hipfire(tag: str, file: str, arch_id: int) -> None:
    assert arch_id_for(tag, file) == arch_id
    assert arch_id in ARCH_NAMES


def test_the_id_that_is_claimed_twice_is_printed_with_both_names() -> None:
    assert ARCH_NAMES[16] == "Spark-X2.5 or Qwen3.8 Flash-Next"
    assert not {2, 3, 4, 17, 18, 19} & ARCH_NAMES.keys()


def test_an_id_that_is_not_the_tags_is_a_fault() -> None:
    assert arch_fault("deepseek-v4-flash", "x.fp4", 9) is None
    assert arch_fault("deepseek-v4-flash", "x.fp4", 5) == (
        "arch_id 5 is not that of the tag, 9 (DeepSeek V4)"
    )
    assert arch_fault("ds4-tiny:fp4", "x.fp4", 9) is None  # a name of the user's own
    for near in ("deepseek-v4-flash-lite", "DeepSeek-V4-Flash"):
        assert "maps to no architecture" in str(arch_fault(near, "x.fp4", 9))


@pytest.mark.parametrize(
    ("tag", "file", "expected"),
    [
        ("deepseek-v4-flash", "deepseek-v4-flash-0731.fp4", "0731"),
        ("deepseek-v4-flash", "mine.fp4", "0731"),
        ("deepseek-v4-flash-0731", "mine.fp4", "0731"),
        ("deepseek-v4-flash-20260731:fp4", "mine.fp4", "0731"),
        ("deepseek-v4-flash-1203", "deepseek-v4-flash-0731.fp4", "1203"),
        ("deepseek-v4-flash", "deepseek-v4-flash-1203.fp4", "1203"),
        ("deepseek-v4-flash", "deepseek-v4-flash-12031.fp4", "0731"),
        ("deepseek-v4-flash-preview", "deepseek-v4-flash.mq2lloyd", "preview"),
        ("deepseek-v4-flash", "deepseek-v4-flash-preview.fp4", "preview"),
        ("qwen3:8b", "deepseek-v4-flash-0731.fp4", None),
    ],
)
def test_the_release_is_told_by_tag_and_file(tag: str, file: str, expected: str | None) -> None:
    assert release(tag, file) == expected


def test_effort_native_families_are_known() -> None:
    assert effort_native("deepseek-v4-flash-0731:fp4")
    assert effort_native("qwen3.8:9b")
    assert effort_native("ornith1.5")
    assert not effort_native("qwen3.5:9b")
    assert not effort_native("muse-glimmer:draft")


@pytest.mark.parametrize(
    ("file", "quant"),
    [
        ("qwen-mq4.hfq", "mq4"),
        ("qwen.mq6.hfq", "mq6"),
        ("qwen.mq4", "mq4"),
        ("qwen.mq4-xt", "mq4"),
        ("qwen.mq4-xts", "mq4"),
        ("qwen.mq3-pro", "mq3"),
        ("qwen-mq4.hfq.mq2r", "mq2r"),
        ("deepseek-v4-flash-0731.mq2lloyd", "mq2lloyd"),
        ("deepseek-v4-flash-0731.mq2lloydu", "mq2lloydu"),
        ("deepseek-v4-flash-0731.mq2r", "mq2r"),
        ("deepseek-v4-flash-0731.mq2rxt", "mq2rxt"),
        ("deepseek-v4-flash-0731.fp4mix", "fp4mix"),
        ("x.mq6q8-pleq8", "mq6q8-pleq8"),
        ("x.hfq", "hfq"),
    ],
)
def test_the_quant_of_another_programs_file_is_in_its_name(file: str, quant: str) -> None:
    assert quant_for(file) == quant
    assert quant in KNOWN_QUANTS


@pytest.mark.parametrize("file", ["x", "x.bin", "x.mq9r", "x.FP4", "x.mq2rx", "x.mq4\n", "x."])
def test_a_file_without_a_known_quant_stops_the_run(file: str) -> None:
    check_refused(UnknownQuantError, lambda: quant_for(file), says=["maps to no known quant"])


def test_the_quant_of_our_files_is_their_recipes() -> None:
    assert quant_for("x.mq4", {"recipe": "fp4", "private_qt": False}) == "fp4"
    assert quant_for("x.hfq", {"recipe": "fp4-q8", "private_qt": False}) == "fp4q8"
    assert quant_for("x.hfq", {"recipe": "fp4-f16", "private_qt": False}) == "fp4p"
    for recipe in ("budget", "mix", "rocmfp3", "fp4"):
        ours = {"recipe": recipe, "private_qt": True, "recipe_sha256": "0" * 64}
        assert quant_for("x.fp4", ours) == "fp4mix"


def test_rules_that_are_called_fp4_are_not_the_lossless_recipe() -> None:
    ours = {"recipe": "fp4", "private_qt": False, "recipe_sha256": "0" * 64}
    check_refused(
        UnknownQuantError, lambda: quant_for("x.fp4", ours), says=["recipe of 'x.fp4'", "'fp4'"]
    )
    check_refused(UnknownQuantError, lambda: quant_for("x.fp4", {}), says=["None"])
