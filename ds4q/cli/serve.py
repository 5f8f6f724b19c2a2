"""Owns ``ds4q serve``: options, and what is said on stderr. No HTTP and no model code."""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ds4q.artifact.errors import one_line
from ds4q.cli.common import Size, say, say_traceback, talk_options
from ds4q.cli.loading import ModelOptions, compile_notice, load_progress, model_options, warn_of

if TYPE_CHECKING:
    from ds4q.cli.loading import Loading
    from ds4q.runtime.device.engine import HipEngine
    from ds4q.runtime.engine import Engine
    from ds4q.runtime.serve.limits import Limits
    from ds4q.runtime.serve.scheduler import Scheduler
    from ds4q.runtime.serve.server import Server
    from ds4q.runtime.serve.service import Service
    from ds4q.runtime.source import Progress

DEFAULT_PORT = 8000
KEY_VARIABLE = "DS4Q_API_KEY"
GIVE_UP_S = 1.5  # for a load that was interrupted to notice it
NEEDED = ("fastapi", "prometheus_client", "uvicorn")


class _SizeOrNone(Size):
    """A size, or 0."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        return 0 if str(value).strip() == "0" else super().convert(value, param, ctx)


def _key(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """The key of the option, else of the environment; what no header can carry is refused."""
    key = os.environ.get(KEY_VARIABLE) if value is None else value
    if key is None:
        return None
    if not key or not all("!" <= char <= "~" for char in key):
        raise click.BadParameter("a key is one or more ASCII characters, without spaces")
    return key


def _host(ctx: click.Context, param: click.Parameter, value: str) -> str:
    """What sockets take for every address is not what somebody means who names none."""
    if not value.strip():
        raise click.BadParameter("it is empty; 0.0.0.0 or :: listens on every address")
    return value


def _finite(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    """A range lets NaN through, and infinity where it has no upper end."""
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"{value} is not a finite number")
    return value


@click.command()
@click.argument("file", type=click.Path(path_type=Path), metavar="FILE.hfq")
@click.option(
    "--host",
    callback=_host,
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on. Any but this machine's own needs an API key.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=DEFAULT_PORT,
    show_default=True,
    help="Port to listen on; 0 takes a free one.",
)
@click.option(
    "--api-key",
    callback=_key,
    metavar="KEY",
    help=f"Answer only requests with this key. {KEY_VARIABLE} keeps it out of process lists.",
)
@click.option(
    "--allow-no-key",
    is_flag=True,
    help="Listen for other machines without a key: whoever reaches the port may use the model.",
)
@click.option(
    "--model-name",
    metavar="NAME",
    show_default="the file's name without its suffix",
    help="What clients call the model.",
)
@click.option(
    "--queue",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    metavar="N",
    help="Requests that may wait; more are told to come back later.",
)
@click.option(
    "--concurrent",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    metavar="N",
    help="Requests that the model answers together.",
)
@click.option(
    "--max-context",
    type=click.IntRange(min=1),
    show_default="all that the model has positions for",
    metavar="N",
    help="Most tokens of a prompt and its answer.",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    default=4096,
    show_default=True,
    metavar="N",
    help="Most new tokens for a request that does not say how many.",
)
@click.option(
    "--prefix-cache",
    type=_SizeOrNone(),
    default="1GiB",
    show_default=True,
    metavar="S",
    help="Memory for what prompts begin with, so that a conversation is not read anew; 0: none.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    callback=_finite,
    show_default="no limit",
    metavar="SECONDS",
    help="Most time for a request, waiting included.",
)
@model_options
@talk_options
def command(
    file: Path,
    host: str,
    port: int,
    api_key: str | None,
    allow_no_key: bool,
    model_name: str | None,
    queue: int,
    concurrent: int,
    max_context: int | None,
    max_tokens: int,
    prefix_cache: int,
    timeout: float | None,
    model: ModelOptions,
    quiet: bool,
    verbose: bool,
) -> None:
    """Serve an artifact over HTTP, as OpenAI's API, with a page to chat with it.

    The page is at /, the API below /v1. It listens before the model is loaded: /health answers 503
    until it is, then 200. SIGTERM and Ctrl-C let requests end that have begun, for 30 s; a second
    one does not wait. docs/serving.md tells all.

    Example: ds4q serve model.hfq --port 8000
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise click.UsageError(f"serving needs {', '.join(missing)}: pip install 'ds4q[serve]'")
    from ds4q.runtime.engine import BATCH_TOKENS
    from ds4q.runtime.serve.limits import Limits, is_loopback
    from ds4q.runtime.serve.listening import resolve

    if concurrent > BATCH_TOKENS:  # each answer's next token has a place in one batch
        raise click.UsageError(f"--concurrent {concurrent}: at most {BATCH_TOKENS} go together")

    if not is_loopback(host) and api_key is None and not allow_no_key:
        resolve(host, port)  # what is no address needs no key
        raise click.UsageError(
            f"--host {host} can be reached by other machines: give an --api-key (or set "
            f"{KEY_VARIABLE}), or --allow-no-key to let everybody in"
        )
    limits = Limits(
        max_context=max_context,
        default_max_tokens=max_tokens,
        request_s=timeout,
        local_only=is_loopback(host),
    )
    loading = model.loading(file, quiet=quiet)
    loading.check()
    _log(quiet=quiet, verbose=verbose)
    scheduling = {
        "queue": queue,
        "concurrent": concurrent,
        "prefix_cache_bytes": prefix_cache,
    }
    _serve(
        loading,
        model,
        limits,
        scheduling,
        host=host,
        port=port,
        api_key=api_key,
        model_name=model_name or _name(file),
    )


def _name(file: Path) -> str:
    """The model's name by its file's; what is no Unicode there is none in JSON either."""
    return one_line(os.fsencode(file.stem).decode("utf-8", "replace"))


class _Lines(logging.Handler):
    """Log records on stderr, as every command's words."""

    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage())
        if record.exc_info and record.exc_info[1] is not None:
            say_traceback(record.exc_info[1])


def _log(*, quiet: bool, verbose: bool) -> None:
    """What the server says on stderr: errors; with -v a line for each request, too."""
    log = logging.getLogger("ds4q.serve")
    usual = logging.ERROR if quiet else logging.WARNING
    log.setLevel(logging.INFO if verbose else usual)
    log.propagate = False
    log.handlers = [_Lines()]


def _serve(
    loading: Loading,
    model: ModelOptions,
    limits: Limits,
    scheduling: Mapping[str, int],
    *,
    host: str,
    port: int,
    api_key: str | None,
    model_name: str,
) -> None:
    from ds4q.runtime.errors import PromptError, RunError
    from ds4q.runtime.serve.listening import listen, url
    from ds4q.runtime.serve.service import Service
    from ds4q.runtime.text.tokenizer import Tokenizer

    metadata = loading.metadata()
    tokenizer = Tokenizer.from_metadata(metadata, path=loading.file)
    if tokenizer is None:
        raise PromptError(
            "the artifact has no tokenizer to read requests with",
            path=loading.file,
            remedy="quantize a checkpoint with its tokenizer.json",
        )
    encoding = model.read_encoding(loading.file, metadata)
    loaded = _Loaded(loading, limits.max_context, scheduling)
    service = Service(loaded.load, lambda engine, told: _scheduler(engine, told, scheduling))
    server: Server | None = None
    with listen(host, port) as socket:
        if not loading.quiet:
            say(f"{model_name}: listening on {url(socket)}")
        try:
            service.start()  # and import what HTTP needs meanwhile
            from ds4q.runtime.serve.app import make_app
            from ds4q.runtime.serve.server import Server

            try:
                app = make_app(
                    service,
                    model_name=model_name,
                    tokenizer=tokenizer,
                    metadata=metadata,
                    limits=limits,
                    api_key=api_key,
                    encoding=encoding,
                    about=loaded.about,
                )
            except RunError as error:  # of the metadata
                raise error.located(path=loading.file) from None
            server = Server(app, service, loaded.warn)
            server.run(sockets=[socket])
        except KeyboardInterrupt as stop:
            _leave(service, stop, forced=server is not None and server.forced)
            raise
        finally:
            service.close()
            loaded.warn()
    if service.error is not None:
        raise service.error


class _Loaded:
    """A model that is loaded in a thread, and what is said of it.

    Attributes
    ----------
    about : ``kv_type``, and once it is loaded ``device``, in words
    """

    def __init__(
        self, loading: Loading, max_context: int | None, scheduling: Mapping[str, int]
    ) -> None:
        self.about: dict[str, str] = {"kv_type": loading.kv_type}
        self._loading = loading
        self._notes: list[str] = []  # the model's own, which grow while it is served
        self._warned = 0
        self._lock = threading.Lock()
        self._max_context = max_context
        self._scheduling = scheduling

    def load(self, report: Progress) -> Engine | HipEngine:
        """The model; ``report`` hears how far it is, as does whoever reads stderr."""
        began = time.perf_counter()
        loading = self._loading
        with compile_notice(quiet=loading.quiet), load_progress(quiet=loading.quiet) as show:

            def both(done: int, total: int) -> None:
                show(done, total)
                report(done, total)

            engine, facts = loading.load(
                self._max_context,
                both,
                sequences=self._scheduling["concurrent"],
                beside_bytes=self._scheduling["prefix_cache_bytes"],
                warm=True,
            )
        self.about["device"] = facts.get("name", facts["kind"])
        self._notes = engine.notes
        self.warn()
        if not loading.quiet:
            say(f"ready after {time.perf_counter() - began:.1f} s")
        return engine

    def warn(self) -> None:
        """Warn of the model's notes that came since the last call; any thread may call it."""
        with self._lock:
            known, self._warned = self._warned, len(self._notes)
            warn_of(self._notes[: self._warned], known)


def _scheduler(engine: Any, told: Callable[[], None], scheduling: Mapping[str, int]) -> Scheduler:
    from ds4q.runtime.serve.scheduler import Scheduler

    return Scheduler(engine, told=told, **scheduling)


def _leave(service: Service, stop: KeyboardInterrupt, *, forced: bool) -> None:
    """End the process here where the model's threads would have to be waited for too long.

    That is after a second signal, and where a load that nobody wants any more does not notice it.
    """
    if not forced and service.scheduler is None:
        service.drain(0)  # so that loading ends
    if forced or not service.wait(GIVE_UP_S):
        from ds4q.cli import ending

        status = ending(stop)
        sys.stderr.flush()
        os._exit(status)
