"""Owns what changes or judges entries and files: ``registry add``, ``verify`` and ``rm``."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ds4q.artifact.places import broken_link, reason
from ds4q.cli import common
from ds4q.cli.registry_shared import (
    entry_document,
    load,
    models_option,
    open_store,
    registry_option,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ds4q.artifact.report import Report
    from ds4q.quantize.job import Summary
    from ds4q.registry.add import Added, Wish
    from ds4q.registry.entries import Entry, Registry
    from ds4q.registry.remove import Removal
    from ds4q.registry.store import Store


@click.command("add")
@click.argument("file", type=click.Path(path_type=Path), metavar="FILE")
@click.option(
    "--tag",
    metavar="TAG",
    help="Default: the tag that registers this file name already, else the name without suffix.",
)
@click.option("--desc", metavar="TEXT", help="What it is, in a line.")
@click.option(
    "--min-vram-gb",
    type=click.FloatRange(min=0),
    metavar="GB",
    help="Memory that it needs when nothing is paged. Default: what the file takes.",
)
@click.option(
    "--adapter",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Also register this expert predictor of the model.",
)
@click.option("--force", is_flag=True, help="Replace what the tag means, if that is another file.")
@click.option("--dry-run", is_flag=True, help="Show the entry; write nothing.")
@registry_option
@models_option
@common.json_option
@common.talk_options
def add(
    file: Path,
    tag: str | None,
    desc: str | None,
    min_vram_gb: float | None,
    adapter: Path | None,
    force: bool,
    dry_run: bool,
    origin: str | None,
    folder: Path | None,
    as_json: bool,
    quiet: bool,
    verbose: bool,
) -> None:
    """Register the artifact FILE under a tag of your own; again changes only what differs.

    Example: ds4q registry add flash.hfq --tag flash:fp4

    Size, SHA-256, architecture, quantization and recipe are computed from FILE; its receipt and its
    draft models (FILE's name with -dspark or -mtp) are registered with it, and must be its own.
    The entry goes to registry.json in DS4Q_HOME, or into the document that --registry names.
    """
    from ds4q.registry.add import Wish, default_tag

    registry, local = _own_registry(origin)
    wish = Wish(
        default_tag(registry, file.name) if tag is None else tag,
        desc,
        min_vram_gb,
        adapter,
        replace=force,
    )
    store = open_store(folder)
    added = _register(registry, local, file, wish, store, dry_run=dry_run, quiet=quiet)
    if as_json:
        common.emit_json(added_document(added))
    else:
        print_added(added, dry_run=dry_run)


def _own_registry(origin: str | None) -> tuple[Registry, Path]:
    """What is known, and the document that takes new entries."""
    from ds4q.registry.entries import Registry
    from ds4q.registry.sources import is_url, local_registry_path

    if origin is None:
        return load(None), local_registry_path()
    if is_url(origin):
        raise click.BadParameter("name a file: a URL cannot be written to", param_hint="--registry")
    path = Path(origin)
    return (load(origin) if path.exists() else Registry({}, {}, "", origin)), path


def _register(
    registry: Registry,
    local: Path,
    file: Path,
    wish: Wish,
    store: Store,
    *,
    known: Mapping[Path, str] | None = None,
    dry_run: bool = False,
    quiet: bool = False,
) -> Added:
    """``registry.add`` with a progress bar and its warnings; ``known`` are digests by path."""
    from ds4q.api import check_adapter
    from ds4q.registry.add import add as add_entry
    from ds4q.registry.store import digest_of

    here = store.folder == file.parent.resolve()
    with common.progress("hash", file.stat().st_size, quiet=quiet) as advance:

        def sha256(path: Path) -> str:
            if known is not None and path in known:
                return known[path]
            if here and path.parent == file.parent:
                return store.digest(path.name, advance=advance)
            return digest_of(path, advance=advance)

        added = add_entry(
            registry,
            local,
            file,
            wish,
            dry_run=dry_run,
            check_adapter=check_adapter,
            sha256=sha256,
        )
    for warning in added.warnings:
        common.warn(warning)
    if here and not dry_run:
        store.take_back(file.name, wish.tag)
    if not here:
        common.warn(f"{file} is not in {store.folder}: list, verify and rm look for it there")
    return added


class Registration:
    """What ``ds4q quantize --register TAG`` does once the artifact is there.

    Made before any work: a tag that could not be registered is refused then.
    """

    def __init__(self, tag: str, out: Path) -> None:
        from ds4q.artifact.hfq import ARCH_DEEPSEEK4
        from ds4q.registry.add import check_early

        self._tag, self._out = tag, out
        check_early(load(None), out.name, tag, ARCH_DEEPSEEK4, path=out)

    def finish(self, summary: Summary, *, quiet: bool) -> Added:
        """Register what the job wrote; what it has just hashed is not hashed again."""
        from ds4q.registry.add import Wish
        from ds4q.registry.entries import load_registry
        from ds4q.registry.sources import local_registry_path

        paths = [output.path for output in summary.plan.outputs]
        digests = [receipt.sha256 for receipt in summary.receipts]
        known = {} if summary.already_done else dict(zip(paths, digests, strict=True))
        wish = Wish(self._tag, drafts=paths[1:])
        try:
            return _register(
                load_registry(offline=True),  # others may have registered while the job ran
                local_registry_path(),
                self._out,
                wish,
                open_store(None),
                known=known,
                quiet=quiet,
            )
        except Exception:
            words = shlex.join([str(self._out), "--tag", self._tag])
            common.say(f"the artifact is written; register it with: ds4q registry add {words}")
            raise


def added_document(added: Added) -> dict[str, Any]:
    """What was registered, as JSON."""
    return {
        "tag": added.tag,
        "registry": str(added.path),
        "new": added.was is None,
        "changed": list(added.changed),
        "entry": entry_document(added.entry),
    }


def print_added(added: Added, *, dry_run: bool = False) -> None:
    """What was registered, or would be, in a few lines."""
    from ds4q.registry.rules import SIDECAR_KINDS

    entry = added.entry
    if added.was is None:
        verb = "would register" if dry_run else "registered"
    elif added.changed:
        verb = f"{'would change' if dry_run else 'changed'} ({', '.join(added.changed)})"
    else:
        verb = "unchanged"
    size = f"{entry['size_bytes']:,} bytes"
    common.line(f"{verb} {added.tag}: {entry['file']}, {entry['quant']}, {size}")
    common.line(f"  sha256     {entry['sha256']}")
    for kind in SIDECAR_KINDS:
        if kind in entry:
            common.line(f"  {kind:10} {entry[kind]['file']}")
    common.line(f"  in         {added.path}")


# ---------------------------------------------------------------- verify


@click.command("verify")
@click.argument("names", metavar="[TAG]...", nargs=-1)
@registry_option
@models_option
@common.json_option
@common.talk_options
def verify(
    names: tuple[str, ...],
    origin: str | None,
    folder: Path | None,
    as_json: bool,
    quiet: bool,
    verbose: bool,
) -> None:
    """Hold the registry against its rules, and the files of each TAG against their entries.

    \b
    Example: ds4q registry verify flash:fp4
             ds4q registry verify --registry mine.json

    Without TAG every tag whose trunk is in the models folder. Sizes are compared first, then
    SHA-256; then headers, and whether receipt and draft belong to the trunk. Whatever differs is
    told with both values; nothing is ever deleted. Here, unlike elsewhere, a key that the schema
    does not know is an error.

    Exit status 0: all is as registered; 1: something is not.
    """
    report, registry = _check_documents(origin)
    if registry is not None:
        store = open_store(folder)
        for tag in _tags_to_verify(registry, store, names):
            _verify_tag(report, registry.entries[tag], store, quiet)
        report.artifact["models_dir"] = str(store.folder)
    if as_json:
        common.emit_json(report.document())
    else:
        _print_report(report)
    if not report.ok:
        click.get_current_context().exit(1)


def _check_documents(origin: str | None) -> tuple[Report, Registry | None]:
    """The strict checks of what is in use, and what it says; None where it cannot be used."""
    from ds4q.artifact.report import Report
    from ds4q.registry.entries import load_registry
    from ds4q.registry.errors import DocumentError
    from ds4q.registry.sources import words_for
    from ds4q.registry.verify import check_registry

    report = Report({"path": words_for(origin) if origin else "registry", "name": "registry"})
    with report.check("schema") as check:
        check_registry(check, origin)
    try:
        registry = load_registry(origin, offline=True)
    except DocumentError:
        return report, None
    report.artifact["path"] = registry.origin
    return report, registry


def _tags_to_verify(registry: Registry, store: Store, names: Sequence[str]) -> list[str]:
    if names:
        return [registry.resolve(name).tag for name in dict.fromkeys(names)]
    return [tag for tag, entry in registry.entries.items() if store.size(entry.file) is not None]


def _verify_tag(report: Report, entry: Entry, store: Store, quiet: bool) -> None:
    """One check, named after the tag."""
    from ds4q.api import check_adapter
    from ds4q.artifact.report import Failure
    from ds4q.registry.verify import check_sidecars, check_trunk

    files = [entry.file, *(sidecar.file for sidecar in entry.sidecars)]
    total = sum(store.size(file) or 0 for file in files)
    trunk = store.path(entry.file)
    with (
        report.check(entry.tag) as check,
        common.progress(entry.tag, total, quiet=quiet) as advance,
    ):

        def sha256(path: Path) -> str:
            return store.digest(path.name, advance=advance)

        try:
            if store.size(entry.file) is None:
                what = broken_link(trunk)
                where = f"not in {store.folder}" if what is None else f"a {what}"
                check.fail(Failure(f"{entry.tag}: {entry.file} is {where}"))
            else:
                check_trunk(entry, trunk, lambda: sha256(trunk), check)
            check_sidecars(entry, store.folder, check, check_adapter=check_adapter, sha256=sha256)
        except OSError as error:
            check.fail(Failure(f"{error.filename}: {reason(error)}"))


def _print_report(report: Report) -> None:
    common.print_checks(report)
    for check in report.checks:
        for note in check.notes:
            common.line(f"{check.name}: {note}")
    for check in report.checks:
        for line in check.lines():  # that name their tag, mostly
            known = line.startswith(f"{check.name}: ")
            common.say(line if known else f"{check.name}: {line}")
    common.line(f"{report.artifact['path']}: {report.result}")


# ---------------------------------------------------------------- rm


@click.command("rm")
@click.argument("names", metavar="TAG...", nargs=-1, required=True)
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--dry-run", is_flag=True, help="List what would go; remove nothing.")
@click.option("--forget", is_flag=True, help="Also take your own entry of TAG out of the registry.")
@registry_option
@models_option
@common.json_option
@common.talk_options
def rm(
    names: tuple[str, ...],
    yes: bool,
    dry_run: bool,
    forget: bool,
    origin: str | None,
    folder: Path | None,
    as_json: bool,
    quiet: bool,
    verbose: bool,
) -> None:
    """Remove the files of each TAG from the models folder, after listing and asking.

    Example: ds4q registry rm deepseek-v4-flash:mq2r

    Exactly the files that the tag registers go: trunk, receipt, drafts, adapter, and what an
    unfinished download of them left. What another installed tag names, too, stays. TAG may also be
    the name of a file that no tag registers; then the files that are its own by name go with it.
    """
    from ds4q.registry.remove import plan_removal, remove

    if as_json and not (yes or dry_run):
        raise click.UsageError("--json cannot ask: add --yes or --dry-run")
    if forget and origin is not None:
        raise click.UsageError("--forget is for your own registry, not for the one of --registry")
    registry, store = load(origin), open_store(folder)
    own = _own_tags(registry, names) if forget else []
    removal = plan_removal(registry, store, names)
    if not as_json:
        _print_removal(removal, store, own, dry_run)
    asks = bool(removal.files or own)
    work = asks or bool(removal.given_up)
    agreed = not dry_run and work and (yes or not asks or _agrees(removal, own))
    if agreed:
        remove(store, removal)
        _forget(own)
    if as_json:
        common.emit_json(
            {
                "removed": [] if dry_run else [name for name, _ in removal.files],
                "files": [{"file": name, "bytes": size} for name, size in removal.files],
                "kept": [{"file": name, "tag": tag} for name, tag in removal.kept],
                "forgotten": [] if dry_run else own,
            }
        )
    if work and not dry_run and not agreed:
        common.say("nothing was removed")
        click.get_current_context().exit(1)


def _own_tags(registry: Registry, names: Sequence[str]) -> list[str]:
    return sorted({registry.resolve(name).tag for name in names} & registry.local)


def _agrees(removal: Removal, own: Sequence[str]) -> bool:
    """Whether whoever sits there says yes; an input that ends says no."""
    total = common.amount_text(sum(size for _, size in removal.files))
    entries = f" and forget {len(own)} of your entries" if own else ""
    common.say(f"Remove {len(removal.files)} files, {total}{entries}? [y/N] ", newline=False)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _forget(own: Sequence[str]) -> None:
    from ds4q.registry.add import forget
    from ds4q.registry.sources import local_registry_path

    for tag in own:
        forget(local_registry_path(), tag)


def _print_removal(removal: Removal, store: Store, own: Sequence[str], dry_run: bool) -> None:
    verb = "would remove" if dry_run else "remove"
    for name, size in removal.files:
        common.line(f"{verb} {store.path(name)}: {size:,} bytes")
    for name, tag in removal.kept:
        common.line(f"keep {store.path(name)}: {tag} needs it")
    for name, tags in removal.given_up:
        common.line(f"{', '.join(tags)}: {name} goes when the last of its tags is removed")
    for name in removal.left:
        common.line(f"leave {store.path(name)}: not a receipt of a file that goes")
    if removal.by_name:
        common.line("no tag registers these: what goes with the file was found by its name")
    for tag in own:
        common.line(f"{'would forget' if dry_run else 'forget'} {tag}, your own entry")
    if not removal.files and not removal.given_up and not own:
        common.line(f"nothing to remove in {store.folder}")
