"""ds4q sign, and ds4q verify --public-key over one artifact and over folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ds4q.artifact.receipt import receipt_path
from ds4q.cli import main
from tests.quantize.damage import flip
from tests.registry.folders import good_folder
from tests.registry.test_signing import write_key


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return good_folder(tmp_path_factory.mktemp("good") / "models")


@pytest.fixture
def artifact(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "models")) / "flash.hfq"


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return write_key(tmp_path / "mine.pem")


def ds4q(*words: object) -> Result:
    return CliRunner().invoke(main, list(map(str, words)))


def test_sign_and_verify(artifact: Path, key: Path) -> None:
    done = ds4q("sign", artifact, "--key", key, "--json")
    assert done.exit_code == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["signature"] == f"{artifact}.sig"
    assert list(document["files"]) == ["flash.hfq", "flash.hfq.receipt"]
    public = key.with_suffix(".pub")
    for path in (artifact, artifact.parent):
        done = ds4q("verify", path, "--public-key", public, "--quiet")
        assert done.exit_code == 0, done.stderr
        assert "signed_files 2" in done.stdout


def test_a_changed_or_missing_signature_fails(artifact: Path, key: Path) -> None:
    public = key.with_suffix(".pub")
    for path in (artifact, artifact.parent):
        done = ds4q("verify", path, "--public-key", public, "--quiet")
        assert done.exit_code == 1
        assert "flash.hfq.sig: No such file" in done.stderr
    assert ds4q("sign", artifact, "--key", key, "-o", artifact.with_name("s")).exit_code == 0
    receipt_path(artifact).unlink()
    flip(artifact, 5000)
    words = ("--public-key", public, "--signature", artifact.with_name("s"), "--quiet", "--json")
    document = json.loads(ds4q("verify", artifact, *words).stdout)
    assert [check["name"] for check in document["checks"] if not check["ok"]] == ["signature"]


def test_an_artifact_without_a_receipt_is_told_what_to_do(artifact: Path, key: Path) -> None:
    receipt_path(artifact).unlink()
    done = ds4q("sign", artifact, "--key", key)
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert f"{artifact}.receipt: the receipt is not there; " in done.stderr
    assert "ds4q quantize wrote" in done.stderr
    assert "model_signing sign" in done.stderr
    done = ds4q("sign", artifact.with_name("no.hfq"), "--key", key)
    assert (
        done.stderr == f"ds4q: error: {artifact.with_name('no.hfq')}: No such file or directory\n"
    )


def test_only_a_signature_is_replaced_and_only_on_demand(artifact: Path, key: Path) -> None:
    assert ds4q("sign", artifact, "--key", key).exit_code == 0
    first = Path(f"{artifact}.sig").read_bytes()
    done = ds4q("sign", artifact, "--key", key)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "--force" in done.stderr
    assert Path(f"{artifact}.sig").read_bytes() == first
    assert ds4q("sign", artifact, "--key", key, "--force").exit_code == 0
    before = artifact.read_bytes()
    done = ds4q("sign", artifact, "--key", key, "--force", "-o", artifact)
    assert done.exit_code == 2
    assert artifact.read_bytes() == before


def test_options_that_need_each_other(artifact: Path, tmp_path: Path) -> None:
    done = ds4q("verify", artifact, "--signature", tmp_path / "s")
    assert done.exit_code == 2
    assert "--public-key" in done.stderr
