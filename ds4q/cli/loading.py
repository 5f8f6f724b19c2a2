"""Owns the options that say what a model runs on, and loading it by them. No model code.

``run`` and ``serve`` take the same options, and load in the same way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from ds4q.cli.common import Advance, progress, say, threads_option, warn
from ds4q.cli.experts import Devices, ExpertOptions, expert_options

if TYPE_CHECKING:
    from ds4q.quantize.encoding import Encoding
    from ds4q.runtime.device.engine import HipEngine
    from ds4q.runtime.engine import Engine
    from ds4q.runtime.experts.options import CacheOptions
    from ds4q.runtime.kvtype import KvType
    from ds4q.runtime.source import Progress
    from ds4q.runtime.spread import Spread

F = TypeVar("F", bound=Callable[..., Any])

KV_TYPES: tuple[KvType, ...] = ("f32", "f16", "bf16")
DEFAULT_KV_TYPE: KvType = "f32"


@dataclass(frozen=True, slots=True)
class Loading:
    """How the model of an artifact is loaded.

    Attributes
    ----------
    cache : how routed experts are kept; None where all of them are in memory
    kv_type : how a sequence's window rows and compressed entries are kept
    """

    file: Path
    device: str
    threads: int
    quiet: bool
    cache: CacheOptions | None
    spread: Spread
    kv_type: KvType

    def metadata(self) -> Mapping[str, Any]:
        """The artifact's metadata; warns of what its reader does, and of what is not applied."""
        from ds4q.artifact.hfq import Reader
        from ds4q.quantize.generation import note

        with Reader(self.file) as reader:
            generation = reader.metadata.get("generation_config")
            odd = note(generation) if isinstance(generation, dict) else []
            warn_of([f"{self.file}: {warning}" for warning in (*reader.warnings, *odd)])
            return reader.metadata

    def check(self) -> None:
        """Refuse what cannot be run on, before anything is read; raises ``RunError``."""
        self.spread.check(paged=self.cache is not None and self.cache.paged)

    def open(
        self, stack: ExitStack, tokens: int | None, *, beside_bytes: int = 0, warm: bool = False
    ) -> tuple[Engine | HipEngine, dict[str, str]]:
        """``load`` with progress on stderr; ``stack`` closes the model, and warns of its notes."""
        self.check()
        stack.enter_context(compile_notice(quiet=self.quiet))
        with load_progress(quiet=self.quiet) as report:
            engine, where = self.load(tokens, report, beside_bytes=beside_bytes, warm=warm)
        stack.enter_context(engine)
        notes = engine.notes
        warn_of(notes)
        stack.callback(warn_of, notes, len(notes))  # what comes while it runs
        return engine, where

    def load(
        self,
        tokens: int | None,
        report: Progress,
        *,
        sequences: int = 1,
        beside_bytes: int = 0,
        warm: bool = False,
    ) -> tuple[Engine | HipEngine, dict[str, str]]:
        """A loaded model, to be closed, and what it runs on.

        Parameters
        ----------
        tokens : the most that one sequence will hold; None: as many as the model can
        report : called with (bytes read, bytes in all)
        sequences, beside_bytes : what an automatic cache of experts leaves room for
        warm : compute a token, too, so that nobody's first answer waits for kernels to compile
        """
        engine: Engine | HipEngine
        if self.device == "cpu":
            engine, facts = self._load_cpu(tokens, report, sequences, beside_bytes), {"kind": "cpu"}
        else:
            engine, facts = self._load_hip(tokens, report, sequences, beside_bytes)
        if warm:
            from ds4q.runtime.serve.service import warm_up

            try:
                warm_up(engine)
            except BaseException:
                engine.close()
                raise
        return engine, facts

    def _load_cpu(
        self, tokens: int | None, report: Progress, sequences: int, beside_bytes: int
    ) -> Engine:
        from ds4q.runtime.engine import Engine

        return Engine.load(
            self.file,
            threads=self.threads,
            max_context=self._context(tokens),  # so that memory is checked for it
            progress=report,
            cache=self.cache,
            spread=self.spread,
            kv_type=self.kv_type,
            sequences=sequences,
            beside_bytes=beside_bytes,
        )

    def _load_hip(
        self, tokens: int | None, report: Progress, sequences: int, beside_bytes: int
    ) -> tuple[HipEngine, dict[str, str]]:
        from ds4q.runtime.device.engine import HipEngine
        from ds4q.runtime.device.state import FIRST_TOKENS

        sized = self._context(tokens)
        if sized is not None and sized > FIRST_TOKENS:
            sized = None  # few answers use a large --max-tokens up: caches grow when they must
        engine = HipEngine.load(
            self.file,
            max_context=sized,
            progress=report,
            cache=self.cache,
            spread=self.spread,
            kv_type=self.kv_type,
            sequences=sequences,
            beside_bytes=beside_bytes,
        )
        facts = engine.backend.facts()
        if not self.quiet:
            say(f"device: {facts['name']} ({facts['arch']})")
        warn_of(engine.backend.device.notes)
        return engine, facts

    def _context(self, tokens: int | None) -> int | None:
        """``tokens``, or as many as the model has positions for."""
        from ds4q.artifact.hfq import Reader
        from ds4q.runtime.config import checked_config

        if tokens is None:
            return None
        with Reader(self.file) as reader:
            return min(tokens, checked_config(reader).max_position_embeddings)


@contextmanager
def load_progress(*, quiet: bool) -> Iterator[Progress]:
    """Shows on stderr how far loading is; its total is the first report's."""
    with ExitStack() as shown:
        advance: Advance | None = None
        known = 0

        def report(done: int, total: int) -> None:
            nonlocal advance, known
            if advance is None:  # a paged load reads less than the file
                advance = shown.enter_context(progress("loading", total, quiet=quiet))
            advance(done - known)
            known = done

        yield report


@contextmanager
def compile_notice(*, quiet: bool) -> Iterator[None]:
    """Says on stderr, once, that kernels are compiled: for up to a minute nothing else moves."""
    if quiet:
        yield
        return
    from numba.core import event

    class Told(event.Listener):
        """Hears of each function that no cache on disk has."""

        said = False

        def on_start(self, event: object) -> None:
            if not self.said:
                self.said = True
                say("compiling kernels: the first start on a machine takes longer")

        def on_end(self, event: object) -> None:
            """Nothing: how long it took shows."""

    with event.install_listener("numba:compile", Told()):
        yield


def warn_of(notes: Sequence[str], first: int = 0) -> None:
    """Warn of each note from number ``first`` on."""
    for note in notes[first:]:
        warn(note)


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """What a command's line says of what a model runs on; option names are field names."""

    device: str
    kv_type: KvType | None
    encoding: Path | None
    experts: ExpertOptions
    threads: int

    def loading(self, file: Path, *, quiet: bool) -> Loading:
        """How to load ``file``; raises ``click.UsageError`` for options that exclude each other."""
        return Loading(
            file,
            self.device,
            self.threads,
            quiet,
            self.experts.cache(),
            self.experts.spread(self.device),
            self.kv_type or _registered_kv_type(file, quiet=quiet),
        )

    def read_encoding(self, file: Path, metadata: Mapping[str, Any]) -> Encoding | None:
        """The texts of a release's prompt format: of --encoding, else ``file``'s own or beside it.

        Raises ``EncodingError`` for what cannot be read as such.
        """
        from ds4q.quantize.encoding import find_encoding, parse_encoding

        if self.encoding is None:
            found = find_encoding(file, metadata)
        else:
            found = parse_encoding(self.encoding)
        warn_of(found.notes if found is not None else ())
        return found


def _registered_kv_type(file: Path, *, quiet: bool) -> KvType:
    """What the registry's entry of this file names, else the default; what it is is said."""
    from ds4q.artifact.errors import Ds4qError
    from ds4q.registry.usage import entries_of, kv_modes, registry_naming

    try:
        registry = registry_naming(file)
        modes = {} if registry is None else kv_modes(entries_of(registry, file))
    except FileNotFoundError:  # whoever opens the artifact says so
        return DEFAULT_KV_TYPE
    except (Ds4qError, OSError) as error:
        warn(f"{error}; KV type {DEFAULT_KV_TYPE} is taken, --kv-type chooses another")
        return DEFAULT_KV_TYPE
    if not modes:
        return DEFAULT_KV_TYPE
    named = "; ".join(f"{mode} by {', '.join(tags)}" for mode, tags in modes.items())
    if len(modes) == 1 and (mode := next(iter(modes))) in (*KV_TYPES, "auto"):
        kv_type = DEFAULT_KV_TYPE if mode == "auto" else cast("KvType", mode)
        if not quiet:
            say(f"KV type: {kv_type} (registered as {named})")
        return kv_type
    warn(
        f"{file}: its registered KV type is not one of {', '.join(KV_TYPES)} ({named}): "
        f"{DEFAULT_KV_TYPE} is taken, --kv-type chooses another"
    )
    return DEFAULT_KV_TYPE


_OPTIONS = (
    click.option(
        "--device",
        type=Devices(["cpu", "hip"]),
        default="cpu",
        show_default=True,
        help="Where the model runs; hip: on a GPU, or as DS4Q_HIP says.",
    ),
    click.option(
        "--kv-type",
        type=click.Choice(KV_TYPES),
        show_default="as the artifact is registered, else f32",
        help="How the cache of a sequence is kept. f16 and bf16 halve it, and round.",
    ),
    click.option(
        "--encoding",
        type=click.Path(exists=True, path_type=Path),
        metavar="PATH",
        help="The release's encoding folder, or its encoding_dsv4.py, where the artifact does not "
        "hold its texts. It is read, never run.",
    ),
)


def model_options(command: F) -> F:
    """The options of ``ModelOptions``, passed as ``model``."""

    @functools.wraps(command)
    def gathered(**values: Any) -> Any:
        own = {each.name: values.pop(each.name) for each in fields(ModelOptions)}
        return command(model=ModelOptions(**own), **values)

    gathered = threads_option(expert_options(gathered))
    for option in reversed(_OPTIONS):
        gathered = option(gathered)
    return gathered  # type: ignore[return-value]
