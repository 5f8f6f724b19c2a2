"""The same over TLS: a certificate that is trusted, one that is not, and a stop."""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from ds4q.registry.errors import RefusedError
from ds4q.registry.fetch import Wanted, fetch
from tests.checks import check_refused
from tests.registry.server import Fault, Server, serving

DATA = bytes(range(256)) * 40_000  # 10 MB: three blocks


def certificate(folder: Path) -> Path:
    """A certificate of 127.0.0.1 that vouches for itself, and its key, in one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(6)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]),
            critical=False,
        )
        .sign(key, hashes.SHA256())
    )
    path = folder / "server.pem"
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        + made.public_bytes(serialization.Encoding.PEM)
    )
    return path


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    served = tmp_path / "served"
    served.mkdir()
    (served / "a.fp4").write_bytes(DATA)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate(tmp_path))
    with serving(served, tls=context) as running:
        yield running


def test_a_trusted_server_is_fetched_from(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "server.pem"))
    digest = hashlib.sha256(DATA).hexdigest()
    server.script(Fault(stop_after=1_000_000), Fault(stop_after=10, reset=True))
    assert fetch(Wanted(server.url("a.fp4"), len(DATA), digest), tmp_path / "a.fp4") == digest
    assert (tmp_path / "a.fp4").read_bytes() == DATA


def test_an_unknown_certificate_is_refused_at_once(server: Server, tmp_path: Path) -> None:
    url = server.url("a.fp4")
    error = check_refused(
        RefusedError, lambda: fetch(Wanted(url, len(DATA), None), tmp_path / "a.fp4"), path=url
    )
    assert "certificate is not trusted" in str(error)
    assert server.requests == []


def test_a_stop_takes_a_silent_connection_down(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "server.pem"))
    server.fault = lambda request: Fault(stop_after=1_000_000, stall=True)

    def stop(done: int, total: int) -> None:
        if done == 2_000_000:  # of two lanes, which wait for more
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(
            Wanted(server.url("a.fp4"), len(DATA), None),
            tmp_path / "a.fp4",
            ranges=2,
            progress=stop,
        )
    assert [t.name for t in threading.enumerate() if t.name == "ds4q-fetch"] == []
