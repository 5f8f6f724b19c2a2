"""Registering an artifact: what is computed, what is kept, what is refused, and that it repeats."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds4q.artifact.errors import ArtifactError, ReceiptError
from ds4q.artifact.files import AppearedError
from ds4q.registry import add as module
from ds4q.registry.add import Added, AddError, Wish, add, check_early, default_tag, forget
from ds4q.registry.entries import Registry, load_registry, read_document
from ds4q.registry.errors import DocumentError, UnknownQuantError, UnsafeNameError
from ds4q.registry.pull import pull
from ds4q.registry.schema import canonical
from ds4q.registry.verify import SidecarError
from tests.artifact import build
from tests.checks import check_refused
from tests.quantize import models
from tests.quantize.damage import flip
from tests.registry.documents import document, entry
from tests.registry.shelves import made, registry_of

TAG = "mini:fp4"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with x.hfq, its receipt, its draft and the draft's receipt."""
    return made(tmp_path_factory.mktemp("original") / "o").parent


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of one's own, so that a test's entries are not another's."""
    monkeypatch.setenv("DS4Q_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def file(original: Path, home: Path) -> Path:
    return Path(shutil.copytree(original, home / "models")) / "x.hfq"


@pytest.fixture
def local(home: Path) -> Path:
    return home / "registry.json"


def added(local: Path, file: Path, wish: Wish | None = None, **options: Any) -> Added:
    return add(load_registry(offline=True), local, file, wish or Wish(TAG), **options)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def told(path: Path) -> dict[str, object]:
    """A sidecar as the entry has it."""
    return {"file": path.name, "sha256": sha256(path), "size_bytes": path.stat().st_size}


# ---------------------------------------------------------------- what is computed


def test_an_entry_is_computed_from_the_file(file: Path, local: Path) -> None:
    done = added(local, file)
    assert done.was is None
    assert done.entry == {
        "repo": "",
        "file": "x.hfq",
        "sha256": sha256(file),
        "size_bytes": file.stat().st_size,
        "size_gb": pytest.approx(file.stat().st_size / 1e9, rel=0.005),
        "min_vram_gb": pytest.approx(file.stat().st_size / 1e9, rel=0.01),
        "arch_id": 9,
        "quant": "fp4",
        "quant_recipe": "fp4",
        "desc": "DeepSeek V4 as fp4, recipe fp4, a part of the model only",
        "receipt": told(file.with_name("x.hfq.receipt")),
        "dspark": told(file.with_name("x-dspark.hfq")),
        "dspark_receipt": told(file.with_name("x-dspark.hfq.receipt")),
    }
    assert done.entry["min_vram_gb"] * 1e9 >= file.stat().st_size
    registry = load_registry(offline=True)
    assert registry.resolve(TAG) == registry.resolve("x.hfq")
    assert registry.resolve(TAG).sha256 == sha256(file)
    assert registry.local == {TAG}
    assert not registry.warnings


@pytest.mark.parametrize("change", ["added", "forgotten"])
def test_a_document_that_was_edited_meanwhile_is_kept(
    change: str, file: Path, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    added(local, file, Wish("mini:a"))
    added(local, file, Wish("mini:b"))

    def edited(value: Any) -> str:
        local.write_text(local.read_text() + "\n")  # by an editor, say, which takes no lock
        return canonical(value)

    monkeypatch.setattr(module, "canonical", edited)
    before = local.read_text()
    changes = {"added": lambda: added(local, file), "forgotten": lambda: forget(local, "mini:a")}
    check_refused(AppearedError, changes[change], path=local)
    assert local.read_text().rstrip() == before.rstrip()


def test_a_document_that_was_edited_meanwhile_outlives_its_last_tag(
    file: Path, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    added(local, file, Wish("mini:a"))
    after = module._after

    def edited(*arguments: Any) -> Any:
        found = after(*arguments)
        local.write_text(local.read_text() + "\n")
        return found

    monkeypatch.setattr(module, "_after", edited)
    says = ["edited meanwhile", "run the command again"]
    check_refused(AppearedError, lambda: forget(local, "mini:a"), path=local, says=says)
    assert "mini:a" in local.read_text()


def test_again_changes_nothing(file: Path, local: Path) -> None:
    added(local, file)
    before = local.read_bytes(), local.stat().st_mtime_ns
    done = added(local, file)
    assert (done.changed, done.was) == ((), done.entry)
    assert (local.read_bytes(), local.stat().st_mtime_ns) == before


def test_the_entry_depends_neither_on_folder_nor_on_time(
    original: Path, tmp_path: Path, home: Path
) -> None:
    found = []
    for name in ("a", "b/c"):
        copy = shutil.copytree(original, tmp_path / name)
        os.utime(copy / "x.hfq", (5, 5))
        found.append(added(tmp_path / f"{copy.name}.json", copy / "x.hfq").entry)
    assert found[0] == found[1]
    assert str(tmp_path) not in json.dumps(found)


def test_a_file_made_anew_is_registered_anew(file: Path, local: Path) -> None:
    before = added(local, file).entry
    for path in file.parent.iterdir():
        path.unlink()
    made(file.parent, seed=1)
    done = added(local, file)
    assert done.changed == ("dspark", "dspark_receipt", "receipt", "sha256")
    assert done.entry["sha256"] == sha256(file) != before["sha256"]
    assert load_registry(offline=True).resolve(TAG).sha256 == sha256(file)


def test_words_of_people_are_kept_and_can_be_changed(file: Path, local: Path) -> None:
    added(local, file, Wish(TAG, desc="mine", min_vram_gb=7))
    assert added(local, file).changed == ()
    done = added(local, file, Wish(TAG, desc="yours"))
    assert done.changed == ("desc",)
    assert (done.entry["desc"], done.entry["min_vram_gb"]) == ("yours", 7)


def test_words_of_nobody_follow_the_bytes(file: Path, local: Path, tmp_path: Path) -> None:
    added(local, file)
    for path in file.parent.iterdir():
        path.unlink()
    models.run(models.mini(tmp_path / "source"), file, recipe="fp4-q8")
    done = added(local, file)
    assert done.entry["desc"] == "DeepSeek V4 as fp4q8, recipe fp4-q8, a part of the model only"
    assert done.entry["min_vram_gb"] * 1e9 >= file.stat().st_size
    assert {"desc", "min_vram_gb", "quant", "quant_recipe", "sha256"} <= set(done.changed)


def test_settings_typed_into_the_own_registry_are_kept(file: Path, local: Path) -> None:
    added(local, file)
    text = json.loads(local.read_text())
    text["_comment"] = "mine"
    text["aliases"] = {"m": TAG}
    text["models"][TAG]["default_kv_mode"] = "f32"
    text["models"][TAG]["sha256"] = "0" * 64
    local.write_text(json.dumps(text))
    assert added(local, file).changed == ("sha256",)
    after = json.loads(local.read_text())
    assert (after["_comment"], after["aliases"]) == ("mine", {"m": TAG})
    assert after["models"][TAG]["default_kv_mode"] == "f32"


def test_our_published_name_may_be_filled_in(file: Path, local: Path) -> None:
    """The bundled entry of a file that nobody hosts yet: its words stay, its bytes are ours."""
    done = added(local, file, Wish("deepseek-v4-flash:fp4"))
    bundled = load_registry("registry/registry.json").entries["deepseek-v4-flash:fp4"]
    assert done.entry["desc"] == bundled.desc
    assert done.entry["file"] == "x.hfq"
    assert load_registry(offline=True).resolve("deepseek-v4-flash:fp4").sha256 == sha256(file)


def test_sampling_comes_from_the_artifact(home: Path, local: Path) -> None:
    home.mkdir()
    metadata = b'{"config":{},"generation_config":{"temperature":1.0,"top_p":0.5,"top_k":7}}'
    (home / "a.mq2r").write_bytes(build.File(metadata=metadata).data())
    assert added(local, home / "a.mq2r").entry["sampling"] == {"temperature": 1.0, "top_p": 0.5}
    for odd in (b"3", b'"1"', b"true", b"-1"):
        (home / "b.mq2r").write_bytes(build.File(metadata=metadata.replace(b"1.0", odd)).data())
        assert "sampling" not in added(local, home / "b.mq2r", Wish("b"), dry_run=True).entry


def test_a_file_of_another_program_is_read_by_its_name(home: Path, local: Path) -> None:
    home.mkdir()
    (home / "a.mq2r").write_bytes(build.File().data())
    done = added(local, home / "a.mq2r")
    assert (done.entry["quant"], done.entry["arch_id"]) == ("mq2r", 9)
    assert "quant_recipe" not in done.entry
    assert done.warnings == (
        f"{home / 'a.mq2r.receipt'} is not there: registered without a receipt",
    )
    (home / "a.xyz").write_bytes(build.File().data())
    check_refused(UnknownQuantError, lambda: added(local, home / "a.xyz", Wish("other")))


def test_digests_of_a_caller_are_used(file: Path, local: Path) -> None:
    asked: list[str] = []

    def digest(path: Path) -> str:
        asked.append(path.name)
        return sha256(path)

    added(local, file, sha256=digest)
    assert sorted(asked) == ["x-dspark.hfq", "x-dspark.hfq.receipt", "x.hfq", "x.hfq.receipt"]


def test_a_name_that_is_not_utf8_is_registered_found_and_pulled(
    file: Path, local: Path, tmp_path: Path
) -> None:
    odd = file.with_name("x\udcff.hfq")
    for suffix in ("", ".receipt"):
        os.rename(f"{file}{suffix}", f"{odd}{suffix}")
    check_refused(AddError, lambda: added(local, odd, Wish("x\udcff")), says=["--tag"])
    done = added(local, odd, Wish("odd:fp4", drafts=()))
    assert done.entry["file"] == "$'x\\xff.hfq'"
    known = load_registry(offline=True).resolve(odd.name)
    assert (known.tag, known.file) == ("odd:fp4", odd.name)
    assert known.sidecars[0].file == odd.name + ".receipt"
    served = replace(known, repo=file.parent.as_uri())
    assert {f.state for f in pull(served, tmp_path / "m").files} == {"fetched"}
    assert (tmp_path / "m" / odd.name).read_bytes() == odd.read_bytes()


def test_names_that_differ_in_case_only_are_refused(file: Path, local: Path) -> None:
    added(local, file)
    other = file.with_name("X.hfq")
    os.rename(file, other)
    check_refused(AddError, lambda: added(local, other, Wish("other")), says=["in case or accents"])


def test_a_full_disk_is_told_with_the_file(
    file: Path, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as caught:
        added(local, file)
    assert caught.value.filename == str(local)
    assert [path.name for path in local.parent.iterdir()] == ["models"]


def test_a_dry_run_writes_nothing(file: Path, local: Path) -> None:
    done = added(local, file, dry_run=True)
    assert (done.was, done.entry["sha256"]) == (None, sha256(file))
    assert not local.exists()


def test_a_tag_has_a_default(file: Path, local: Path) -> None:
    assert default_tag(load_registry(offline=True), "x.hfq") == "x"
    added(local, file)
    assert default_tag(load_registry(offline=True), "x.hfq") == TAG


# ---------------------------------------------------------------- sidecars


def test_a_draft_for_another_trunk_is_refused(file: Path, local: Path, tmp_path: Path) -> None:
    other = made(tmp_path / "other", seed=1)
    shutil.copy(other.with_name("x-dspark.hfq"), file.parent)
    draft = file.with_name("x-dspark.hfq")
    check_refused(
        SidecarError, lambda: added(local, file), path=draft, says=["draft for another trunk"]
    )
    assert not local.exists()


def test_a_trunk_is_no_draft(file: Path, local: Path) -> None:
    shutil.copy(file, file.with_name("x-dspark.hfq"))
    check_refused(SidecarError, lambda: added(local, file), says=["not a draft model"])


def test_a_draft_of_another_architecture_is_refused(file: Path, local: Path) -> None:
    tensors = (build.Tensor("mtp.0.weight"),)
    file.with_name("x-dspark.hfq").write_bytes(build.File(tensors, arch_id=5).data())
    check_refused(SidecarError, lambda: added(local, file), says=["expected arch_id 9, found 5"])


def test_a_draft_that_names_no_source_is_taken_by_its_bytes(file: Path, local: Path) -> None:
    draft = file.with_name("x-dspark.hfq")
    draft.write_bytes(build.File((build.Tensor("mtp.0.weight"),)).data())
    receipt = file.with_name("x-dspark.hfq.receipt")
    check_refused(SidecarError, lambda: added(local, file), path=receipt)  # of the other draft
    receipt.unlink()
    entry = added(local, file).entry
    assert (entry["dspark"], "dspark_receipt" in entry) == (told(draft), False)


def test_a_draft_is_not_registered_for_a_model(file: Path, local: Path) -> None:
    draft = file.with_name("x-dspark.hfq")
    check_refused(AddError, lambda: added(local, draft), path=draft, says=["register its trunk"])


def test_only_drafts_that_were_named_are_registered(file: Path, local: Path) -> None:
    assert "dspark" not in added(local, file, Wish(TAG, drafts=())).entry
    named = Wish(TAG, drafts=[file.with_name("x-dspark.hfq")])
    assert added(local, file, named).changed == ("dspark", "dspark_receipt")
    odd = file.with_name("y-dspark.hfq")
    check_refused(AddError, lambda: added(local, file, Wish(TAG, drafts=[odd])), path=odd)


def test_a_draft_of_a_longer_name_is_not_taken(file: Path, local: Path) -> None:
    os.rename(file.with_name("x-dspark.hfq"), file.with_name("x-0731-dspark.hfq"))
    assert "dspark" not in added(local, file).entry


def test_an_mtp_draft_does_not_pair_with_0731(file: Path, local: Path) -> None:
    os.rename(file.with_name("x-dspark.hfq"), file.with_name("x-mtp.hfq"))
    assert "mtp" in added(local, file).entry
    wish = Wish("deepseek-v4-flash-0731:mini")
    check_refused(AddError, lambda: added(local, file, wish), says=["MTP draft does not pair"])


def test_a_receipt_of_another_file_is_refused(file: Path, local: Path) -> None:
    receipt = file.with_name("x.hfq.receipt")
    shutil.copy(file.with_name("x-dspark.hfq.receipt"), receipt)
    check_refused(
        SidecarError, lambda: added(local, file), path=receipt, says=["receipt of another artifact"]
    )
    receipt.write_bytes(b"no receipt")
    check_refused(ReceiptError, lambda: added(local, file), path=receipt)


def test_a_damaged_file_does_not_get_by_its_receipt(file: Path, local: Path) -> None:
    flip(file, file.stat().st_size - 1)
    check_refused(SidecarError, lambda: added(local, file), says=[sha256(file)])
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ArtifactError):
        added(local, file)
    assert not local.exists()


def test_an_adapter_is_registered_if_it_is_the_models(file: Path, local: Path) -> None:
    adapter = file.with_name("a.bin")
    adapter.write_bytes(b"adapter")
    asked: list[tuple[Path, Path]] = []
    wish = Wish(TAG, adapter=adapter)
    done = added(local, file, wish, check_adapter=lambda a, t: asked.append((a, t)))
    assert done.entry["adapter"] == told(adapter)
    assert asked == [(adapter, file)]
    assert done.warnings == ()
    away = adapter.rename(file.parents[1] / "a.bin")
    done = added(local, file, replace(wish, adapter=away))
    assert done.warnings == (f"{away} has to lie beside {file} to be found",)
    away.rename(adapter)

    def refuse(path: Path, trunk: Path) -> None:
        raise SidecarError("of another model", path=path)

    check_refused(SidecarError, lambda: added(local, file, wish, check_adapter=refuse))


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("tag", "says"),
    [
        ("deepseek-v4-flash", "publishes"),
        ("deepseek4", "is an alias of 'deepseek-v4-flash'"),
        ("deepseek-v4-flash-lite", "maps to no architecture"),
        ("deepseek-v4-flash-", "maps to no architecture"),
        ("DeepSeek-V4-Flash", "maps to no architecture"),
        ("qwen3:mini", "is not that of the tag"),
        ("a b", "bad value"),
        ("../x", "bad value"),
        ("", "bad value"),
        ("deepseek-v4-flash-0731.mq2r", "also a name of"),
    ],
)
def test_tags_that_mean_something_else_are_refused(
    file: Path, local: Path, tag: str, says: str
) -> None:
    check_refused(AddError, lambda: added(local, file, Wish(tag)), says=[says])
    check_refused(
        AddError, lambda: check_early(load_registry(offline=True), "x.hfq", tag, 9), says=[says]
    )
    assert not local.exists()


def test_good_tags_are_not_refused_early(home: Path) -> None:
    for tag in (TAG, "deepseek-v4-flash:fp4", "deepseek-v4-flash-0731:mine"):
        check_early(load_registry(offline=True), "x.hfq", tag, 9)


@pytest.mark.parametrize("recipe", [b"[]", b"5", b"null", b'"no such"'])
def test_a_recipe_that_is_no_word_is_refused(home: Path, local: Path, recipe: bytes) -> None:
    home.mkdir()
    (home / "a.hfq").write_bytes(build.sealed(ours={"recipe": json.loads(recipe)}))
    check_refused(UnknownQuantError, lambda: added(local, home / "a.hfq"))


@pytest.mark.parametrize("name", ["a/b.hfq", "..", ".hidden.hfq", ""])
def test_unsafe_names_are_refused_early(home: Path, name: str) -> None:
    registry = load_registry(offline=True)
    check_refused(UnsafeNameError, lambda: check_early(registry, name, TAG, 9))


@pytest.mark.parametrize(
    ("wish", "says"),
    [
        (
            Wish(TAG, min_vram_gb=float("nan")),
            "min_vram_gb is not a number of gigabytes: found nan",
        ),
        (
            Wish(TAG, min_vram_gb=float("inf")),
            "min_vram_gb is not a number of gigabytes: found inf",
        ),
        (Wish(TAG, desc="a\udcffb"), "the description is not UTF-8 text"),
        (Wish("a\udcffb"), "the tag is not UTF-8 text"),
    ],
)
def test_words_that_a_document_cannot_hold_are_refused(
    file: Path, local: Path, wish: Wish, says: str
) -> None:
    check_refused(AddError, lambda: added(local, file, wish), says=[says])
    assert not local.exists()


def test_a_tag_does_not_change_its_file_unasked(file: Path, local: Path) -> None:
    added(local, file)
    other = made(file.parents[1] / "other", "y.hfq", seed=1)
    check_refused(AddError, lambda: added(local, other), says=["expected x.hfq, found y.hfq"])
    done = added(local, other, Wish(TAG, replace=True))
    assert done.was is not None
    assert done.entry["file"] == "y.hfq"


def test_a_published_tag_is_replaced_only_on_request(file: Path, local: Path) -> None:
    done = added(local, file, Wish("deepseek-v4-flash", replace=True))
    assert done.entry["desc"].startswith("DeepSeek V4 as fp4")
    assert load_registry(offline=True).resolve("deepseek-v4-flash").repo == ""


def test_one_file_name_is_one_file(file: Path, local: Path) -> None:
    added(local, file)
    other = made(file.parents[1] / "other", seed=1)
    check_refused(AddError, lambda: added(local, other, Wish("other")), says=["another sha256"])
    assert added(local, file, Wish("same")).was is None


@pytest.mark.parametrize("where", ["own", "other", "top"])
def test_an_unknown_key_is_an_error_where_an_entry_is_added(
    file: Path, local: Path, where: str
) -> None:
    added(local, file)
    added(local, file, Wish("other"))
    text = json.loads(local.read_text())
    place = text if where == "top" else text["models"][TAG if where == "own" else "other"]
    place["odd"] = 1
    local.write_text(json.dumps(text))
    before = local.read_bytes()
    wish = Wish(TAG, desc="mine")
    check_refused(AddError, lambda: added(local, file, wish), says=["odd: unknown key"])
    check_refused(AddError, lambda: added(local, file, wish, dry_run=True), says=["odd"])
    assert local.read_bytes() == before
    assert forget(local, "other")  # what is taken out cannot be wrong


def test_a_registry_that_cannot_be_read_is_left_as_it_is(file: Path, local: Path) -> None:
    known = load_registry(offline=True)
    local.write_text("{")
    check_refused(DocumentError, lambda: add(known, local, file, Wish(TAG)), path=local)
    assert local.read_text() == "{"


def test_a_write_that_fails_leaves_what_was_there(
    file: Path, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    added(local, file)
    before = local.read_bytes()

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        added(local, file, Wish(TAG, desc="other"))
    assert local.read_bytes() == before
    assert sorted(p.name for p in local.parent.iterdir()) == ["models", "registry.json"]


def test_two_writers_lose_nothing(file: Path, local: Path) -> None:
    nothing = registry_of({"m": entry()})

    def add_some(name: str) -> None:
        for number in range(8):
            add(nothing, local, file, Wish(f"{name}-{number}"))

    names = ("a", "b", "c")
    with ThreadPoolExecutor(len(names)) as pool:
        for done in [pool.submit(add_some, name) for name in names]:
            done.result()
    models = read_document(local.read_bytes(), str(local)).entries
    assert set(models) == {f"{name}-{number}" for name in names for number in range(8)}


# ---------------------------------------------------------------- other documents, forgetting


def test_a_document_of_ones_own_can_be_made(file: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.json"
    nothing = Registry({}, {}, "", str(mine))
    add(nothing, mine, file, Wish("deepseek-v4-flash"))
    registry = load_registry(str(mine))
    assert registry.resolve("deepseek-v4-flash").file == "x.hfq"
    assert registry.warnings == ()


def test_forgetting_takes_the_entry_and_no_file(file: Path, local: Path) -> None:
    added(local, file)
    added(local, file, Wish("second"))
    assert forget(local, TAG)
    assert load_registry(offline=True).local == {"second"}
    assert not forget(local, TAG)
    assert forget(local, "second")
    assert not local.exists()
    assert not forget(local, "second")
    assert file.exists()


@pytest.mark.parametrize("mode", [0o600, 0o664])
def test_a_linked_registry_is_written_where_it_is_and_keeps_its_mode(
    file: Path, local: Path, tmp_path: Path, mode: int
) -> None:
    real = tmp_path / "dotfiles" / "mine.json"
    real.parent.mkdir()
    local.symlink_to(real)
    added(local, file)
    assert local.is_symlink()
    real.chmod(mode)
    added(local, file, Wish(TAG, desc="mine"))
    assert json.loads(real.read_text())["models"][TAG]["desc"] == "mine"
    assert stat.S_IMODE(real.stat().st_mode) == mode
    assert added(local, file, Wish("other")).path == local
    assert forget(local, "other")
    assert (local.is_symlink(), stat.S_IMODE(real.stat().st_mode)) == (True, mode)
    assert forget(local, TAG)
    assert (local.is_symlink(), real.exists()) == (True, False)


def test_an_alias_goes_with_its_tag(local: Path, home: Path) -> None:
    home.mkdir()
    models = {"m": entry(), "n": entry(file="n.fp4", sha256="b" * 64)}
    local.write_text(json.dumps(document(models, {"am": "m", "an": "n"})))
    assert forget(local, "m")
    assert json.loads(local.read_text())["aliases"] == {"an": "n"}
