"""Owns signatures of artifacts: a receipt as the manifest that ``model-signing`` signs and checks.

A signature is a Sigstore bundle over (name, SHA-256) of an artifact and of its receipt. Its form is
model-signing's own, so who has no ds4q checks it with ``model_signing verify``. Keeps no key.
"""

from __future__ import annotations

import importlib
import io
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stdout
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from ds4q.artifact.errors import Ds4qError
from ds4q.artifact.files import beginning, unless_changed, write_whole
from ds4q.artifact.hfq import Reader
from ds4q.artifact.receipt import read_receipt, receipt_path
from ds4q.artifact.report import Check, Failure
from ds4q.artifact.walk import ReceiptDigests
from ds4q.registry.errors import RegistryError
from ds4q.registry.names import inner_path
from ds4q.registry.store import digest_of, opened

if TYPE_CHECKING:
    from model_signing.manifest import Manifest

SUFFIX = ".sig"
WHOLE = "."  # how a signature of one file alone names it


is_signature = beginning(rb'\s*\{\s*"mediaType":\s*"application/vnd\.dev\.sigstore\.bundle')
"""Whether a file that begins so is a signature."""


class SigningError(RegistryError):
    """An artifact cannot be signed, or a signature cannot be read."""

    rule = "cannot sign"


class NoSigningError(RegistryError):
    """model-signing is not installed."""

    rule = "signatures need model-signing"
    cure = "install it with: pip install 'ds4q[sign]'"


def signature_path(artifact: Path) -> Path:
    """Where the signature of ``artifact`` is, unless another place is named."""
    return artifact.with_name(artifact.name + SUFFIX)


def sign(artifact: Path, key: Path, out: Path) -> dict[str, str]:
    """Sign an artifact and its receipt with a private key, and write the signature to ``out``.

    The artifact's digest is its receipt's: its payload is not read again. Returns name -> SHA-256.

    Parameters
    ----------
    key : PEM file of an elliptic curve key (P-256, P-384 or P-521) without a password
    out : replaced where it exists; a file that appears meanwhile is kept

    Raises
    ------
    AppearedError : a file appeared at ``out``
    SigningError : the receipt is not there or another file's, or the key cannot be used
    NoSigningError : model-signing is not installed
    ArtifactError, ReceiptError : not a sound artifact, or not a receipt
    """
    signing = _library("signing")
    may_replace = unless_changed(out)
    receipt = receipt_path(artifact)
    if artifact.exists() and not receipt.exists():
        cure = (
            "signing takes its digests: put the one that ds4q quantize wrote back beside the "
            "artifact, or sign the file's own bytes with model_signing sign"
        )
        raise SigningError("the receipt is not there", path=receipt, remedy=cure)
    check = Check("receipt")
    with Reader(artifact) as reader:
        said = ReceiptDigests(check, read_receipt(receipt))
        said.compare_front(reader)
    if not check.ok:
        what = f"the receipt is another file's: {check.lines()[0]}"
        raise SigningError(what, path=artifact, remedy="verify the artifact first")
    _check_regular(key)
    digests = {artifact.name: said.receipt.sha256, receipt.name: digest_of(receipt)}
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder, "signature")
        try:
            config = signing.Config().set_hashing_config(_Known(digests))
            config.use_elliptic_key_signer(private_key=key).sign(artifact.parent, written)
        except OSError:
            raise
        except Exception as error:  # of a stack of libraries, over a file that may hold anything
            what = "the key cannot be used"
            cure = "give a PEM file of an elliptic curve key (P-256) without a password"
            raise SigningError(what, path=key, found=_words(error), remedy=cure) from None
        write_whole(out, written.read_text("utf-8"), replace=may_replace)
    return digests


def check_signature(
    artifact: Path,
    sha256: str,
    public_key: Path,
    signature: Path,
    check: Check,
) -> None:
    """Fill ``check`` with what is wrong with the signature of an artifact.

    Parameters
    ----------
    sha256 : of the artifact (hex), from its bytes
    public_key : PEM file of the key that has to have signed
    signature : of ds4q, or of ``model_signing sign`` over the file or its folder

    What else the signature covers, such as the receipt or the draft, is hashed where it stands.

    Raises
    ------
    NoSigningError : model-signing is not installed
    """
    verifying = _library("verifying")

    def digest(name: str) -> str | None:
        if name in (artifact.name, WHOLE):
            return sha256
        path = artifact.parent / inner_path(name, what="name in the signature", path=signature)
        return digest_of(path) if path.exists() else None

    asked, said = _Asked(digest), io.StringIO()
    for path in (public_key, signature):
        _check_regular(path)
    try:
        config = verifying.Config().set_hashing_config(asked).set_ignore_unsigned_files(True)
        config.use_elliptic_key_verifier(public_key=public_key)
        with redirect_stdout(said):  # the library prints its warnings among our results
            config.verify(artifact.parent, signature)
    except (OSError, Ds4qError):
        raise
    except Exception as error:  # of a stack of libraries, over a file that may hold anything
        check.fail(Failure(f"{signature}: not a valid signature of {public_key}: {_words(error)}"))
        return
    if not {artifact.name, WHOLE} & asked.digests.keys():
        signed = ", ".join(sorted(asked.digests))
        check.fail(Failure(f"{signature} does not cover {artifact.name}", found=signed))
    check.notes.extend(line.strip() for line in said.getvalue().splitlines() if line.strip())
    check.figures["signed_files"] = len(asked.digests)


class _Known:
    """In place of model-signing's own hashing of a folder: digests that are known already."""

    def __init__(self, digests: Mapping[str, str]) -> None:
        self._digests = digests

    def hash(self, model_path: Path) -> Manifest:
        """The manifest to sign."""
        return _manifest(self._digests)


class _Asked:
    """The same for a check: the digests of what a signature, once its key is proven, names.

    Attributes
    ----------
    digests : name -> SHA-256 (hex) of the files that it named and that are there
    """

    def __init__(self, digest: Callable[[str], str | None]) -> None:
        self._digest = digest
        self.digests: dict[str, str] = {}

    def add_ignored_paths(self, *, model_path: Path, paths: Iterable[Path]) -> None:
        """Nothing but what was signed is looked at anyway."""

    def hash(self, model_path: Path, *, files_to_hash: Iterable[Path]) -> Manifest:
        """The manifest to hold against the signed one."""
        for path in files_to_hash:
            name = path.relative_to(model_path).as_posix()
            digest = self._digest(name)
            if digest is not None:
                self.digests[name] = digest
        return _manifest(self.digests)


def _manifest(digests: Mapping[str, str]) -> Manifest:
    from model_signing import manifest
    from model_signing._hashing.hashing import Digest

    items = [
        manifest.FileManifestItem(
            path=PurePosixPath(name), digest=Digest("sha256", bytes.fromhex(digest))
        )
        for name, digest in digests.items()
    ]
    how = {"method": "files", "hash_type": "sha256", "allow_symlinks": False}
    serialization = manifest.SerializationType.from_args(how)
    return manifest.Manifest(next(iter(digests), ""), items, serialization)


def _check_regular(path: Path) -> None:
    """Refuse a named pipe, which the library would wait for. Raises as ``opened``."""
    with opened(path):
        pass


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _library(module: str) -> Any:
    """A module of model-signing, which only who signs or checks signatures has to have."""
    try:
        return importlib.import_module(f"model_signing.{module}")
    except ImportError:
        raise NoSigningError from None
