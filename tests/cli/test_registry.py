"""ds4q registry: words, documents, exit statuses, and no connection unasked."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from ds4q.artifact.places import from_json
from ds4q.cli import doctor, main
from ds4q.registry.entries import load_registry
from tests.cli.registry_words import TAG, names, refused, registry, told
from tests.quantize import models
from tests.quantize.damage import flip
from tests.registry.documents import document, entry
from tests.registry.server import serving
from tests.registry.shelves import made, registered, sidecar


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


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        pytest.fail("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setenv("DS4Q_REGISTRY_URL", "http://127.0.0.1:1/registry.json")


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    """URL of a server on this machine that gives what is in the folder www."""
    (tmp_path / "www").mkdir()
    with serving(tmp_path / "www") as server:
        yield server.url("").rstrip("/")


# ---------------------------------------------------------------- list, show, status


def test_list_has_published_tags_and_own_ones(added: Path, home: Path) -> None:
    (home / "models" / "stray.fp4").write_bytes(b"HFQM")
    found = told("list")
    tags = {model["tag"]: model for model in found["models"]}
    assert {"deepseek-v4-flash", "deepseek-v4-flash:fp4", TAG} <= tags.keys()
    assert not tags["deepseek-v4-flash"]["installed"]
    assert "deepseek4:0731" in tags["deepseek-v4-flash"]["aliases"]
    mine = tags[TAG]
    assert (mine["installed"], mine["own"], mine["repo"]) == (True, True, "")
    assert [(f["kind"], f["file"], f["state"]) for f in mine["files"]] == [
        ("trunk", "x.hfq", "verified"),
        ("receipt", "x.hfq.receipt", "verified"),
        ("dspark_receipt", "x-dspark.hfq.receipt", "verified"),
        ("dspark", "x-dspark.hfq", "verified"),
    ]
    assert found["others"] == [{"file": "stray.fp4", "bytes": 4, "hfq": True, "companions": []}]


def test_list_for_people_groups_files_under_their_tag(added: Path, home: Path) -> None:
    (home / "models" / "stray.fp4").write_bytes(b"damaged")
    result = registry("list")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    at = next(n for n, line in enumerate(lines) if line.startswith(TAG))
    assert "verified" in lines[at]
    shown = [line.split()[0] for line in lines[at + 1 : at + 4]]
    assert shown == ["receipt", "dspark_receipt", "dspark"]
    adapter = next(line for line in lines if line.strip().startswith("adapter"))
    assert "experimental" in adapter
    assert lines[-1] == "no tag: stray.fp4, 7 bytes, not readable as an HFQ file"


def test_files_of_another_length_are_flagged_without_hashing(added: Path) -> None:
    os.truncate(added, 5)
    flip(added.with_name("x-dspark.hfq"), 5000)
    (mine,) = [model for model in told("list")["models"] if model["tag"] == TAG]
    states = [file["state"] for file in mine["files"]]
    assert states == ["wrong size", "verified", "verified", "not hashed"]
    shown = registry("show", TAG).stdout
    assert "wrong size, 5 bytes here" in shown


def test_show_tells_all_of_an_entry(added: Path) -> None:
    found = told("show", "deepseek4:0731")
    assert found["tag"] == "deepseek-v4-flash"
    assert found["entry"]["min_vram_gb"] == 96
    assert found["files"][0]["sha256"] == found["entry"]["sha256"]
    text = registry("show", TAG).stdout
    digest = hashlib.sha256(added.read_bytes()).hexdigest()
    assert f"trunk x.hfq: {added.stat().st_size:,} bytes, verified, sha256 {digest}" in text
    assert "quant_recipe: fp4" in text
    assert "alias deepseek4:preview" in registry("show", "deepseek-v4-flash-preview").stdout


@pytest.mark.parametrize(
    "name", ["deepseek-v4-fl", "DeepSeek-V4-Flash", "deepseek-v4-flash-0731.mq2", "ds4", ""]
)
def test_a_name_that_is_none_is_an_error_with_suggestions(name: str) -> None:
    for verb in ("show", "pull", "card", "verify", "rm"):
        words = [verb, name, *(["--yes"] if verb == "rm" else [])]
        result = registry(*words)
        assert result.exit_code == 1, (verb, result.output)
        assert "ds4q: error: " in result.stderr
    assert "deepseek-v4-flash" in refused("show", "deepseek-v4-fl")


def test_status_says_what_is_used(added: Path, home: Path) -> None:
    found = told("status")
    assert found["registry"].startswith("bundled registry")
    assert (found["own_tags"], found["installed"]) == ([TAG], [TAG])
    assert found["own_registry"] == str(home / "registry.json")
    assert found["url"] is None
    assert f"models_dir: {home / 'models'}" in registry("status").stdout


def test_a_secret_of_a_url_is_not_told(web: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = web.replace("://", "://user:hunter2@") + "/r.json?token=SECRET"
    monkeypatch.setenv("DS4Q_REGISTRY_URL", whole)
    for words in (["list"], ["status"], ["status", "--json"], ["update"], ["verify"]):
        result = registry(*words)
        assert result.output
        assert not any(secret in result.output for secret in ("hunter2", "SECRET")), words
    for words in (["list"], ["verify", "--json"]):
        assert "hunter2" not in registry(*words, "--registry", whole).output, words


@pytest.mark.parametrize(
    "url",
    [
        "http:/u:hunter2@127.0.0.1/ok?token=SECRET",
        "https:u:hunter2@h/x?token=SECRET",
        "HTTP:\\\\u:hunter2@h\\x?token=SECRET",
        "http://127.0.0.1:1;token=SECRET/ok",
        "http://host;token=SECRET/ok",
        "http:///u:hunter2@h/x?token=SECRET",
        "ftp://u:hunter2@[h/x?token=SECRET",
    ],
)
def test_a_secret_of_a_mistyped_url_is_not_told(
    url: str, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    adding = ["add", file, "--tag", "m"]
    for words in (["list"], ["verify"], ["verify", "--json"], ["update"], ["status"], adding):
        result = registry(*words, "--registry", url)
        assert result.exit_code != 0
        assert not any(secret in result.output for secret in ("hunter2", "SECRET")), words
        assert "internal error" not in result.output
    assert sorted(tmp_path.rglob("*")) == before, "no file is called so"
    monkeypatch.setenv("DS4Q_REGISTRY_URL", url)
    for words in (["list"], ["verify"], ["update"], ["status"], ["pull", "x"], adding):
        result = registry(*words)
        assert not any(secret in result.output for secret in ("hunter2", "SECRET")), words
        assert "internal error" not in result.output


def test_an_empty_name_of_a_registry_is_refused_for_what_it_is(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS4Q_REGISTRY_URL", "http://127.0.0.1:1/r.json")
    for words in (["list"], ["verify"], ["add", file], ["update"]):
        result = registry(*words, "--registry", "")
        assert (result.exit_code, result.stdout) == (2, ""), words
        assert "Invalid value for '--registry': it is empty" in result.stderr


def test_looking_never_opens_a_connection(added: Path, no_network: None) -> None:
    for words in (
        ["list"],
        ["show", TAG],
        ["status"],
        ["card", TAG],
        ["verify", TAG],
        ["add", added, "--tag", TAG],
        ["rm", TAG, "--dry-run"],
    ):
        result = registry(*words)
        assert result.exit_code == 0, result.output
    assert "ds4q registry update" in registry("list").stderr


# ---------------------------------------------------------------- update, other documents


def test_update_fetches_and_list_uses_the_copy(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, web: str
) -> None:
    (tmp_path / "www" / "registry.json").write_text(json.dumps(document({"m": entry()})))
    monkeypatch.setenv("DS4Q_REGISTRY_URL", f"{web}/registry.json")
    assert told("update") == {
        "registry": f"{web}/registry.json",
        "generated_at": "2026-08-14T08:32:49Z",
        "tags": 1,
    }
    assert [model["tag"] for model in told("list")["models"]] == ["m"]
    assert "1 tags" in registry("update").stdout


def test_what_is_not_a_registry_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, web: str
) -> None:
    page = tmp_path / "www" / "registry.json"
    monkeypatch.setenv("DS4Q_REGISTRY_URL", f"{web}/registry.json")
    for text in ("<html>", "[]", "{}", json.dumps(document({"m": entry(file="../x")}))):
        page.write_text(text)
        assert f"{web}/registry.json" in refused("update")
        assert refused("list", "--registry", f"{web}/registry.json")
    page.unlink()
    assert "404" in refused("update")
    monkeypatch.delenv("DS4Q_REGISTRY_URL")
    assert "no URL" in refused("update")


def test_a_document_can_be_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(document({"m": entry(odd=1)})))
    result = registry("list", "--registry", path, "--json")
    assert [model["tag"] for model in json.loads(result.stdout)["models"]] == ["m"]
    assert "warning" in result.stderr
    assert "odd: unknown key" in result.stderr
    assert "No such file" in refused("list", "--registry", tmp_path / "gone.json")


# ---------------------------------------------------------------- verify


def test_verify_passes_what_is_as_registered(added: Path) -> None:
    result = registry("verify")
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    assert [line.split()[:2] for line in result.stdout.splitlines()[1:3]] == [
        ["schema", "ok"],
        [TAG, "ok"],
    ]
    found = told("verify", TAG, TAG)
    assert [check["name"] for check in found["checks"]] == ["schema", TAG]
    assert found["checks"][1]["figures"]["sidecars"] == 3


def test_verify_tells_both_values_and_deletes_nothing(added: Path) -> None:
    before = names(added.parent)
    flip(added, added.stat().st_size - 3)
    found = told("verify", TAG, status=1)
    (failure,) = found["checks"][1]["failures"]
    expected = load_registry(offline=True).resolve(TAG).sha256
    digest = hashlib.sha256(added.read_bytes()).hexdigest()
    assert (failure["expected"], failure["found"]) == (expected, digest)
    assert names(added.parent) == before
    result = registry("verify", TAG)
    assert result.exit_code == 1
    assert f"{TAG}: SHA-256 of x.hfq differs" in result.stderr
    (mine,) = [model for model in told("list")["models"] if model["tag"] == TAG]
    assert mine["files"][0]["state"] == "wrong hash"
    os.truncate(added, 999)
    assert "x.hfq is incomplete: 999 of" in registry("verify", TAG).stderr


def test_verify_does_not_believe_an_earlier_look(added: Path) -> None:
    """Bytes that changed under a note that still fits are found, as verify always reads."""
    note = added.parent / ".verified" / "x.hfq"
    held = json.loads(note.read_text())
    flip(added, added.stat().st_size - 3)
    status = added.stat()
    now = {"mtime_ns": status.st_mtime_ns, "ctime_ns": status.st_ctime_ns}
    note.write_text(json.dumps(held | now))
    assert told("list")["models"][-1]["files"][0]["state"] == "verified"
    assert registry("verify", TAG).exit_code == 1


def test_verify_refuses_a_draft_for_another_trunk(added: Path, tmp_path: Path) -> None:
    shutil.copy(made(tmp_path / "other", seed=1).with_name("x-dspark.hfq"), added.parent)
    path = added.parents[1] / "registry.json"
    text = json.loads(path.read_text())
    data = added.with_name("x-dspark.hfq").read_bytes()
    text["models"][TAG]["dspark"] = sidecar("x-dspark.hfq", data)
    path.write_text(json.dumps(text))
    assert "draft for another trunk" in registry("verify", TAG).stderr


def test_verify_of_a_tag_that_is_not_here_fails(added: Path, home: Path) -> None:
    added.unlink()
    result = registry("verify", TAG)
    assert result.exit_code == 1
    assert f"x.hfq is not in {home / 'models'}" in result.stderr
    assert registry("verify").exit_code == 0  # nothing is installed


def test_verify_reads_documents_strictly(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(document({"m": entry(odd=1)})))
    found = told("verify", "--registry", path, status=1)
    assert [f["message"] for f in found["checks"][0]["failures"]] == ["m: odd: unknown key"]
    path.write_text(json.dumps(document({"m": entry(file="../../x.hfq")})))
    assert "m: file: bad value: expected a plain file name" in (
        registry("verify", "--registry", path).stderr
    )
    path.write_text("<html>")
    result = registry("verify", "--registry", path)
    assert (result.exit_code, "not JSON" in result.stderr) == (1, True)


def test_verify_of_a_fetched_document(tmp_path: Path, web: str) -> None:
    page = tmp_path / "www" / "registry.json"
    page.write_text(json.dumps(document({"m": entry(odd=1)})))
    url = f"{web}/registry.json"
    assert "does not call out" in refused("verify", "--registry", url)
    registry("update", "--registry", url)
    assert "m: odd: unknown key" in registry("verify", "--registry", url).stderr


# ---------------------------------------------------------------- card


def test_card_takes_receipt_header_and_report(added: Path, tmp_path: Path) -> None:
    bare = registry("card", "deepseek-v4-flash").stdout
    assert "license: mit" in bare
    assert "not measured by this project" in bare
    report = tmp_path / "v.json"
    source = added.parents[2] / "source"
    models.save(source, models.mini_tensors())
    words = ["verify", str(added), "--source", str(source), "--json"]
    report.write_text(CliRunner().invoke(main, words).stdout)
    text = registry("card", TAG, "--verify", report).stdout
    assert "all 3 expert tensors byte-exact" in text
    assert "| HFP4G32 |" in text
    assert "| routed experts a layer | 16 | header |" in text
    assert told("card", TAG, "--verify", report) == {"tag": TAG, "card": text}


def test_card_refuses_a_report_of_another_artifact(added: Path, tmp_path: Path) -> None:
    other = made(tmp_path / "other", seed=1)
    report = tmp_path / "v.json"
    report.write_text(CliRunner().invoke(main, ["verify", str(other), "--json"]).stdout)
    assert "not of this artifact" in refused("card", TAG, "--verify", report)


def test_a_name_that_is_not_utf8_is_carried_by_json(home: Path) -> None:
    (home / "models").mkdir(parents=True)
    (home / "models" / "odd\udcff.fp4").write_bytes(b"HFQM")
    text = registry("list", "--json").stdout
    text.encode("utf-8")
    (stray,) = json.loads(text)["others"]
    assert stray["file"] == "$'odd\\xff.fp4'"
    assert from_json(stray["file"]) == "odd\udcff.fp4"
    assert "\\ud" not in text


def test_a_broken_link_is_called_one_everywhere(added: Path) -> None:
    added.unlink()
    added.symlink_to("/no/such/file")
    says = "broken link to /no/such/file"
    (mine,) = [model for model in told("list")["models"] if model["tag"] == TAG]
    assert (mine["files"][0]["state"], mine["installed"]) == ("broken link", False)
    assert "broken link" in registry("list").stdout
    assert f"x.hfq is a {says}" in registry("verify", TAG).stderr
    assert f"found a {says}" in refused("rm", TAG, "--yes")
    for words in (("inspect",), ("verify",), ("run", "--prompt", "a"), ("export", "--to", "gguf")):
        last = ["--output", str(added.with_name("out"))] if words[0] == "export" else []
        result = CliRunner().invoke(main, [words[0], str(added), *words[1:], *last])
        assert result.exit_code == 1
        assert f"{added}: {says}" in result.output, words
    added.unlink()
    (added.parent / "x.hfq.receipt").unlink()
    (added.parent / "x.hfq.receipt").symlink_to("/no/such/file")
    assert f"receipt x.hfq.receipt is a {says}" in registry("verify", TAG).stdout


def test_card_does_not_wait_for_a_pipe(added: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    said = refused("card", TAG, "--verify", tmp_path / "pipe")
    assert said == f"{tmp_path / 'pipe'}: not a regular file: found a named pipe"


def test_card_takes_nothing_from_a_file_that_is_not_as_registered(added: Path) -> None:
    os.truncate(added, 500)
    result = registry("card", TAG)
    assert result.exit_code == 0
    assert "wrong size: nothing is taken from it" in result.stderr
    assert "| layers | not measured by this project |" in result.stdout
    shutil.copy(added.with_name("x-dspark.hfq.receipt"), added.with_name("x.hfq.receipt"))
    assert "receipt of another artifact" in refused("card", TAG)


def test_card_wants_device_and_date_together(added: Path, tmp_path: Path) -> None:
    report = tmp_path / "v.json"
    report.write_text(CliRunner().invoke(main, ["verify", str(added), "--json"]).stdout)
    for words in (["--device", "d"], ["--date", "2026-01-01"], ["--device", "d", "--date", "x"]):
        assert registry("card", TAG, *words).exit_code == 2
    both = ["--device", "d", "--date", "2026-01-01"]
    assert registry("card", TAG, "--verify", report, *both).exit_code == 0


# ---------------------------------------------------------------- pull, gen


def published(tmp_path: Path) -> Path:
    """A document whose one tag lies in a folder of this machine."""
    (tmp_path / "www").mkdir(exist_ok=True)
    (tmp_path / "www" / "a.fp4").write_bytes(b"bytes of a model")
    (tmp_path / "www" / "d.fp4").write_bytes(b"draft")
    one = registered(
        "a.fp4",
        b"bytes of a model",
        repo=(tmp_path / "www").as_uri(),
        dspark=sidecar("d.fp4", b"draft"),
    )
    path = tmp_path / "published.json"
    path.write_text(json.dumps(document({"m": one})))
    return path


def test_pull_fetches_trunk_and_sidecars(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "hip_facts", lambda: {"found": []})
    path = published(tmp_path)
    dry = told("pull", "m", "--registry", path, "--dry-run")
    assert {file["state"] for file in dry["files"]} == {"would fetch"}
    assert not (home / "models" / "a.fp4").exists()
    result = registry("pull", "m", "--registry", path, "--trunk-only")
    assert result.exit_code == 0, result.output
    assert (home / "models" / "a.fp4").read_bytes() == b"bytes of a model"
    assert not (home / "models" / "d.fp4").exists()
    result = registry("pull", "m", "--registry", path)
    assert f"present {home / 'models' / 'a.fp4'}: trunk, 16 bytes" in result.stdout
    assert f"fetched {home / 'models' / 'd.fp4'}: dspark, 5 bytes" in result.stdout
    assert told("list", "--registry", path)["models"][0]["files"][0]["state"] == "verified"


def test_pull_warns_of_a_device_that_is_too_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = published(tmp_path)
    for size, warned in ((10**9, True), (3 * 10**9, False)):
        monkeypatch.setattr(
            doctor, "hip_facts", lambda size=size: {"found": [{"total_bytes": size}]}
        )
        result = registry("pull", "m", "--registry", path, "--dry-run")
        assert result.exit_code == 0, result.output
        assert ("needs 2 GB" in result.stderr) is warned


def test_the_bundled_document_is_what_it_is_made_from() -> None:
    assert told("gen", "--check") == {"changed": False, "diff": []}
    assert "is what models.json and listing.json say" in registry("gen", "--check").stdout
