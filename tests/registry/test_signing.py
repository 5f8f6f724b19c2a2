"""Signatures: made of a receipt, good for model-signing itself, red where anything differs."""

from __future__ import annotations

import base64
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from ds4q.artifact.errors import ReceiptError
from ds4q.artifact.files import AppearedError, NotRegularError
from ds4q.artifact.receipt import Receipt, read_receipt, receipt_path
from ds4q.artifact.report import Check, Report
from ds4q.registry import signing as module
from ds4q.registry.signing import (
    NoSigningError,
    SigningError,
    check_signature,
    sign,
    signature_path,
)
from ds4q.registry.store import digest_of
from tests.checks import check_refused
from tests.quantize.damage import flip
from tests.registry.folders import good_folder

PEM = serialization.Encoding.PEM
PKCS8 = serialization.PrivateFormat.PKCS8


def write_key(path: Path, curve: ec.EllipticCurve | None = None, password: bytes = b"") -> Path:
    """A new private key, and its public one beside it as NAME.pub."""
    key = ec.generate_private_key(curve or ec.SECP256R1())
    lock: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if password:
        lock = serialization.BestAvailableEncryption(password)
    path.write_bytes(key.private_bytes(PEM, PKCS8, lock))
    public = key.public_key().public_bytes(PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    path.with_suffix(".pub").write_bytes(public)
    return path


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return good_folder(tmp_path_factory.mktemp("good") / "models")


@pytest.fixture
def artifact(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "models")) / "flash.hfq"


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return write_key(tmp_path / "mine.pem")


def faults(artifact: Path, public_key: Path, signature: Path | None = None) -> list[str]:
    """What the check finds wrong."""
    report = Report({"path": str(artifact)})
    with report.check("signature") as check:
        place = signature or signature_path(artifact)
        check_signature(artifact, digest_of(artifact), public_key, place, check)
    return check.lines()


def model_signing(*words: object) -> subprocess.CompletedProcess[str]:
    """The tool of who has no ds4q."""
    command = [sys.executable, "-m", "model_signing", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True)


# ---------------------------------------------------------------- signing


def test_a_file_that_appears_meanwhile_is_kept(
    artifact: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = signature_path(artifact)

    def read_late(path: Path) -> Receipt:
        out.write_text("the user's own")
        return read_receipt(path)

    monkeypatch.setattr(module, "read_receipt", read_late)
    check_refused(AppearedError, lambda: sign(artifact, key, out), path=out)
    assert out.read_text() == "the user's own"


@pytest.mark.parametrize(
    "curve", [ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1()], ids=lambda curve: curve.name
)
def test_what_was_signed_is_accepted(
    curve: ec.EllipticCurve, artifact: Path, tmp_path: Path
) -> None:
    key = write_key(tmp_path / "k.pem", curve)
    digests = sign(artifact, key, signature_path(artifact))
    assert digests == {
        "flash.hfq": digest_of(artifact),
        "flash.hfq.receipt": digest_of(receipt_path(artifact)),
    }
    assert faults(artifact, key.with_suffix(".pub")) == []


def test_the_signed_manifest_is_the_receipts(artifact: Path, key: Path) -> None:
    """An in-toto statement of names and SHA-256, as model-signing writes it."""
    digests = sign(artifact, key, signature_path(artifact))
    bundle = json.loads(signature_path(artifact).read_text())
    statement = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
    assert statement["predicateType"] == "https://model_signing/signature/v1.0"
    found = {each["name"]: each["digest"] for each in statement["predicate"]["resources"]}
    assert found == digests
    assert {each["algorithm"] for each in statement["predicate"]["resources"]} == {"sha256"}


@pytest.mark.slow
def test_model_signing_itself_accepts_and_refuses_it(artifact: Path, key: Path) -> None:
    sign(artifact, key, signature_path(artifact))
    words: tuple[object, ...] = ("verify", "key", artifact.parent, "--ignore_unsigned_files")
    words += ("--signature", signature_path(artifact), "--public_key", key.with_suffix(".pub"))
    done = model_signing(*words)
    assert done.returncode == 0, done.stderr
    flip(artifact, 5000)
    done = model_signing(*words)
    assert done.returncode != 0
    assert "Hash mismatch for 'flash.hfq'" in done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("what", ["file", "folder"])
def test_what_model_signing_signed_is_accepted(what: str, artifact: Path, key: Path) -> None:
    out = artifact.parent.with_name("theirs.sig")
    signed = artifact if what == "file" else artifact.parent
    done = model_signing("sign", "key", signed, "--private_key", key, "--signature", out)
    assert done.returncode == 0, done.stderr
    assert faults(artifact, key.with_suffix(".pub"), out) == []
    flip(artifact, 5000)
    assert "Hash mismatch" in faults(artifact, key.with_suffix(".pub"), out)[0]


def test_no_payload_is_read_to_sign(artifact: Path, key: Path) -> None:
    """150 GB are not hashed again; so what was changed since is red when it is checked."""
    before = digest_of(artifact)
    flip(artifact, 5000)
    assert sign(artifact, key, signature_path(artifact))["flash.hfq"] == before
    (line,) = faults(artifact, key.with_suffix(".pub"))
    assert "Hash mismatch for 'flash.hfq'" in line


def test_the_receipt_of_another_file_is_not_signed(artifact: Path, key: Path) -> None:
    with artifact.open("ab") as file:
        file.write(b"\0")
    out = signature_path(artifact)
    check_refused(SigningError, lambda: sign(artifact, key, out), path=artifact, says=["length"])
    receipt_path(artifact).write_bytes(b"x")
    check_refused(ReceiptError, lambda: sign(artifact, key, out), path=receipt_path(artifact))
    receipt_path(artifact).unlink()
    says = ["receipt is not there"]
    check_refused(
        SigningError, lambda: sign(artifact, key, out), path=receipt_path(artifact), says=says
    )
    assert not out.exists()


@pytest.mark.parametrize("kind", ["text", "rsa", "password", "curve", "public"])
def test_a_key_that_cannot_sign_is_one_line(kind: str, artifact: Path, tmp_path: Path) -> None:
    path = tmp_path / "k.pem"
    if kind == "rsa":
        other = rsa.generate_private_key(65537, 2048)
        path.write_bytes(other.private_bytes(PEM, PKCS8, serialization.NoEncryption()))
    elif kind == "text":
        path.write_text("not a key")
    else:
        curve = ec.SECP256K1() if kind == "curve" else None
        write_key(path, curve, b"secret" if kind == "password" else b"")
    used = path.with_suffix(".pub") if kind == "public" else path
    out = signature_path(artifact)
    check_refused(SigningError, lambda: sign(artifact, used, out), path=used, says=["PEM"])
    assert not out.exists()


# ---------------------------------------------------------------- checking


def test_any_change_is_red(artifact: Path, key: Path) -> None:
    sign(artifact, key, signature_path(artifact))
    public = key.with_suffix(".pub")
    for path in (artifact, receipt_path(artifact)):
        flip(path, 60)
        (line,) = faults(artifact, public)
        assert f"Hash mismatch for '{path.name}'" in line
        flip(path, 60)
    assert faults(artifact, public) == []
    receipt_path(artifact).unlink()
    (line,) = faults(artifact, public)
    assert "Missing files" in line
    assert "flash.hfq.receipt" in line


def test_another_key_is_red(artifact: Path, key: Path, tmp_path: Path) -> None:
    sign(artifact, key, signature_path(artifact))
    other = write_key(tmp_path / "other.pem").with_suffix(".pub")
    (line,) = faults(artifact, other)
    assert str(other) in line
    assert "Key mismatch" in line
    bundle = json.loads(signature_path(artifact).read_text())
    del bundle["verificationMaterial"]["publicKey"]["hint"]  # then only the mathematics can tell
    signature_path(artifact).write_text(json.dumps(bundle))
    (line,) = faults(artifact, other)
    assert "InvalidSignature" in line


def test_the_librarys_own_warnings_are_notes(
    artifact: Path, key: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It prints them, which would tear the JSON on stdout."""
    sign(artifact, key, signature_path(artifact))
    bundle = json.loads(signature_path(artifact).read_text())
    del bundle["verificationMaterial"]["publicKey"]["hint"]
    signature_path(artifact).write_text(json.dumps(bundle))
    check = Check("signature")
    public = key.with_suffix(".pub")
    check_signature(artifact, digest_of(artifact), public, signature_path(artifact), check)
    assert check.ok
    assert "older" in check.notes[0]
    assert capsys.readouterr().out == ""


def test_a_signature_of_other_files_is_red(artifact: Path, key: Path) -> None:
    """Of the same folder and by the same key: one artifact must not pass for another."""
    sign(artifact, key, signature_path(artifact))
    other = artifact.with_name("other.hfq")
    shutil.copy(artifact, other)
    (line,) = faults(other, key.with_suffix(".pub"), signature_path(artifact))
    assert "does not cover other.hfq" in line


@pytest.mark.parametrize(
    "name", ["../outside", "sub/../../outside", "sub/./x", "/etc/hostname", "..\\outside", "a\0b"]
)
def test_a_signed_name_leads_nowhere_else(name: str, artifact: Path, key: Path) -> None:
    from model_signing import signing

    from ds4q.registry.signing import _Known

    config = signing.Config().set_hashing_config(_Known({name: "0" * 64}))  # type: ignore[arg-type]
    config.use_elliptic_key_signer(private_key=key)
    config.sign(artifact.parent, signature_path(artifact))
    (line,) = faults(artifact, key.with_suffix(".pub"))
    assert "unsafe name" in line or "not a valid signature" in line


def test_a_signature_of_a_folder_covers_what_lies_below_it(artifact: Path, key: Path) -> None:
    from model_signing import signing

    inner = artifact.parent / "sub" / "er" / "a:b .partial"
    inner.parent.mkdir(parents=True)
    inner.write_text("notes")
    out = artifact.parent.with_name("theirs.sig")
    signing.Config().use_elliptic_key_signer(private_key=key).sign(artifact.parent, out)
    assert faults(artifact, key.with_suffix(".pub"), out) == []
    inner.write_text("other notes")
    (line,) = faults(artifact, key.with_suffix(".pub"), out)
    assert "Hash mismatch" in line
    assert "sub/er/a:b .partial" in line


def test_a_named_pipe_is_not_waited_for(artifact: Path, key: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    out = signature_path(artifact)
    call: Any = lambda: sign(artifact, pipe, out)  # noqa: E731
    check_refused(NotRegularError, call, path=pipe, says=["not a regular file"])
    sign(artifact, key, out)
    for public, signature in ((pipe, out), (key.with_suffix(".pub"), pipe)):
        (line,) = faults(artifact, public, signature)
        assert line == f"{pipe}: not a regular file: found a named pipe"


def test_a_damaged_signature_is_red_and_never_a_traceback(artifact: Path, key: Path) -> None:
    sign(artifact, key, signature_path(artifact))
    text = signature_path(artifact).read_bytes()
    rng = random.Random(0)
    damaged = [b"", b"{}", b"[]", b"null", b"\xff", text[:100], text[:-2], b"[" * 100_000]
    words = (b"dsseEnvelope", b"payload", b"signatures", b"verificationMaterial")
    damaged += [text.replace(b'"' + word + b'"', b'"other"') for word in words]
    for _ in range(20):
        at = rng.randrange(len(text))
        damaged.append(text[:at] + bytes([text[at] ^ (1 << rng.randrange(8))]) + text[at + 1 :])
    found = 0
    for raw in damaged:
        signature_path(artifact).write_bytes(raw)
        lines = faults(artifact, key.with_suffix(".pub"))
        assert all(line.isprintable() for line in lines)
        found += bool(lines)
    assert found >= len(damaged) - 2, "a bit of a hint or of padding may not matter"


def test_without_model_signing_the_remedy_is_told(
    artifact: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for part in ("signing", "verifying"):
        monkeypatch.setitem(sys.modules, f"model_signing.{part}", None)
    out = signature_path(artifact)
    call: Any = lambda: sign(artifact, key, out)  # noqa: E731
    check_refused(NoSigningError, call, says=["pip install 'ds4q[sign]'"])
    (line,) = faults(artifact, key.with_suffix(".pub"))
    assert "pip install 'ds4q[sign]'" in line
