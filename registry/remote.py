"""Owns range requests: pieces of what one URL names, over HTTP(S) or from a local file.

Knows no retries, digests or files that are written. What may pass when asked again is ``TryAgain``;
what will not is an error of the registry room.
"""

from __future__ import annotations

import base64
import http.client
import os
import re
import socket
import ssl
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol
from urllib.parse import SplitResult, unquote, unquote_to_bytes, urljoin, urlsplit

from ds4q.artifact.errors import one_line
from ds4q.artifact.files import NotRegularError, open_regular
from ds4q.registry.answers import TIMEOUT_S, Limits, Response
from ds4q.registry.errors import RefusedError

HEAD_S = 60.0  # from a request to the end of the head, redirects and connections included
MAX_HOPS = 10
MAX_WORDS = 200  # of a server's own explanation in a message
REDIRECTS = frozenset({301, 302, 303, 307, 308})
PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
PORTS = {"http": 80, "https": 443}
SCHEMES = ("file", *PORTS)
_HOST = re.compile(r"[\w.~%:\[\]-]*")
_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19}|\*)", re.ASCII)


class TryAgain(Exception):
    """A request that failed and may succeed later, at the earliest after ``after_s`` seconds."""

    def __init__(self, what: str, after_s: float = 0.0) -> None:
        super().__init__(one_line(what))  # it may hold a server's own words
        self.after_s = after_s


@dataclass(frozen=True, slots=True)
class Answer:
    """The bytes ``start`` .. ``stop`` of a file of ``total`` bytes, to be read.

    ``stop`` and ``total`` are None where the server does not tell. ``ranged`` is whether a range
    was answered, not the whole file. ``validator`` names this version of the file, or is empty.
    ``read(n)`` gives 1 to ``n`` bytes as they come, and none at the end. ``media`` is the type that
    the server states.
    """

    start: int
    stop: int | None
    total: int | None
    ranged: bool
    validator: str
    read: Callable[[int], bytes]
    media: str = ""


class Lane(Protocol):
    """One way to a remote file, for one thread."""

    def open(self, start: int, stop: int, validator: str) -> Answer:
        """Ask for bytes ``start`` .. ``stop`` of the version ``validator`` (empty: any).

        Raises
        ------
        TryAgain : a connection or an answer that is not as it should be
        RefusedError : an answer that no second request will change
        """

    def reset(self) -> None:
        """Forget the connection: what follows is asked on a fresh one."""

    def abort(self) -> None:
        """Wake the thread that reads; the only method that another thread may call."""


class Remote:
    """What a URL names.

    Parameters
    ----------
    url : ``http``, ``https`` or ``file``
    headers : sent to the origin of ``url`` only, never to where a redirect leads
    """

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self.url = url
        self.name = shown(url)
        self.headers = dict(headers)
        self.location: str | None = None  # where redirects led last
        if fault := _fault(url):
            raise RefusedError(fault, path=self.name, remedy="correct it")

    def lane(self) -> Lane:
        """A new way to it."""
        return FileLane(self) if urlsplit(self.url).scheme == "file" else HttpLane(self)


def shown(url: str) -> str:
    """``url`` for people: without credentials, and without a query, which may be a signature.

    Where its parts cannot be told for certain, any of it may be a secret, and none is shown.
    """
    try:
        parts = urlsplit(url)
        host = parts.netloc.rpartition("@")[2]
        readable = _HOST.fullmatch(host) and (host or parts.scheme == "file") and parts.port != 0
    except ValueError:
        readable = False
    if not readable:
        return "a URL that cannot be read"
    return SplitResult(parts.scheme, host, parts.path, "", "").geturl()


def _fault(url: str) -> str:
    """What keeps ``url`` from being a clean address of a server or file; empty where nothing."""
    try:
        parts = urlsplit(url)
        sound = parts.scheme in SCHEMES and parts.port != 0 and url.isascii() and url.isprintable()
    except ValueError:
        sound = False
    if not sound or " " in url or (parts.scheme != "file" and not parts.hostname):
        return "not an http, https or file URL"
    return "a URL must not hold credentials" if parts.username is not None else ""


def _joined(url: str, target: str) -> str:
    """Where a redirect leads: to a server, and not from a secure connection to an open one."""
    try:
        joined = urljoin(url, target)
    except ValueError:
        joined = target
    secure = urlsplit(url).scheme == "https"
    if _fault(joined) or urlsplit(joined).scheme not in (("https",) if secure else PORTS):
        raise RefusedError(
            "redirected to where no secure way leads", path=shown(url), found=shown(joined)
        )
    return joined


def _proxy(scheme: str) -> SplitResult | None:
    """The proxy that the environment names for ``scheme``; refused where it can be none."""
    url = urllib.request.getproxies().get(scheme)
    if not url:
        return None
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme == "http" and parts.hostname and parts.port != 0:
            return parts
    except ValueError:  # brackets without an end, a port that is not a number or above 65535
        pass
    raise RefusedError(
        f"only http proxies are supported: {scheme}_proxy of the environment cannot be used",
        expected="http://HOST:PORT",
        found=shown(url),
        remedy="correct it, or unset it",
    )


def _origin(url: str) -> tuple[str, str, int]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname or "", parts.port or PORTS[parts.scheme]


# --- HTTP -------------------------------------------------------------------------------------


class HttpLane:
    """A connection that is kept from one request to the next."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self._connection: http.client.HTTPConnection | None = None
        self._origin: tuple[str, str, int] | None = None
        self._socket: socket.socket | None = None
        self._proxy_headers: dict[str, str] | None = None  # None: no proxy between
        self._limits = Limits()
        self._response: http.client.HTTPResponse | None = None

    def open(self, start: int, stop: int, validator: str) -> Answer:
        if self._response is not None:
            if self._response.length == 0:
                self._response.close()  # the connection stays
            else:
                self._disconnect()
        headers = {
            "Range": f"bytes={start}-{stop - 1}",
            "Accept-Encoding": "identity",
            "User-Agent": "ds4q",
        }
        if validator:
            headers["If-Range"] = validator
        self._limits.start("head of an answer", HEAD_S)
        known = self._remote.location
        response, url = self._follow(known or self._remote.url, headers)
        if known and response.status not in (200, 206, 416):
            self._disconnect()  # signed addresses expire: ask where the file is now
            response, url = self._follow(self._remote.url, headers)
        self._remote.location = None if url == self._remote.url else url
        return self._answer(response, start)

    def reset(self) -> None:
        self._remote.location = None
        self._disconnect()

    def abort(self) -> None:
        if (known := self._socket) is not None:
            with suppress(OSError):
                # Not the method of a TLS socket, which takes it apart under its reader.
                socket.socket.shutdown(known, socket.SHUT_RDWR)

    def _disconnect(self) -> None:
        if self._response is not None:
            self._response.close()
        if self._connection is not None:
            self._connection.close()
        self._response = self._connection = self._socket = self._origin = None

    def _follow(self, url: str, headers: Mapping[str, str]) -> tuple[http.client.HTTPResponse, str]:
        """The answer at the end of all redirects, and the URL that gave it."""
        for _ in range(MAX_HOPS):
            own = self._remote.headers if _origin(url) == _origin(self._remote.url) else {}
            response = self._response = self._send(url, {**headers, **own})
            if response.status not in REDIRECTS:
                return response, url
            target = response.getheader("Location")
            self._disconnect()
            if not target:
                raise TryAgain(f"HTTP {response.status} without a Location")
            url = _joined(url, target)
        raise TryAgain(f"the server redirects more than {MAX_HOPS} times")

    def _send(self, url: str, headers: Mapping[str, str]) -> http.client.HTTPResponse:
        connection = self._connection
        reused = connection is not None and connection.sock and self._origin == _origin(url)
        try:
            if connection is None or not reused:
                self._disconnect()
                connection = self._connection = self._connect(url)
                self._origin = _origin(url)
            parts = urlsplit(url)
            path = SplitResult("", "", parts.path or "/", parts.query, "").geturl()
            through = self._proxy_headers
            target = path if through is None else f"{parts.scheme}://{parts.netloc}{path}"
            self._limits.allow(0)
            connection.sock.settimeout(self._limits.wait_s())
            connection.request("GET", target, headers={**headers, **(through or {})})
            return connection.getresponse()
        except ssl.SSLCertVerificationError as error:
            raise RefusedError(
                f"the server's certificate is not trusted: {error.verify_message}",
                path=shown(url),
                remedy="check the address; SSL_CERT_FILE may name a certificate of your own",
            ) from None
        except (OSError, http.client.HTTPException) as error:
            self._disconnect()
            if reused:  # the server may have closed it since
                return self._send(url, headers)
            raise TryAgain(_reason(error)) from error

    def _connect(self, url: str) -> http.client.HTTPConnection:
        """A connection to the origin of ``url``, through the proxy that the environment names."""
        scheme, host, port = _origin(url)
        at, proxy_headers = (host, port), dict[str, str]()
        proxy = None if urllib.request.proxy_bypass(host) else _proxy(scheme)
        if proxy:
            at = (proxy.hostname or "", proxy.port or PORTS["http"])
            if proxy.username is not None:
                pair = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
                coded = base64.b64encode(pair.encode()).decode("ascii")
                proxy_headers = {"Proxy-Authorization": f"Basic {coded}"}
        connection: http.client.HTTPConnection
        wait_s = self._limits.wait_s()
        if scheme == "https":
            context = ssl.create_default_context()
            connection = http.client.HTTPSConnection(*at, timeout=wait_s, context=context)
            if proxy:
                connection.set_tunnel(host, port, proxy_headers)
        else:
            connection = http.client.HTTPConnection(*at, timeout=wait_s)
        self._proxy_headers = proxy_headers if proxy and scheme == "http" else None
        limited: Any = partial(Response, limits=self._limits)
        connection.response_class = limited
        try:
            connection.connect()
        except BaseException:
            connection.close()
            raise
        self._socket = connection.sock
        return connection

    def _answer(self, response: http.client.HTTPResponse, start: int) -> Answer:
        status = response.status
        if status in PASSING:
            raise TryAgain(f"HTTP {status} {response.reason}", _retry_after(response))
        said = response.getheader("Content-Range", "").strip()
        if status == 416:
            raise TryAgain(f"HTTP 416: no bytes from {start} on ({said or 'no length told'})")
        if status not in (200, 206):
            why = response.getheader("X-Error-Message", "").strip()[:MAX_WORDS]
            raise RefusedError(
                f"the server answers HTTP {status} {response.reason}",
                path=self._remote.name,
                found=why or None,
            )
        if response.getheader("Content-Encoding", "identity").strip().lower() != "identity":
            raise TryAgain("the server compresses its answer, which it was not asked for")
        validator, media = _validator(response), response.getheader("Content-Type", "").strip()
        read = self._reader(response)
        if status == 200 and not said:
            length = response.length
            return Answer(0, length, length, False, validator, read, media)
        # A range is believed as stated, even where the status is that of a whole file.
        match = _CONTENT_RANGE.fullmatch(said)
        if match is None:
            what = f"the server answers HTTP {status} without a usable Content-Range"
            raise TryAgain(f"{what}: {said[:MAX_WORDS]!r}" if said else what)
        first, last, total = match.groups()
        stop = int(last) + 1
        if int(first) != start or stop <= start or response.length not in (None, stop - start):
            sent = "" if response.length is None else f" in {response.length} bytes"
            raise TryAgain(
                f"the server was asked for bytes from {start} on, and answers HTTP {status} "
                f"with bytes {first} to {last}{sent}"
            )
        known = None if total == "*" else int(total)
        return Answer(start, stop, known, True, validator, read, media)

    def _reader(self, response: http.client.HTTPResponse) -> Callable[[int], bytes]:
        def read(n: int) -> bytes:
            self._limits.start("piece of its body", TIMEOUT_S)
            self._limits.allow(n)
            try:
                return response.read1(n)
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise TryAgain(_reason(error)) from error

        return read


def _validator(response: http.client.HTTPResponse) -> str:
    """What If-Range may carry: a strong entity tag, else the date of the last change."""
    tag = response.getheader("ETag", "").strip()
    if tag.startswith('"') and tag.isprintable():
        return tag
    date = response.getheader("Last-Modified", "").strip()
    return date if date.isprintable() else ""


def _retry_after(response: http.client.HTTPResponse) -> float:
    text = response.getheader("Retry-After", "").strip()
    return float(text) if re.fullmatch(r"\d{1,6}", text, re.ASCII) else 0.0


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer for {TIMEOUT_S:g} s"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


# --- local files ------------------------------------------------------------------------------


class FileLane:
    """A file of this machine, or of a mounted one."""

    def __init__(self, remote: Remote) -> None:
        parts = urlsplit(remote.url)
        self._name = remote.name
        self._path = os.fsdecode(unquote_to_bytes(parts.path))
        self._fd = -1
        if parts.netloc not in ("", "localhost") or "\0" in self._path:
            raise RefusedError("not the URL of a local file", path=self._name)

    def open(self, start: int, stop: int, validator: str) -> Answer:
        self.reset()
        try:
            self._fd = open_regular(self._path)
        except OSError as error:
            raise RefusedError(error.strerror, path=self._name) from None
        except NotRegularError as error:
            raise RefusedError(error.rule, path=self._name, found=error.found) from None
        status = os.fstat(self._fd)
        version = f'"{status.st_size}-{status.st_mtime_ns}-{status.st_ino}"'
        at, fd = start, self._fd

        def read(n: int) -> bytes:
            nonlocal at
            try:
                data = os.pread(fd, n, at)
            except OSError as error:
                raise TryAgain(_reason(error)) from error
            at += len(data)
            return data

        return Answer(start, status.st_size, status.st_size, True, version, read)

    def reset(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def abort(self) -> None:
        """Reads of a file end by themselves."""
