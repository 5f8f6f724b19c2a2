"""The registry document follows from a curated file and a listing, and from nothing else."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds4q.registry import generate as module
from ds4q.registry.entries import check_document, load_registry
from ds4q.registry.errors import DocumentError, GenerateError, HubError, UnknownTagError
from ds4q.registry.generate import document_of, generate
from ds4q.registry.hub import HubFile, HubRepo
from ds4q.registry.sources import BUNDLED, URL_VARIABLE, bundled
from tests.checks import check_refused
from tests.registry.documents import SHA_A, SHA_B, TIME

ROOM = Path(__file__).parents[2] / "registry"
REPO = "owner/name"
FLASH = "deepseek-v4-flash"


def curated(**changes: Any) -> dict[str, Any]:
    entry = {
        "repo": REPO,
        "file": "flash-0731.mq2r",
        "desc": "a model",
        "size_gb": 1.0,
        "min_vram_gb": 2,
        "dspark": {"file": "flash-0731-dspark.mq2r"},
    } | changes
    return {"schema_version": 1, "models": {FLASH: entry}, "aliases": {"ds4": FLASH}}


Files = dict[str, tuple[int | None, str | None]]


def listing(commit: str | None = None, files: Files | None = None) -> dict[str, Any]:
    held: Files = {"flash-0731.mq2r": (10**9, SHA_A), "flash-0731-dspark.mq2r": (5, SHA_B)}
    held |= files or {}
    return {
        "schema_version": 1,
        "listed_at": TIME,
        "repos": {
            REPO: {
                "commit": commit,
                "files": {
                    name: {"size_bytes": size, "sha256": sha} for name, (size, sha) in held.items()
                },
            }
        },
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "models.json").write_text(json.dumps(curated()))
    (tmp_path / "listing.json").write_text(json.dumps(listing()))
    return tmp_path


def problems_of(people: dict[str, Any], listed: dict[str, Any]) -> tuple[str, ...]:
    with pytest.raises(GenerateError) as caught:
        document_of(people, listed)
    assert str(caught.value).isprintable()
    return caught.value.problems


# --- what ships -------------------------------------------------------------------------------


def test_the_bundled_document_is_what_the_files_beside_it_say() -> None:
    assert generate(check=True).diff == ()
    assert bundled() == (ROOM / "registry.json").read_bytes()
    assert check_document(bundled(), BUNDLED) == []


PUBLISHED = {
    f"{FLASH}": (
        "hipfire-models/hipfire-deepseek-v4-flash-0731",
        "deepseek-v4-flash-0731.mq2lloyd",
        86.2,
        "521c9687a3f5c12fb3d89bde4a3ed202698b95ae5a102d0b5ba7f3abb87982d0",
        86_184_309_934,
        "mq2lloyd",
    ),
    f"{FLASH}:mq2r": (
        "hipfire-models/hipfire-deepseek-v4-flash-0731",
        "deepseek-v4-flash-0731.mq2r",
        82,
        "cbf2bbcfa3f47b1712a071836b2c48232dad7dfb763813a720f7d348a9318cce",
        82_191_359_851,
        "mq2r",
    ),
    f"{FLASH}-preview": (
        "nwoolmer/hipfire-deepseek-v4-flash",
        "deepseek-v4-flash.mq2lloyd",
        82,
        "ab8a8900f6792199975e7e2b15854bb869a023ca3fddf62981c1b9cd600e9b96",
        86_184_307_283,
        "mq2lloyd",
    ),
}
PUBLISHED_SIDECARS = {
    (FLASH, "dspark"): (
        "deepseek-v4-flash-0731-dspark.mq2lloyd",
        "fedf663e1bd2c6b8b62bc4819d54398c68e137e248863ad494e66111eb294c64",
        5_996_334_814,
    ),
    (f"{FLASH}:mq2r", "dspark"): (
        "deepseek-v4-flash-0731-dspark.mq2r",
        "bc695a000643801d26e5ae96c9f4ac4c222a36d9db40566f4cc1de0e9d3d5d2e",
        5_788_397_278,
    ),
    (f"{FLASH}-preview", "mtp"): (
        "deepseek-v4-flash-mtp.mq2lloyd",
        "596ab559d40319fd070baa34b24f8addcb64245cd0dd61fb468264fded89bfc7",
        1_998_047_355,
    ),
    (f"{FLASH}-preview", "dspark"): ("deepseek-v4-flash-dspark.mq2lloyd", None, None),
}


@pytest.mark.parametrize("tag", PUBLISHED)
def test_hipfires_published_entries_are_reproduced(tag: str) -> None:
    found = load_registry().entries[tag]
    told = (found.repo, found.file, found.size_gb, found.sha256, found.size_bytes, found.quant)
    assert told == PUBLISHED[tag]
    assert (found.min_vram_gb, found.arch_id, found.unverified) == (96, 9, False)
    assert found.raw["default_kv_mode"] == "f32"
    assert found.raw["sampling"] == {"temperature": 1.0, "top_p": 1.0}
    recipe = "deepseek4-mq2r-e8-p3-v1" if tag.endswith(":mq2r") else None
    assert found.quant_recipe == recipe
    if not tag.endswith("preview"):
        assert found.raw["recommended_settings"] == {
            "temperature": 1.0,
            "top_p": 1.0,
            "reasoning_effort": "low",
        }
        assert found.raw["sampling_profiles"] == {
            "coding": {"top_p": 0.95, "reasoning_effort": "max"},
            "instruct": {"reasoning_effort": "none"},
        }


def test_hipfires_published_sidecars_are_reproduced() -> None:
    entries = load_registry().entries
    found = {
        (tag, sidecar.kind): (sidecar.file, sidecar.sha256, sidecar.size_bytes)
        for tag in PUBLISHED
        for sidecar in entries[tag].sidecars
        if sidecar.kind != "adapter"
    }
    assert found == PUBLISHED_SIDECARS
    unverified = [
        (tag, sidecar.kind)
        for tag in PUBLISHED
        for sidecar in entries[tag].sidecars
        if sidecar.unverified
    ]
    assert unverified == [(FLASH, "adapter"), (f"{FLASH}-preview", "dspark")]


@pytest.mark.parametrize(
    ("name", "tag"),
    [
        (FLASH, FLASH),
        ("deepseek4", FLASH),
        ("deepseek-v4", FLASH),
        ("deepseek4:0731", FLASH),
        ("deepseek-v4:0731", FLASH),
        (f"{FLASH}-0731", FLASH),
        (f"{FLASH}-0731:mq2lloyd", FLASH),
        ("deepseek4:0731-mq2r", f"{FLASH}:mq2r"),
        ("deepseek-v4:0731-mq2r", f"{FLASH}:mq2r"),
        (f"{FLASH}-0731:mq2r", f"{FLASH}:mq2r"),
        ("deepseek4:mq2r", f"{FLASH}:mq2r"),
        ("deepseek-v4:mq2r", f"{FLASH}:mq2r"),
        ("deepseek-v4-flash-0731.mq2r", f"{FLASH}:mq2r"),
        ("deepseek4:preview", f"{FLASH}-preview"),
        ("deepseek-v4:preview", f"{FLASH}-preview"),
        ("deepseek-v4-flash.mq2lloyd", f"{FLASH}-preview"),
        (f"{FLASH}-0731:fp4", f"{FLASH}:fp4"),
        ("deepseek4:fp4mix", f"{FLASH}:fp4mix"),
    ],
)
def test_published_names_mean_what_they_mean_upstream(name: str, tag: str) -> None:
    assert load_registry().resolve(name).tag == tag


@pytest.mark.parametrize(
    "name", ["deepseek4:preview-mq2r", "deepseek-v4-flash-0731.hfq", "qwen3.5:deepseek4"]
)
def test_names_that_upstream_does_not_know_are_unknown(name: str) -> None:
    with pytest.raises(UnknownTagError):
        load_registry().resolve(name)


EXPERT_BYTES = 43 * 256 * (2 * 2048 * (16 + 2048 + 128) + 4096 * (16 + 1024 + 64))
PAYLOAD_BYTES = {"fp4": 163_306_218_588, "fp4q8": 156_874_335_406, "fp4p": 163_235_587_246}
BUDGET_BYTES = 98_000_000_000
RESERVE_BYTES = 8 << 30


@pytest.mark.parametrize(
    ("quant", "recipe"),
    [("fp4", "fp4"), ("fp4q8", "fp4-q8"), ("fp4p", "fp4-f16"), ("fp4mix", "budget")],
)
def test_figures_of_our_entries_follow_from_sizes(quant: str, recipe: str) -> None:
    found = load_registry().entries[f"{FLASH}:{quant}"]
    payload = PAYLOAD_BYTES.get(quant, BUDGET_BYTES)
    dense = PAYLOAD_BYTES.get(quant, PAYLOAD_BYTES["fp4q8"]) - EXPERT_BYTES
    paged = dense + EXPERT_BYTES * 6 // 256
    assert (found.repo, found.sha256, found.size_bytes) == ("", None, None)
    assert found.file == f"deepseek-v4-flash-0731.{quant}"
    assert (found.quant, found.quant_recipe, found.arch_id) == (quant, recipe, 9)
    assert found.size_gb == round(payload / 1e9, 1)
    assert found.min_vram_gb == -(-(payload + RESERVE_BYTES) // 10**9)
    assert found.desc.endswith(f"; paged from {-(-paged // 10**8) / 10} GB")
    assert "43 layers, 256 + 1 experts, top-6, temperature 1.0" in found.desc
    assert [sidecar.kind for sidecar in found.sidecars] == ["receipt", "dspark"]


# --- the generator ----------------------------------------------------------------------------


def test_what_names_and_listing_say_is_filled_in() -> None:
    made = document_of(curated(), listing())
    assert made == {
        "schema_version": 1,
        "generated_at": TIME,
        "aliases": {"ds4": FLASH},
        "models": {
            FLASH: {
                "repo": REPO,
                "file": "flash-0731.mq2r",
                "desc": "a model",
                "size_gb": 1.0,
                "min_vram_gb": 2,
                "sha256": SHA_A,
                "size_bytes": 10**9,
                "arch_id": 9,
                "quant": "mq2r",
                "dspark": {
                    "file": "flash-0731-dspark.mq2r",
                    "sha256": SHA_B,
                    "size_bytes": 5,
                },
            }
        },
    }


def test_a_known_commit_is_what_is_pulled_from() -> None:
    made = document_of(curated(), listing("c" * 40))
    assert made["models"][FLASH]["revision"] == "c" * 40
    made = document_of(curated(revision="v1"), listing("c" * 40))
    assert made["models"][FLASH]["revision"] == "v1"


def test_an_entry_that_is_nowhere_else_keeps_its_own_values() -> None:
    local = curated(repo="", dspark={"file": "d.mq2r"})
    made = document_of(local, listing())["models"][FLASH]
    assert (made["sha256"], made["size_bytes"], made["dspark"]) == (None, None, {"file": "d.mq2r"})
    typed = document_of(curated(repo="", sha256=SHA_A, size_bytes=10**9), listing())
    assert typed["models"][FLASH]["sha256"] == SHA_A


def test_files_of_a_url_have_typed_digests() -> None:
    typed = {"sha256": SHA_A, "size_bytes": 10**9, "dspark": {"file": "d", "unverified": True}}
    made = document_of(curated(repo="https://example.org/models", **typed), listing())
    assert made["models"][FLASH]["sha256"] == SHA_A
    (problem,) = problems_of(
        curated(repo="file:///models", **typed | {"sha256": None, "size_bytes": None}), listing()
    )
    assert problem == f"{FLASH}: has no sha256, and does not say that it is unverified"


def test_all_problems_are_told_at_once() -> None:
    broken = curated(file="gone.xyz", dspark={"file": "also-gone"})
    broken["models"]["deepseek-v4-flash-lite"] = broken["models"][FLASH] | {"repo": "who/knows"}
    told = "\n".join(problems_of(broken, listing()))
    assert f"{FLASH}: quant: file 'gone.xyz' maps to no known quant" in told
    assert f'{FLASH}: file: no such file in the listing of {REPO}: found "gone.xyz"' in told
    assert f"{FLASH}: dspark: file: no such file in the listing of {REPO}" in told
    assert "deepseek-v4-flash-lite: arch_id: tag 'deepseek-v4-flash-lite' maps to no arch" in told
    assert "deepseek-v4-flash-lite: repo: repo is not in the listing" in told


NO_DIGEST: Files = {"flash-0731-dspark.mq2r": (5, None)}


@pytest.mark.parametrize(
    ("people", "files", "says"),
    [
        ({}, NO_DIGEST, "dspark: has no sha256, and does not say that it is unverified"),
        ({}, {"flash-0731.mq2r": (None, None)}, "has no sha256, and does not say"),
        ({"unverified": True}, {}, "has a sha256, and says that it is unverified"),
        ({"size_gb": 1.4}, {}, "size_gb: size_gb is more than 25 % away from size_bytes"),
        ({"sha256": SHA_B}, {}, "sha256: the curated value is not what names and listing say"),
        ({"size_bytes": 5}, {}, "size_bytes: the curated value is not what names and listing say"),
        ({"arch_id": 5}, {}, "arch_id: the curated value is not what names and listing say"),
        ({"quant": "mq2lloyd"}, {}, "quant: the curated value is not what names and listing say"),
        ({"recommended_settings": {"thinking_budget": "low"}}, {}, "recommended_settings: thinki"),
        ({"mtp": {"file": "flash-0731-dspark.mq2r"}}, {}, "mtp: an MTP draft does not pair"),
    ],
)
def test_what_does_not_hold_is_not_generated(
    people: dict[str, Any], files: Files, says: str
) -> None:
    problems = problems_of(curated(**people), listing(files=files))
    assert any(problem.startswith(f"{FLASH}: {says}") for problem in problems), problems


def test_a_sidecar_that_nobody_published_a_digest_of_says_so() -> None:
    people = curated(dspark={"file": "flash-0731-dspark.mq2r", "unverified": True})
    made = document_of(people, listing(files=NO_DIGEST))["models"][FLASH]
    assert made["dspark"] == {
        "file": "flash-0731-dspark.mq2r",
        "unverified": True,
        "size_bytes": 5,
    }


def test_an_alias_of_nothing_is_not_generated() -> None:
    people = curated() | {"aliases": {"ds4": "gone"}}
    assert problems_of(people, listing()) == (
        "aliases: ds4: alias of a tag that does not exist: found 'gone'",
    )


def test_a_published_name_that_ends_in_a_quant_leads_to_no_other() -> None:
    people = curated()
    people["models"][f"{FLASH}:mq2lloyd"] = people["models"].pop(FLASH)
    people["aliases"] = {
        "ds4:0731-mq2rxt": f"{FLASH}:mq2lloyd",
        "ds4:0731-mq2r": f"{FLASH}:mq2lloyd",
        "ds4:x-8b": f"{FLASH}:mq2lloyd",
        "fp4": f"{FLASH}:mq2lloyd",
    }
    told = "a name of another quant than its entry's: expected mq2r, found"
    assert problems_of(people, listing()) == (
        f"{FLASH}:mq2lloyd: {told} mq2lloyd",
        f"aliases: ds4:0731-mq2rxt: {told} mq2rxt",
    )


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("models.json", lambda d: d["models"][FLASH].update(sizegb=1), "sizegb: unknown key"),
        ("models.json", lambda d: d.update(more=1), "more: unknown key"),
        ("models.json", lambda d: d["models"][FLASH].update(size_gb="1"), "size_gb: bad value"),
        ("models.json", lambda d: d["models"][FLASH].update(file="../x"), "file: bad value"),
        ("listing.json", lambda d: d["repos"][REPO].update(more=1), "more: unknown key"),
        ("listing.json", lambda d: d["repos"][REPO].update(commit="c"), "commit: bad value"),
        ("listing.json", lambda d: d.pop("listed_at"), "'listed_at' is a required property"),
    ],
)
def test_what_people_write_is_read_strictly(
    folder: Path, name: str, change: Callable[[dict[str, Any]], Any], says: str
) -> None:
    document = json.loads((folder / name).read_text())
    change(document)
    (folder / name).write_text(json.dumps(document))
    check_refused(GenerateError, lambda: generate(folder), path=folder / name, says=[says])
    assert not (folder / "registry.json").exists()


def test_a_curated_file_with_a_tag_twice_is_refused(folder: Path) -> None:
    text = (folder / "models.json").read_text()
    entry = json.dumps(curated()["models"][FLASH])
    twice = text.replace('"models": {', f'"models": {{"{FLASH}": {entry}, ')
    (folder / "models.json").write_text(twice)
    check_refused(DocumentError, lambda: generate(folder), says=[f"'{FLASH}' stands twice"])


def test_generating_is_repeatable_and_a_check_only_compares(folder: Path) -> None:
    (folder / "registry.json").write_text("{}\n")
    checked = generate(folder, check=True)
    assert checked.changed
    assert "-{}" in checked.diff
    assert (folder / "registry.json").read_text() == "{}\n"
    assert generate(folder) == checked
    first = (folder / "registry.json").read_bytes()
    assert generate(folder) == generate(folder, check=True) == module.Generated(False, ())
    assert (folder / "registry.json").read_bytes() == first
    (folder / "registry.json").unlink()
    assert generate(folder, check=True).changed
    assert not (folder / "registry.json").exists()


def test_generating_opens_no_connection(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a connection")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setenv(URL_VARIABLE, "http://127.0.0.1:1/r.json")
    assert generate(folder).changed


# --- asking the hub ---------------------------------------------------------------------------


class Hub:
    """What the hub says of repos, as ``look_up`` gives it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.commit = "c" * 40
        self.files: dict[str, tuple[int, str | None]] = {
            "flash-0731.mq2r": (10**9, SHA_A),
            "flash-0731-dspark.mq2r": (5, SHA_B),
            "README.md": (7, None),
        }
        self.asked: list[tuple[str, str | None]] = []
        monkeypatch.setattr(module, "look_up", self.look_up)

    def look_up(self, repo: str, revision: str | None) -> HubRepo:
        self.asked.append((repo, revision))
        if repo != REPO:
            raise HubError(path=repo, found="404")
        files = {name: HubFile("", size, sha) for name, (size, sha) in self.files.items()}
        return HubRepo(repo, self.commit, files, {})


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    return Hub(monkeypatch)


def test_a_refresh_lists_what_entries_name_and_pins_the_commit(folder: Path, hub: Hub) -> None:
    generate(folder)
    assert hub.asked == []
    assert generate(folder, refresh=True).changed
    assert hub.asked == [(REPO, None)]
    listed = json.loads((folder / "listing.json").read_text())
    assert listed["repos"] == listing(hub.commit)["repos"]  # without the README
    assert listed["listed_at"] > TIME
    made = json.loads((folder / "registry.json").read_text())
    assert made["models"][FLASH]["revision"] == hub.commit
    assert made["generated_at"] == listed["listed_at"]


def test_a_refresh_that_finds_nothing_new_changes_no_byte(folder: Path, hub: Hub) -> None:
    (folder / "listing.json").write_text(json.dumps(listing(hub.commit)))  # of years ago
    generate(folder, refresh=True)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert json.loads(before["registry.json"])["generated_at"] == TIME
    assert generate(folder, refresh=True) == module.Generated(False, ())
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_refresh_may_only_compare(folder: Path, hub: Hub) -> None:
    generate(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert generate(folder, check=True, refresh=True).changed
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_file_that_changed_on_the_hub_is_seen_and_one_that_went_is_an_error(
    folder: Path, hub: Hub
) -> None:
    generate(folder, refresh=True)
    hub.files["flash-0731.mq2r"] = (10**9 + 1, SHA_B)
    diff = generate(folder, refresh=True).diff
    assert any(line.startswith("+") and str(10**9 + 1) in line for line in diff)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    del hub.files["flash-0731.mq2r"]
    check_refused(
        GenerateError,
        lambda: generate(folder, refresh=True),
        says=[f"no such file in the listing of {REPO}"],
    )
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_repo_that_cannot_be_asked_is_an_error_and_nothing_is_written(
    folder: Path, hub: Hub
) -> None:
    people = curated()
    people["models"]["gone"] = people["models"][FLASH] | {"repo": "who/knows"}
    (folder / "models.json").write_text(json.dumps(people))
    check_refused(
        GenerateError, lambda: generate(folder, refresh=True), says=["repos: who/knows", "404"]
    )
    assert not (folder / "registry.json").exists()


def test_one_repo_has_one_revision(folder: Path, hub: Hub) -> None:
    people = curated(revision="v1")
    people["models"][f"{FLASH}-0731"] = people["models"][FLASH] | {"revision": "v2"}
    (folder / "models.json").write_text(json.dumps(people))
    check_refused(
        GenerateError, lambda: generate(folder, refresh=True), says=["another revision of the repo"]
    )
    assert hub.asked == [(REPO, "v1")]
