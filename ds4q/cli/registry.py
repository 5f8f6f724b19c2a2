"""Owns ``ds4q registry``: tags in, tables and documents out. The work is that of ``registry/``.

What changes entries and files, and what holds them against each other: ``registry_own.py``.
"""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ds4q.cli import common, registry_own
from ds4q.cli.registry_shared import (
    entry_document,
    load,
    models_option,
    open_store,
    registry_option,
)

if TYPE_CHECKING:
    from datetime import datetime

    from ds4q.registry.card import Sources
    from ds4q.registry.entries import Entry, Registry, Sidecar
    from ds4q.registry.installed import Held, Model, Stray
    from ds4q.registry.store import Store


@click.group("registry")
def command() -> None:
    """Know artifacts by tag: list, register, fetch, verify and remove them.

    \b
    Example: ds4q registry list
             ds4q registry pull deepseek-v4-flash
             ds4q registry add flash.hfq --tag flash:fp4
             ds4q registry verify flash:fp4

    A tag, an alias or a registered file name is meant exactly as it is spelled. Only pull, update
    and gen --refresh open a connection.
    """


for _each in (registry_own.add, registry_own.verify, registry_own.rm):
    command.add_command(_each)


# ---------------------------------------------------------------- looking


@command.command("list")
@registry_option
@models_option
@common.json_option
@common.talk_options
def list_(
    origin: str | None, folder: Path | None, as_json: bool, quiet: bool, verbose: bool
) -> None:
    """List every tag, and what of it is in the models folder. Nothing is hashed or fetched.

    Example: ds4q registry list

    Artifacts in the folder that no tag names are listed below.
    """
    from ds4q.registry.installed import models, strays

    registry, store = load(origin), open_store(folder)
    known, others = models(registry, store), strays(registry, store)
    if as_json:
        common.emit_json(
            {
                "registry": registry.origin,
                "models_dir": str(store.folder),
                "models": [_model_document(registry, model) for model in known],
                "others": [_stray_document(stray) for stray in others],
            }
        )
    else:
        _print_models(known, others)


@command.command("show")
@click.argument("name", metavar="TAG")
@registry_option
@models_option
@common.json_option
@common.talk_options
def show(
    name: str, origin: str | None, folder: Path | None, as_json: bool, quiet: bool, verbose: bool
) -> None:
    """Show all that the registry says of TAG, and where its files stand.

    Example: ds4q registry show deepseek-v4-flash
    """
    from ds4q.registry.installed import model_of

    registry, store = load(origin), open_store(folder)
    model = model_of(registry, store, registry.resolve(name))
    document = _model_document(registry, model) | {"entry": entry_document(model.entry.raw)}
    if as_json:
        common.emit_json(document)
        return
    common.line(f"{model.entry.tag}: {model.entry.desc}")
    for alias in model.aliases:
        common.line(f"  alias {alias}")
    shown = {held.kind for held in model.files}
    for key, value in sorted(model.entry.raw.items()):
        if key != "desc" and key not in shown:
            common.line(f"  {key}: {_words(value)}")
    for held in _files_document(model):
        trust = f"sha256 {held['sha256']}" if held["sha256"] else "no digest was published"
        common.line(f"  {held['kind']} {held['file']}: {_held_words(held)}, {trust}")


@command.command("status")
@registry_option
@models_option
@common.json_option
@common.talk_options
def status(
    origin: str | None, folder: Path | None, as_json: bool, quiet: bool, verbose: bool
) -> None:
    """Say which registry is in use, from where, and how much of it is in the models folder.

    Example: ds4q registry status
    """
    from ds4q.registry.installed import models
    from ds4q.registry.sources import URL_VARIABLE, local_registry_path, words_for

    registry, store = load(origin), open_store(folder)
    document = {
        "registry": registry.origin,
        "generated_at": registry.generated_at,
        "url": words_for(os.environ.get(URL_VARIABLE, "")) or None,
        "own_registry": str(local_registry_path()),
        "own_tags": sorted(registry.local),
        "tags": len(registry.entries),
        "aliases": len(registry.aliases),
        "models_dir": str(store.folder),
        "installed": [m.entry.tag for m in models(registry, store) if m.installed],
        "warnings": list(registry.warnings),
    }
    if as_json:
        common.emit_json(document)
        return
    for key, value in document.items():
        if key != "warnings":  # told on stderr
            common.line(f"{key}: {_words(value)}")


@command.command("card")
@click.argument("name", metavar="TAG")
@click.option(
    "--verify",
    "report",
    type=click.Path(path_type=Path),
    metavar="FILE.json",
    help="A report of 'ds4q verify --json' of this artifact.",
)
@click.option("--device", metavar="NAME", help="The device on which its gates ran.")
@click.option(
    "--date",
    type=click.DateTime(["%Y-%m-%d"]),
    metavar="YYYY-MM-DD",
    help="The day on which they ran.",
)
@registry_option
@models_option
@common.json_option
@common.talk_options
def card(
    name: str,
    report: Path | None,
    device: str | None,
    date: datetime | None,
    origin: str | None,
    folder: Path | None,
    as_json: bool,
    quiet: bool,
    verbose: bool,
) -> None:
    """Print the model card of TAG: what entry, receipt, header and verify report say.

    \b
    Example: ds4q verify flash.fp4 --source SRC --registry flash:fp4 --json > v.json
             ds4q registry card flash:fp4 --verify v.json > README.md

    Receipt and header are read where they are in the models folder. A field that none of these says
    reads "not measured by this project"; figures of gates need --device and --date, too.
    """
    from ds4q.registry.card import render

    if (device is None) != (date is None) or (device is not None and report is None):
        raise click.UsageError("--device and --date belong together, and to --verify")
    registry, store = load(origin), open_store(folder)
    where = device, None if date is None else date.date().isoformat()
    sources = _card_sources(registry, store, registry.resolve(name), report, where)
    text = render(sources)
    if as_json:
        common.emit_json({"tag": sources.entry.tag, "card": text})
    else:
        common.lines(text)


def _card_sources(
    registry: Registry,
    store: Store,
    entry: Entry,
    report: Path | None,
    where: tuple[str | None, str | None],
) -> Sources:
    from ds4q.artifact.hfq import Reader
    from ds4q.artifact.receipt import read_receipt, receipt_path
    from ds4q.registry.card import Header, Sources, read_measured
    from ds4q.registry.installed import held, model_of
    from ds4q.registry.schema import MAX_DOCUMENT_BYTES
    from ds4q.registry.store import opened
    from ds4q.registry.verify import check_receipt

    trunk = store.path(entry.file)
    receipt = header = measured = None
    if receipt_path(trunk).exists():
        check_receipt(receipt_path(trunk), entry.sha256, entry.size_bytes)
        receipt = read_receipt(receipt_path(trunk))
    state = held(store, "trunk", entry).state
    if state in ("verified", "not hashed"):
        with Reader(trunk) as reader:
            header = Header.of(reader)
    elif state not in ("absent", "partial"):
        common.warn(f"{trunk}: {state}: nothing is taken from it; see 'ds4q registry verify'")
    if report is not None:
        device, date = where
        with opened(report) as (fd, _), open(fd, "rb", closefd=False) as file:
            raw = file.read(MAX_DOCUMENT_BYTES + 1)
        measured = read_measured(raw, entry, str(report), device=device, date=date)
    return Sources(entry, model_of(registry, store, entry).aliases, receipt, header, measured)


# ---------------------------------------------------------------- fetching


@command.command("pull")
@click.argument("name", metavar="TAG")
@click.option("--trunk-only", is_flag=True, help="Fetch no sidecars but the receipt.")
@click.option("--adapter", is_flag=True, help="Also fetch the expert predictor (experimental).")
@click.option(
    "--allow-unverified", is_flag=True, help="Accept files of which nobody published a digest."
)
@click.option("--force", is_flag=True, help="Replace files that are not what the registry says.")
@click.option("--dry-run", is_flag=True, help="Say what would be fetched; fetch nothing.")
@registry_option
@models_option
@common.json_option
@common.talk_options
def pull(
    name: str,
    trunk_only: bool,
    adapter: bool,
    allow_unverified: bool,
    force: bool,
    dry_run: bool,
    origin: str | None,
    folder: Path | None,
    as_json: bool,
    quiet: bool,
    verbose: bool,
) -> None:
    """Fetch TAG and its sidecars into the models folder, and prove that they are what it says.

    Example: ds4q registry pull deepseek-v4-flash

    A stopped or broken transfer goes on where it was when the command is repeated. Nothing stands
    at a final name before its size and SHA-256 are right. A file that is there already is hashed,
    not believed.
    """
    from ds4q.registry import pull as pulling

    entry = load(origin, offline=False).resolve(name, to_pull=True)
    _warn_of_memory(entry)
    pulled = pulling.pull(
        entry,
        open_store(folder).folder,
        trunk_only=trunk_only,
        adapter=adapter,
        allow_unverified=allow_unverified,
        force=force,
        dry_run=dry_run,
        progress=partial(common.progress, quiet=quiet),
        tell=(lambda line: None) if quiet else common.say,
    )
    if as_json:
        common.emit_json(pulled.document())
        return
    for file in pulled.files:
        trust = "unverified" if file.unverified else f"sha256 {file.sha256}"
        size = "size unknown" if file.size_bytes is None else f"{file.size_bytes:,} bytes"
        common.line(f"{file.state} {file.path}: {file.kind}, {size}, {trust}")


def _warn_of_memory(entry: Entry) -> None:
    """Tell where every device here is smaller than the model, which may be paged."""
    from ds4q.cli.doctor import hip_facts

    sizes = [device["total_bytes"] for device in hip_facts()["found"]]
    if sizes and max(sizes) < entry.min_vram_gb * 1e9:
        common.warn(
            f"{entry.tag} needs {entry.min_vram_gb:g} GB to be all in memory, and the largest "
            f"device here has {max(sizes) / 1e9:.1f} GB: run it with --expert-cache"
        )


@command.command("update")
@registry_option
@common.json_option
@common.talk_options
def update(origin: str | None, as_json: bool, quiet: bool, verbose: bool) -> None:
    """Download the registry document of DS4Q_REGISTRY_URL (or --registry URL) anew.

    Example: ds4q registry update

    Other commands use the copy for a day. There is no default URL: without one the bundled document
    is used, and nothing can be updated.
    """
    from ds4q.registry.entries import update_registry

    registry = update_registry(origin)
    for warning in registry.warnings:
        common.warn(warning)
    document = {
        "registry": registry.origin,
        "generated_at": registry.generated_at,
        "tags": len(registry.entries),
    }
    if as_json:
        common.emit_json(document)
    else:
        common.line(f"{registry.origin}: {document['tags']} tags, {registry.generated_at}")


@command.command("gen")
@click.option("--check", is_flag=True, help="Write nothing; exit 1 if anything would change.")
@click.option("--refresh", is_flag=True, help="Ask the hub for sizes, digests and commits first.")
@common.json_option
@common.talk_options
def gen(check: bool, refresh: bool, as_json: bool, quiet: bool, verbose: bool) -> None:
    """Make the bundled registry.json from models.json and listing.json, in a checkout of ds4q.

    Example: ds4q registry gen --check

    Offline and pure, but for --refresh, which writes listing.json anew.
    """
    from ds4q.registry.errors import GenerateError
    from ds4q.registry.generate import generate

    try:
        made = generate(check=check, refresh=refresh)
    except GenerateError as error:
        for problem in error.problems:
            common.say(problem)
        raise
    if as_json:
        common.emit_json({"changed": made.changed, "diff": list(made.diff)})
    else:
        for line in made.diff:
            common.line(line)
        if not made.changed:
            common.line("registry.json is what models.json and listing.json say")
    if check and made.changed:
        click.get_current_context().exit(1)


# ---------------------------------------------------------------- words


def _model_document(registry: Registry, model: Model) -> dict[str, Any]:
    entry = model.entry
    return {
        "tag": entry.tag,
        "aliases": list(model.aliases),
        "own": entry.tag in registry.local,
        "repo": entry.repo,
        "quant": entry.quant,
        "arch_id": entry.arch_id,
        "size_gb": entry.size_gb,
        "min_vram_gb": entry.min_vram_gb,
        "installed": model.installed,
        "files": _files_document(model),
    }


def _files_document(model: Model) -> list[dict[str, Any]]:
    said: list[Entry | Sidecar] = [model.entry, *model.entry.sidecars]
    return [
        {
            "kind": held.kind,
            "file": held.file,
            "state": held.state,
            "bytes": held.size_bytes,
            "size_bytes": what.size_bytes,
            "sha256": what.sha256,
            "experimental": held.kind == "adapter",
        }
        for held, what in zip(model.files, said, strict=True)
    ]


def _stray_document(stray: Stray) -> dict[str, Any]:
    return {
        "file": stray.file,
        "bytes": stray.size_bytes,
        "hfq": stray.hfq,
        "companions": list(stray.companions),
    }


def _held_words(held: dict[str, Any]) -> str:
    state, found, registered = held["state"], held["bytes"], held["size_bytes"]
    size = "size unknown" if registered is None else f"{registered:,} bytes"
    if state == "wrong size":
        state = f"wrong size, {found:,} bytes here"
    note = ", experimental: fetched with --adapter only" if held["experimental"] else ""
    return f"{size}, {state}{note}"


def _words(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _print_models(known: list[Model], others: list[Stray]) -> None:
    rows = [
        (
            model.entry.tag if held is model.files[0] else f"  {held.kind}",
            model.entry.quant if held is model.files[0] else "",
            f"{model.entry.size_gb:g} GB" if held is model.files[0] else "",
            _here(held, model.entry),
            held.file,
        )
        for model in known
        for held in model.files
    ]
    common.print_table(("tag", "quant", "size", "here", "file"), rows)
    for stray in others:
        fault = "" if stray.hfq else ", not readable as an HFQ file"
        own = f", with {', '.join(stray.companions)}" if stray.companions else ""
        common.line(f"no tag: {stray.file}, {stray.size_bytes:,} bytes{fault}{own}")


def _here(held: Held, entry: Entry) -> str:
    if held.state != "absent":
        return held.state
    if not entry.repo:
        return "local only"
    return "experimental" if held.kind == "adapter" else "-"
