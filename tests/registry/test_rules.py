"""What a document says beyond its schema: names that clash, sidecars of another trunk, digests."""

from __future__ import annotations

from typing import Any

import pytest

from ds4q.registry.rules import SIDECAR_KINDS, document_rules
from tests.registry.documents import SHA_A, SHA_B, document, entry

FLASH = "deepseek-v4-flash"


def said(changed: dict[str, Any]) -> dict[str, bool]:
    """Problems as text, and whether they are fatal."""
    rules = document_rules(changed["models"], changed["aliases"])
    return {str(problem): problem.fatal for problem in rules}


def one(**changes: Any) -> dict[str, bool]:
    return said(document({FLASH: entry(**changes)}))


def test_a_sound_document_has_no_problem() -> None:
    assert said(document(aliases={"ds4": FLASH})) == {}
    assert one(repo="", sha256=None, size_bytes=None) == {}
    receipt = {"file": "flash.fp4.receipt", "sha256": SHA_B, "size_bytes": 5}
    assert one(receipt=receipt, dspark={"file": "d.fp4", "unverified": True}) == {}


def test_an_alias_that_is_another_entrys_tag_is_fatal_and_names_both() -> None:
    two = {FLASH: entry(), "deepseek-v4-flash:mq2r": entry(file="x.mq2r", quant="mq2r")}
    assert said(document(two, {"deepseek-v4-flash:mq2r": FLASH})) == {
        "aliases: deepseek-v4-flash:mq2r: alias of 'deepseek-v4-flash' is also the tag of an "
        "entry, 'deepseek-v4-flash:mq2r'": True
    }


def test_an_alias_of_nothing_is_told() -> None:
    assert said(document(aliases={"ds4": "gone"})) == {
        "aliases: ds4: alias of a tag that does not exist: found 'gone'": False
    }
    assert not list(document_rules(document()["models"], {"ds4": "gone"}, beneath={"gone"}))


def test_a_file_that_is_called_as_another_entry_is_told() -> None:
    two = {FLASH: entry(), "ds4": entry(file=FLASH, repo="", sha256=None, size_bytes=None)}
    problem = f"ds4: file: file '{FLASH}' of 'ds4' is also a name of '{FLASH}'"
    assert said(document(two)) == {problem: False}
    assert said(document({FLASH: entry(file=FLASH)})) == {}
    aliased = document({FLASH: entry(file="ds4"), "own": entry(file="x.fp4")}, {"ds4": "own"})
    assert said(aliased) == {
        f"{FLASH}: file: file 'ds4' of '{FLASH}' is also a name of 'own'": False
    }


def test_one_file_name_with_two_contents_is_told_with_both() -> None:
    other = entry(sha256=SHA_B, size_bytes=10**9 + 1)
    problems = said(document({FLASH: entry(), "own": other}))
    assert problems == {
        "own: file 'flash.fp4' has another size_bytes under 'own' than under 'deepseek-v4-flash': "
        "expected 1000000000, found 1000000001": False,
        "own: file 'flash.fp4' has another sha256 under 'own' than under 'deepseek-v4-flash': "
        f"expected {SHA_A}, found {SHA_B}": False,
    }
    unknown = entry(repo="", sha256=None, size_bytes=None)
    assert said(document({FLASH: entry(), "own": unknown})) == {}


@pytest.mark.parametrize("kind", SIDECAR_KINDS)
def test_the_name_of_a_sidecar_is_plain_and_its_own(kind: str) -> None:
    item = {"file": "flash.fp4", "sha256": SHA_A, "size_bytes": 10**9}
    problems = one(**{kind: item})
    assert f"{FLASH}: {kind}: file: the same file as '{FLASH}': found \"flash.fp4\"" in problems
    problems = one(**{kind: item | {"file": "a\u202eb"}})
    text = f"{FLASH}: {kind}: file: unsafe name: {kind} file holds a character that does not print"
    assert any(problem.startswith(text) for problem in problems)


@pytest.mark.parametrize(
    ("tag", "file"),
    [
        (FLASH, "flash.fp4"),
        (f"{FLASH}-0731:fp4", "x.fp4"),
        (f"{FLASH}-20260731", "x.fp4"),
    ],
)
def test_an_mtp_draft_is_refused_on_the_current_trunk(tag: str, file: str) -> None:
    draft = {"file": "mtp.fp4", "sha256": SHA_B, "size_bytes": 5}
    (problem,) = said(document({tag: entry(file=file, mtp=draft)})).items()
    assert problem == (
        f"{tag}: mtp: an MTP draft does not pair with the 0731 trunk; its draft is dspark: "
        'found "mtp.fp4"',
        True,
    )


def test_an_mtp_draft_pairs_with_the_preview() -> None:
    draft = {"file": "mtp.fp4", "sha256": SHA_B, "size_bytes": 5}
    assert said(document({f"{FLASH}-preview": entry(mtp=draft)})) == {}
    assert said(document({f"{FLASH}-0731:mtp": entry(file="mtp.fp4")})) == {}  # a draft of its own


def test_a_receipt_is_the_trunks_own() -> None:
    receipt = {"file": "other.receipt", "sha256": SHA_B, "size_bytes": 5}
    assert one(receipt=receipt) == {
        f'{FLASH}: receipt: file: not the trunk\'s receipt: expected "flash.fp4.receipt", '
        'found "other.receipt"': True
    }


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sha256": None, "size_bytes": None}, "has no sha256, and does not say that it is unver"),
        ({"unverified": True}, "has a sha256, and says that it is unverified"),
        ({"size_bytes": None}, "has a sha256 and no size_bytes"),
        ({"size_gb": 1.34}, "size_gb: size_gb is more than 25 % away from size_bytes: found 1.34"),
        ({"size_gb": 0.79}, "size_gb: size_gb is more than 25 % away"),
        ({"size_gb": 0}, "size_gb: size_gb is more than 25 % away"),
        ({"arch_id": 5}, "arch_id: arch_id 5 is not that of the tag, 9"),
        ({"quant": "fp5"}, 'quant: unknown quant: found "fp5"'),
        (
            {"recommended_settings": {"thinking_budget": "low"}},
            "recommended_settings: thinking_budget: a thinking budget means nothing",
        ),
        (
            {"sampling_profiles": {"coding": {"thinking_budget": "low"}}},
            "sampling_profiles: coding: thinking_budget: a thinking budget means nothing",
        ),
        ({"dspark": {"file": "d"}}, "dspark: has no sha256, and does not say that it is unver"),
    ],
)
def test_what_only_strict_checks_refuse_is_not_fatal(changes: dict[str, Any], says: str) -> None:
    (problem,) = one(**changes).items()
    assert problem[0].startswith(f"{FLASH}: {says}")
    assert problem[1] is False


@pytest.mark.parametrize("size_gb", [0.8, 1.3333])
def test_a_size_within_a_quarter_passes(size_gb: float) -> None:
    assert one(size_gb=size_gb) == {}


def test_a_size_without_a_digest_is_fine_where_it_is_said() -> None:
    assert one(dspark={"file": "d", "size_bytes": 5, "unverified": True}) == {}


def test_a_deepseek_that_no_rule_knows_is_told() -> None:
    assert said(document({"ds4-tiny:fp4": entry()})) == {}
    (problem,) = said(document({f"{FLASH}-lite": entry()}))
    assert problem.startswith(f"{FLASH}-lite: arch_id: tag '{FLASH}-lite' maps to no architecture")


def test_a_profile_that_nobody_knows_is_not_looked_into() -> None:
    assert one(sampling_profiles={"new": 5}) == {}
