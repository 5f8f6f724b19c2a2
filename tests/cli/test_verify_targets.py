"""ds4q verify of folders, registry files and several paths: what is found, and what is said."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from ds4q import targets
from ds4q.artifact.receipt import receipt_path
from ds4q.artifact.walk import walk
from ds4q.cli import main
from ds4q.targets import Targets
from tests.quantize import models
from tests.quantize.damage import flip
from tests.registry.folders import TAG, good_folder, put_registry


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return good_folder(tmp_path_factory.mktemp("good") / "models")


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "models"))


def verify(*words: object) -> Result:
    return CliRunner().invoke(main, ["verify", "--quiet", *map(str, words)])


def reports(*words: object) -> list[dict[str, Any]]:
    """The documents of all targets."""
    return list(json.loads(verify(*words, "--json").stdout)["targets"])


def failed(report: dict[str, Any]) -> list[str]:
    return [check["name"] for check in report["checks"] if not check["ok"]]


def messages(report: dict[str, Any]) -> list[str]:
    return [failure["message"] for check in report["checks"] for failure in check["failures"]]


# ---------------------------------------------------------------- forms


def test_a_folder_is_its_artifacts_and_its_registry(folder: Path, tmp_path: Path) -> None:
    result = verify(folder, "--json", "--junit", tmp_path / "r.xml")
    assert (result.exit_code, result.stderr) == (0, "")
    document = json.loads(result.stdout)
    assert list(document) == ["schema_version", "ok", "targets"]
    artifact, registry = document["targets"]
    assert [list(each) for each in (artifact, registry)] == [["ok", "artifact", "checks"]] * 2
    assert artifact["artifact"]["path"] == str(folder / "flash.hfq")
    assert registry["artifact"]["kind"] == "registry"
    document_check, entry = registry["checks"]
    assert document_check["figures"] == {"entries": 1, "with_files_here": 1, "failures": 0}
    assert entry["name"] == f"entry {TAG}"
    assert entry["figures"]["sidecars"] == 1
    suites = list(ElementTree.parse(tmp_path / "r.xml").getroot())
    assert [suite.get("name") for suite in suites] == [
        f"ds4q verify {folder / 'flash.hfq'}",
        f"ds4q verify {folder / 'registry.json'}",
    ]


def test_people_are_told_of_each_and_of_all(folder: Path) -> None:
    flip(folder / "flash.hfq", 5000)
    result = verify(folder)
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[-1] == "2 targets: FAILED (2)"
    assert any(line == f"{folder / 'registry.json'}: FAILED" for line in lines)
    told = result.stderr.splitlines()
    assert told[0].startswith(f"{folder / 'flash.hfq'}: receipt: layers.")
    assert told[-1].startswith(f"{folder / 'registry.json'}: entry {TAG}: {TAG}: SHA-256 of flash")


def test_a_registry_file_alone_is_held_to_the_files_beside_it(folder: Path) -> None:
    result = verify(folder / "registry.json", "--json")
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert list(document) == ["schema_version", "ok", "artifact", "checks"], "one path"
    assert [check["name"] for check in document["checks"]] == ["document", f"entry {TAG}"]
    flip(folder / "flash.hfq", 5000)
    red = json.loads(verify(folder / "registry.json", "--json").stdout)
    assert failed(red) == [f"entry {TAG}"]


def test_several_paths_are_one_report_and_each_file_is_checked_once(folder: Path) -> None:
    artifact = folder / "flash.hfq"
    found = reports(artifact, folder, artifact, receipt_path(artifact))
    assert [Path(each["artifact"]["path"]).name for each in found] == ["flash.hfq", "registry.json"]


@pytest.mark.parametrize("option", ["--receipt", "--registry", "--signature", "--html"])
def test_what_belongs_to_one_artifact_is_refused_for_more(option: str, folder: Path) -> None:
    words = ["--public-key", "k.pem"] if option == "--signature" else []
    pytest.importorskip("jinja2")
    result = verify(folder, option, folder.parent / "x", *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "for one artifact" in result.stderr


# ---------------------------------------------------------------- sources


@pytest.fixture
def two(good: Path, folder: Path) -> tuple[Path, Path]:
    """The folder gets a second artifact, of another checkpoint; these are the two checkpoints."""
    other = models.mini(folder.parent / "other")
    models.run(other, folder / "mini.hfq", draft="drop")
    return good.parent / "source", other


def source_checks(found: list[dict[str, Any]]) -> dict[str, tuple[bool | None, bool]]:
    """Outcome of check "source" by the name of the target."""
    return {
        each["artifact"]["name"]: (check["ok"], check["judged"])
        for each in found
        for check in each["checks"]
        if check["name"] == "source"
    }


def test_each_artifact_is_compared_with_the_source_that_it_names(
    folder: Path, two: tuple[Path, Path]
) -> None:
    words = ["--source", two[0], "--source", two[1]]
    result = verify(folder, *words, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["targets"]
    assert source_checks(found) == {"flash.hfq": (True, True), "mini.hfq": (True, True)}
    for target in found[:2]:  # each against its own: no tensor was skipped
        (check,) = (check for check in target["checks"] if check["name"] == "source")
        assert check["figures"]["tensors"] == target["artifact"]["tensors"]
    flip(folder / "mini.hfq", (folder / "mini.hfq").stat().st_size - 1)
    red = reports(folder, *words)
    assert source_checks(red) == {"flash.hfq": (True, True), "mini.hfq": (False, True)}


def test_an_artifact_without_its_source_is_not_compared_and_says_so(
    folder: Path, two: tuple[Path, Path], tmp_path: Path
) -> None:
    xml = tmp_path / "r.xml"
    result = verify(folder, "--source", two[1], "--json", "--junit", xml)
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["ok"] is True
    assert source_checks(found["targets"]) == {"flash.hfq": (None, False), "mini.hfq": (True, True)}
    (note,) = found["targets"][0]["checks"][-1]["figures"]["notes"]
    assert note.startswith("not compared with a source: no --source has the fingerprint ")
    skipped = ElementTree.parse(xml).getroot().iter("skipped")
    assert [each.get("message") for each in skipped] == ["not compared"]
    line = f"{folder / 'flash.hfq'} ({(folder / 'flash.hfq').stat().st_size:,} bytes): "
    assert line + "ok; source not compared" in verify(folder, "--source", two[1]).stdout


def test_a_source_of_no_artifact_fails_by_name(
    folder: Path, two: tuple[Path, Path], tmp_path: Path
) -> None:
    (folder / "mini.hfq").unlink()
    receipt_path(folder / "mini.hfq").unlink()
    result = verify(folder, "--source", two[0], "--source", two[1])
    assert result.exit_code == 1
    unfit = f"{two[1]}: source: no artifact here was made from this checkpoint"
    assert result.stderr.splitlines() == [unfit]
    assert result.stdout.splitlines()[-1] == "3 targets: FAILED (1)"
    one = verify(folder / "flash.hfq", "--source", two[0], "--source", two[1])
    assert (one.exit_code, one.stderr.splitlines()) == (1, [unfit])
    gone = verify(folder, "--source", two[0], "--source", tmp_path / "gone")
    assert gone.exit_code == 1
    assert gone.stderr.startswith(f"{tmp_path / 'gone'}: source: ")


def test_a_source_is_not_blamed_for_an_artifact_that_cannot_be_read(
    folder: Path, two: tuple[Path, Path]
) -> None:
    (folder / "mini.hfq").write_bytes(b"HFQM")
    red = [each for each in reports(folder, "--source", two[0], "--source", two[1]) if failed(each)]
    assert [each["artifact"]["name"] for each in red] == ["mini.hfq"]


def test_a_receipt_names_the_source_of_an_artifact_that_does_not(
    folder: Path, two: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "own_metadata", lambda reader: None)
    found = reports(folder, "--source", two[0], "--source", two[1])
    assert source_checks(found) == {"flash.hfq": (True, True), "mini.hfq": (True, True)}
    receipt_path(folder / "mini.hfq").unlink()
    found = reports(folder, "--source", two[0])
    assert source_checks(found) == {"flash.hfq": (True, True), "mini.hfq": (None, False)}


def test_an_imatrix_is_for_the_artifacts_that_were_made_with_one(
    folder: Path, two: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, tuple[Any, Any]] = {}
    check = targets.api.verify

    def note(path: Path, **options: Any) -> Any:
        seen[path.name] = options.pop("imatrix"), options["errors_only"]
        return check(path, **options)

    monkeypatch.setattr(targets.api, "verify", note)
    monkeypatch.setattr(targets, "_made_with_imatrix", lambda path: path.name == "flash.hfq")
    verify(folder, "--source", two[0], "--source", two[1], "--imatrix", "i", "--errors-only")
    assert seen == {"flash.hfq": (Path("i"), True), "mini.hfq": (None, True)}


# ---------------------------------------------------------------- what is found


def test_artifacts_are_found_by_suffix_or_magic_and_nothing_else(tmp_path: Path) -> None:
    """A file that lost its magic must not drop out of the check with it."""
    for name in ("a.hfq", "sub/b.fp4mix", "c.mq2r"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"not what it is called")
    (tmp_path / "d.bin").write_bytes(b"HFQM and so on")
    (tmp_path / "e.bin").write_bytes(b"HFQ! and so on")
    for name in ("README.md", ".f.hfq", ".git/g.hfq", "h.hfq.partial", "i.gguf"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"HFQM" if "h" in name else b"x")
    os.mkfifo(tmp_path / "pipe")
    found = Targets.of([tmp_path])
    names = [path.relative_to(tmp_path).as_posix() for path in found.artifacts]
    assert names == ["a.hfq", "c.mq2r", "d.bin", "e.bin", "sub/b.fp4mix"]
    assert (found.receipts, found.documents, found.empty) == ((), (), ())


def test_registry_documents_are_told_from_other_json(good: Path, tmp_path: Path) -> None:
    whole = (good / "registry.json").read_text()
    texts = {
        "registry.json": "{",
        "my.registry.json": "",
        "any.json": whole,
        "config.json": '{"models": {}}',
        "list.json": "[1]",
        "broken.json": whole[:-9],
        "deep.json": "[" * 100_000,
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    found = [path.name for path in Targets.of([tmp_path]).documents]
    assert found == ["any.json", "my.registry.json", "registry.json"]


def test_a_folder_without_targets_is_red(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    (report,) = reports(tmp_path)
    assert failed(report) == ["folder"]
    assert "neither an artifact nor" in messages(report)[0]


def test_a_folder_may_be_a_link_and_links_to_files_are_followed(
    folder: Path, tmp_path: Path
) -> None:
    """As a download cache has them: names that lead to blobs elsewhere."""
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    (folder / "flash.hfq").rename(blobs / "1234")
    (folder / "flash.hfq").symlink_to(blobs / "1234")
    (tmp_path / "link").symlink_to(folder)
    assert verify(tmp_path / "link").exit_code == 0
    (blobs / "1234").unlink()
    red = reports(tmp_path / "link")
    assert [failed(each) for each in red] == [["structure"], [f"entry {TAG}"]]
    assert "broken link to" in messages(red[0])[0]


def test_a_link_to_a_folder_is_not_followed_and_named(folder: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    damaged = elsewhere / "damaged.hfq"
    damaged.write_bytes(b"HFQM, and then nothing")
    (folder / "more").symlink_to(elsewhere)
    result = verify(folder)
    assert result.exit_code == 0
    said = f"{folder / 'more'}: a link to a folder, which was not followed; name it to check it"
    assert result.stderr == f"ds4q: warning: {said}\n"
    assert verify(folder, folder / "more").exit_code == 1


def test_a_file_that_is_not_there_fails_and_the_others_are_still_checked(folder: Path) -> None:
    missing, artifact, registry = reports(folder / "no.hfq", folder)
    assert (failed(missing), artifact["ok"], registry["ok"]) == (["structure"], True, True)
    assert str(folder / "no.hfq") in messages(missing)[0]


def test_what_cannot_be_opened_as_a_file_is_red_and_nothing_hangs(folder: Path) -> None:
    (folder / "loop.hfq").symlink_to("loop.hfq")
    os.mkfifo(folder / "pipe.hfq")
    os.mkfifo(folder / "pipe.registry.json")
    (folder / "sub.hfq").mkdir()
    found = {Path(each["artifact"]["path"]).name: each for each in reports(folder)}
    assert len(found) == 5
    assert failed(found["loop.hfq"]) == failed(found["pipe.hfq"]) == ["structure"]
    assert failed(found["pipe.registry.json"]) == ["document"]
    assert found["flash.hfq"]["ok"]
    assert found["registry.json"]["ok"]


# ---------------------------------------------------------------- receipts


def test_a_receipt_stands_for_its_artifact(folder: Path) -> None:
    flip(folder / "flash.hfq", 5000)
    result = verify(folder / "flash.hfq.receipt", "--json")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert document["artifact"]["path"] == str(folder / "flash.hfq")
    assert failed(document) == ["receipt"]


def test_a_receipt_alone_is_read_and_the_registry_held_to_it(folder: Path) -> None:
    """An artifact of 150 GB stays where it is; receipt and registry go through CI."""
    (folder / "flash.hfq").unlink()
    receipt, registry = reports(folder)
    assert receipt["artifact"]["kind"] == "receipt"
    assert (receipt["ok"], registry["ok"]) == (True, True)
    put_registry(folder, sha256="0" * 64)
    _, registry = reports(folder)
    assert failed(registry) == [f"entry {TAG}"]
    assert any("receipt of another artifact" in line for line in messages(registry))
    (folder / "flash.hfq.receipt").write_bytes(b"x")
    receipt, _ = reports(folder)
    assert failed(receipt) == ["receipt"]


def test_a_receipt_may_be_required(folder: Path) -> None:
    receipt_path(folder / "flash.hfq").unlink()
    artifact = folder / "flash.hfq"
    assert verify(artifact).exit_code == 0
    document = json.loads(verify(artifact, "--require-receipt", "--json").stdout)
    assert failed(document) == ["receipt"]
    assert [failed(each) for each in reports(folder, "--require-receipt")] == [["receipt"], []]


# ---------------------------------------------------------------- registry


def test_an_entry_is_held_to_what_the_artifacts_own_pass_has_hashed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """150 GB are read once."""
    receipt_path(folder / "flash.hfq").unlink()  # then only the registry asks for the digest
    put_registry(folder, receipt=None)

    def never(path: Path, **options: Any) -> str:
        raise AssertionError(f"{path} is read again")

    monkeypatch.setattr(targets, "digest_of", never)
    artifact, registry = reports(folder)
    assert (artifact["ok"], registry["ok"]) == (True, True)
    sha256 = models.digests(folder, "flash.hfq")["flash.hfq"]
    assert registry["checks"][1]["figures"]["sha256"] == sha256
    put_registry(folder, receipt=None, sha256="0" * 64)
    _, registry = reports(folder)
    assert failed(registry) == [f"entry {TAG}"]


def test_entries_without_files_here_are_counted_and_not_failed(folder: Path) -> None:
    (folder / "flash.hfq").unlink()
    (folder / "flash.hfq.receipt").unlink()
    (registry,) = reports(folder)
    assert registry["ok"]
    assert registry["checks"][0]["figures"]["with_files_here"] == 0


def test_one_artifact_is_held_to_a_tag(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS4Q_REGISTRY_URL", str(folder / "registry.json"))
    artifact = folder / "flash.hfq"
    result = verify(artifact, "--registry", TAG, "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["checks"][-1]["name"] == "registry"
    put_registry(folder, size_bytes=artifact.stat().st_size + 1)
    document = json.loads(verify(artifact, "--registry", TAG, "--json").stdout)
    assert failed(document) == ["registry"]
    found = document["checks"][-1]["failures"][0]
    size = artifact.stat().st_size
    assert (found["expected"], found["found"]) == (size + 1, size)
    assert "sha256" not in document["checks"][-1]["figures"], "size before hash"
    unknown = verify(artifact, "--registry", TAG[:-1])
    assert (unknown.exit_code, unknown.stdout) == (1, "")
    assert f"did you mean {TAG}" in unknown.stderr


def test_a_damaged_artifact_is_still_hashed_for_its_tag(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS4Q_REGISTRY_URL", str(folder / "registry.json"))
    flip(folder / "flash.hfq", 40)
    document = json.loads(verify(folder / "flash.hfq", "--registry", TAG, "--json").stdout)
    assert failed(document) == ["structure", "registry"]
    assert any("SHA-256" in line for line in messages(document))


def test_walk_is_asked_for_a_digest_only_where_somebody_wants_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def watch(*arguments: Any, sha256: bool, **options: Any) -> str | None:
        asked.append(sha256)
        return walk(*arguments, sha256=sha256, **options)

    monkeypatch.setattr("ds4q.api.walk", watch)
    receipt_path(folder / "flash.hfq").unlink()
    verify(folder / "flash.hfq")
    verify(folder)
    assert asked == [False, True]


# ---------------------------------------------------------------- stale entries, partial files


def stale(case: str, folder: Path) -> dict[str, Any]:
    """Make the case; the keys of the entry that change."""
    artifact = folder / "flash.hfq"
    sha256 = models.digests(folder, "flash.hfq")["flash.hfq"]
    size = artifact.stat().st_size
    if case == "cut by one byte":
        os.truncate(artifact, size - 1)
    elif case == "rebuilt since":
        (folder / "source").mkdir()
        source = models.save(
            folder / "source", models.expert_tensors(seed=1), config=models.EXPERT_CONFIG
        )
        models.run(source, artifact, force=True)
        shutil.rmtree(source)
    changes: dict[str, dict[str, Any]] = {
        "wrong digest": {"sha256": "0" * 64},
        "longer by one": {"size_bytes": size + 1},
        "upper case": {"sha256": sha256.upper()},
        "prefixed": {"sha256": f"sha256:{sha256}"},
        "63 digits": {"sha256": sha256[:-1]},
        "size as text": {"size_bytes": str(size)},
    }
    return changes.get(case, {})


@pytest.mark.parametrize(
    ("case", "check", "says"),
    [
        ("wrong digest", "entry", "SHA-256 of flash.hfq differs from its registry entry"),
        ("longer by one", "entry", "flash.hfq is incomplete: {size} of {more} bytes"),
        ("cut by one byte", "entry", "flash.hfq is incomplete: {less} of {size} bytes"),
        ("rebuilt since", "entry", "its registry entry"),
        ("upper case", "document", "sha256: bad value"),
        ("prefixed", "document", "sha256: bad value"),
        ("63 digits", "document", "sha256: bad value"),
        ("size as text", "document", "size_bytes: bad value"),
    ],
)
def test_stale_entries_and_partial_files_are_told_apart_and_nothing_is_touched(
    case: str, check: str, says: str, folder: Path
) -> None:
    size = (folder / "flash.hfq").stat().st_size
    put_registry(folder, **stale(case, folder))
    before = models.digests(folder)
    found = reports(folder)[-1]
    assert models.digests(folder) == before, "nothing is deleted, renamed or mended"
    wanted = check if check == "document" else f"entry {TAG}"
    assert wanted in failed(found)
    failures = [each for c in found["checks"] if c["name"] == wanted for each in c["failures"]]
    said = says.format(size=size, more=size + 1, less=size - 1)
    (failure,) = [each for each in failures if said in each["message"]][:1]
    assert TAG in failure["message"]
    assert failure["found"] is not None
    assert failure["expected"] is not None
    sizes_differ = "bytes" in said or case == "rebuilt since"
    figures: dict[str, Any] = next(
        (c["figures"] for c in found["checks"] if c["name"] == wanted), {}
    )
    assert ("sha256" in figures) == (check == "entry" and not sizes_differ), "size before hash"
