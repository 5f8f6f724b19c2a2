"""ds4q registry add and rm, quantize --register: asking first, repeating, no file lost."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from ds4q.artifact.hfq import Reader
from ds4q.cli import main
from ds4q.registry.entries import load_registry
from ds4q.runtime.experts.adapter import (
    NORMALISATION,
    STATE,
    TARGET,
    About,
    Adapter,
    Entry,
)
from ds4q.runtime.experts.trace import artifact_identity
from tests.cli.registry_words import TAG, names, refused, registry, told
from tests.quantize import models
from tests.quantize.damage import flip
from tests.registry.shelves import made, sidecar


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("original") / "o").parent


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DS4Q_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def file(original: Path, home: Path) -> Path:
    """x.hfq in the models folder, with receipt and draft."""
    return Path(shutil.copytree(original, home / "models")) / "x.hfq"


@pytest.fixture
def added(file: Path) -> Path:
    """The same, registered under ``TAG``."""
    assert registry("add", file, "--tag", TAG, "-q").exit_code == 0
    return file


# ---------------------------------------------------------------- add


def test_add_registers_and_repeats(file: Path, home: Path) -> None:
    first = told("add", file, "--tag", TAG)
    assert (first["new"], first["registry"]) == (True, str(home / "registry.json"))
    again = told("add", file)
    assert (again["tag"], again["new"], again["changed"]) == (TAG, False, [])
    result = registry("add", file, "--desc", "mine")
    assert result.stdout.splitlines()[0].startswith(f"changed (desc) {TAG}: x.hfq, fp4, ")
    assert registry("add", file).stdout.startswith(f"unchanged {TAG}: ")
    assert "  dspark     x-dspark.hfq" in result.stdout
    assert load_registry(offline=True).resolve(TAG).desc == "mine"


def test_add_takes_the_name_for_a_tag(file: Path) -> None:
    assert told("add", file)["tag"] == "x"


def test_add_dry_run_writes_nothing(file: Path, home: Path) -> None:
    assert told("add", file, "--dry-run")["new"] is True
    assert not (home / "registry.json").exists()


def test_add_dry_run_says_what_it_would_do(file: Path) -> None:
    assert registry("add", file, "--dry-run").stdout.startswith("would register x: x.hfq, ")
    assert registry("add", file).stdout.startswith("registered x: x.hfq, ")
    result = registry("add", file, "--desc", "mine", "--dry-run")
    assert result.stdout.startswith("would change (desc) x: ")
    assert registry("add", file, "--dry-run").stdout.startswith("unchanged x: ")


def test_add_advises_the_path_that_it_was_given(added: Path, tmp_path: Path) -> None:
    other = made(tmp_path / "else where", "y.hfq", seed=1)
    advised = f"ds4q registry add '{other}' --tag {TAG} --force"
    assert refused("add", other, "--tag", TAG).endswith(advised)
    result = quantize(tmp_path / "no", "-o", tmp_path / "z.hfq", "--register", TAG)
    assert f"ds4q registry add {tmp_path / 'z.hfq'} --tag {TAG} --force" in result.stderr


def test_add_refuses_what_verify_refuses(file: Path, home: Path) -> None:
    with file.open("ab") as grown:
        grown.write(bytes(5))
    assert CliRunner().invoke(main, ["verify", str(file)]).exit_code == 1
    line = refused("add", file, "-q")
    assert line.startswith(f"{file}: the file is not sound: ")
    assert line.endswith(f"see ds4q verify {file}")
    assert not (home / "registry.json").exists()


@pytest.mark.parametrize("words", [["add", "x.hfq"], ["list"], ["rm", "deepseek-v4-flash"]])
def test_a_models_folder_that_is_a_file_is_called_so(words: list[str], added: Path) -> None:
    words = [str(added) if word == "x.hfq" else word for word in words]
    result = registry(*words, "--models-dir", added)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"'{added}' is not a folder" in result.stderr


def test_add_says_where_models_are_looked_for(original: Path, home: Path) -> None:
    result = registry("add", original / "x.hfq")
    assert result.exit_code == 0
    assert f"{original / 'x.hfq'} is not in {home / 'models'}" in result.stderr
    assert "is not in" not in registry("add", original / "x.hfq", "--models-dir", original).stderr


def test_add_writes_into_a_named_document(file: Path, tmp_path: Path, home: Path) -> None:
    mine = tmp_path / "mine.json"
    assert told("add", file, "--tag", TAG, "--registry", mine)["registry"] == str(mine)
    assert told("add", file, "--tag", "other", "--registry", mine)["new"]
    assert set(load_registry(str(mine)).entries) == {TAG, "other"}
    assert not (home / "registry.json").exists()
    usage = registry("add", file, "--registry", "https://127.0.0.1/x.json")
    assert (usage.exit_code, usage.stdout) == (2, "")


def test_add_refuses_an_adapter_of_another_model(file: Path) -> None:
    adapter = file.with_name("a.bin")
    adapter.write_bytes(b"HFADPT\0\0 and so on, but not an adapter")
    assert str(adapter) in refused("add", file, "--adapter", adapter)


def test_an_adapter_is_registered_with_its_own_model(
    tiny_artifact: Path, tmp_path: Path, home: Path
) -> None:
    with Reader(tiny_artifact) as reader:
        identity = artifact_identity(reader)
        config = reader.metadata["config"]
    d, experts = config["hidden_size"], config["n_routed_experts"]
    about = About(identity, STATE, TARGET, NORMALISATION, 0.5, 5, ("x",))
    a, b = np.zeros((2, d), np.float32), np.zeros((experts, 2), np.float32)
    zeros = Entry(a, b, np.zeros(experts, np.float32))
    adapter, other = tmp_path / "a.bin", replace(about, artifact="0" * 32)
    adapter.write_bytes(Adapter({0: zeros}, other).encode())
    assert "another artifact" in refused("add", tiny_artifact, "--adapter", adapter)
    adapter.write_bytes(Adapter({0: zeros}, about).encode())
    (home / "models").mkdir(parents=True)
    for path in (tiny_artifact, adapter):
        shutil.copy(path, home / "models")
    file, tag = home / "models" / tiny_artifact.name, tiny_artifact.stem
    assert told("add", file, "--adapter", adapter)["entry"]["adapter"]["file"] == "a.bin"
    assert told("verify", tag)["checks"][1]["figures"]["sidecars"] == 1
    adapter.write_bytes(Adapter({0: zeros}, other).encode())
    shutil.copy(adapter, home / "models")
    own = json.loads((home / "registry.json").read_text())
    own["models"][tag]["adapter"] = sidecar("a.bin", adapter.read_bytes())
    (home / "registry.json").write_text(json.dumps(own))
    assert "of another artifact" in registry("verify", tag).stderr


def test_add_refuses_what_is_no_artifact(file: Path) -> None:
    assert "No such file" in refused("add", file.with_name("gone.hfq"))
    os.truncate(file, file.stat().st_size - 1)
    assert str(file) in refused("add", file)


def test_a_home_that_cannot_be_written_is_one_line(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in the way").write_bytes(b"")
    monkeypatch.setenv("DS4Q_HOME", str(tmp_path / "in the way" / "home"))
    assert "Not a directory" in refused("add", original / "x.hfq")


# ---------------------------------------------------------------- rm


def test_rm_lists_asks_and_removes(added: Path) -> None:
    sizes = {name: (added.parent / name).stat().st_size for name in names(added.parent)}
    gone = {"x.hfq", "x.hfq.receipt", "x-dspark.hfq", "x-dspark.hfq.receipt"}
    result = registry("rm", TAG, text="y\n")
    assert result.exit_code == 0
    for name in gone:
        assert f"remove {added.parent / name}: {sizes[name]:,} bytes" in result.stdout
    assert "Remove 4 files" in result.stderr
    assert names(added.parent) == set()
    assert registry("rm", TAG, "--yes").stdout == f"nothing to remove in {added.parent}\n"


@pytest.mark.parametrize("answer", ["n\n", "\n", "", "yesterday\n"])
def test_rm_without_a_yes_removes_nothing(added: Path, answer: str) -> None:
    before = names(added.parent)
    result = registry("rm", TAG, text=answer)
    assert result.exit_code == 1
    assert result.stderr.endswith("nothing was removed\n")
    assert names(added.parent) == before


def test_rm_dry_run_only_lists(added: Path) -> None:
    before = names(added.parent)
    result = registry("rm", TAG, "--dry-run", "--forget")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "would remove" in result.stdout
    assert f"would forget {TAG}" in result.stdout
    assert names(added.parent) == before
    assert load_registry(offline=True).local == {TAG}


def test_rm_as_json_does_not_ask(added: Path) -> None:
    usage = registry("rm", TAG, "--json")
    assert (usage.exit_code, usage.stdout) == (2, "")
    assert told("rm", TAG, "--dry-run")["removed"] == []
    found = told("rm", TAG, "--yes")
    assert sorted(found["removed"]) == [
        "x-dspark.hfq", "x-dspark.hfq.receipt", "x.hfq", "x.hfq.receipt",
    ]  # fmt: skip
    assert [file["file"] for file in found["files"]] == found["removed"]


def test_rm_keeps_the_entry_unless_asked_to_forget_it(added: Path) -> None:
    assert told("rm", TAG, "--yes")["forgotten"] == []
    assert load_registry(offline=True).local == {TAG}
    assert told("rm", TAG, "--yes", "--forget")["forgotten"] == [TAG]
    assert load_registry(offline=True).local == set()
    published = registry("rm", "deepseek-v4-flash", "--yes", "--forget")
    assert published.stdout.startswith("nothing to remove")
    named = registry("rm", TAG, "--yes", "--forget", "--registry", added.parents[1] / "x.json")
    assert named.exit_code == 2


def test_rm_says_what_another_tag_keeps(added: Path) -> None:
    registry("add", added, "--tag", "second")
    result = registry("rm", TAG, "--yes")
    assert f"keep {added}: second needs it" in result.stdout
    assert added.exists()
    assert f"{TAG}: x.hfq goes when the last of its tags is removed" in result.stdout
    assert registry("rm", "second", "--yes").exit_code == 0
    assert names(added.parent) == set()


def test_rm_of_a_file_without_a_tag_says_how_it_was_found(file: Path) -> None:
    result = registry("rm", "x.hfq", "--yes")
    assert "found by its name" in result.stdout
    assert names(file.parent) == set()


def test_rm_leaves_links_alone(added: Path, tmp_path: Path) -> None:
    os.rename(added, tmp_path / "elsewhere")
    added.symlink_to(tmp_path / "elsewhere")
    assert "a symbolic link" in refused("rm", TAG, "--yes")
    assert added.is_symlink()
    assert (tmp_path / "elsewhere").exists()


# ---------------------------------------------------------------- quantize --register


def quantize(*words: object) -> Result:
    return CliRunner().invoke(main, ["quantize", *map(str, words), "--allow-partial", "-q"])


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return models.mini(tmp_path / "source")


def test_quantize_registers_what_it_made(source: Path, home: Path) -> None:
    (home / "models").mkdir(parents=True)
    out = home / "models" / "x.hfq"
    result = quantize(source, "-o", out, "--register", TAG)
    assert result.exit_code == 0, result.output
    assert f"registered {TAG}: x.hfq" in result.stdout
    made_once = load_registry(offline=True).resolve(TAG)
    assert made_once.sha256 == hashlib.sha256(out.read_bytes()).hexdigest()
    assert [s.kind for s in made_once.sidecars] == ["receipt", "dspark_receipt", "dspark"]
    assert told("add", out)["changed"] == []  # what `registry add` computes is the same
    assert told("verify", TAG)["ok"] is True
    again = quantize(source, "-o", out, "--register", TAG, "--resume", "--json")
    registered_again = json.loads(again.stdout)["registered"]
    assert (registered_again["tag"], registered_again["changed"]) == (TAG, [])


def test_a_finished_job_is_hashed_before_it_is_registered(source: Path, home: Path) -> None:
    (home / "models").mkdir(parents=True)
    out = home / "models" / "x.hfq"
    assert quantize(source, "-o", out).exit_code == 0
    flip(out, out.stat().st_size - 3)
    result = quantize(source, "-o", out, "--register", TAG, "--resume")
    assert result.exit_code == 1
    assert "receipt" in result.stderr.splitlines()[-1]
    assert "make it again with --force" in result.stderr
    assert load_registry(offline=True).local == set()


@pytest.mark.parametrize("tag", ["deepseek-v4-flash", "deepseek4", "deepseek-v4-flash-lite", "a b"])
def test_a_tag_that_is_taken_is_refused_before_any_work(
    source: Path, tmp_path: Path, tag: str
) -> None:
    out = tmp_path / "x.hfq"
    for more in ([], ["--dry-run"]):
        result = quantize(source, "-o", out, "--register", tag, *more)
        assert (result.exit_code, result.stdout) == (1, "")
        assert len(result.stderr.splitlines()) == 1
        assert not out.exists()


def test_a_dry_run_registers_nothing(source: Path, tmp_path: Path, home: Path) -> None:
    result = quantize(source, "-o", tmp_path / "x.hfq", "--register", TAG, "--dry-run")
    assert result.exit_code == 0
    assert not home.exists()


def test_a_registry_that_fails_costs_no_artifact(
    source: Path, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "x.hfq"
    home.write_bytes(b"in the way")
    result = quantize(source, "-o", out, "--register", TAG)
    assert result.exit_code == 1
    assert f"wrote {out}: " in result.stdout
    first, second = [line for line in result.stderr.splitlines() if "warning" not in line]
    assert (
        first == f"the artifact is written; register it with: ds4q registry add {out} --tag {TAG}"
    )
    assert second.startswith("ds4q: error: ")
    assert out.exists()


def test_a_stale_draft_beside_the_artifact_is_not_registered(
    source: Path, home: Path, tmp_path: Path
) -> None:
    (home / "models").mkdir(parents=True)
    other = made(tmp_path / "other", seed=1).with_name("x-dspark.hfq")
    shutil.copy(other, home / "models")
    out = home / "models" / "x.hfq"
    result = quantize(source, "-o", out, "--register", TAG, "--dspark", "drop")
    assert result.exit_code == 0, result.output
    assert [s.kind for s in load_registry(offline=True).resolve(TAG).sidecars] == ["receipt"]
