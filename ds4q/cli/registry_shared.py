"""Owns what the commands of ``ds4q registry`` share: options, which registry, which folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ds4q.artifact.places import from_json
from ds4q.cli import common

if TYPE_CHECKING:
    from ds4q.registry.entries import Registry
    from ds4q.registry.store import Store

F = TypeVar("F", bound=Callable[..., Any])


def registry_option(command: F) -> F:
    """``--registry FILE|URL``, passed as ``origin``: the one document to use."""
    return click.option(
        "--registry",
        "origin",
        type=common.PATH_OR_WORD,
        metavar="FILE|URL",
        help="Use this registry document and no other. Default: the one of DS4Q_REGISTRY_URL, else "
        "the bundled one, and your own entries.",
    )(command)


def models_option(command: F) -> F:
    """``--models-dir DIR``, passed as ``folder``: where models are."""
    return click.option(
        "--models-dir",
        "folder",
        type=click.Path(path_type=Path),
        metavar="DIR",
        help="Folder of the models. Default: models in DS4Q_HOME, which is ~/.cache/ds4q if unset.",
    )(command)


def entry_document(raw: Mapping[str, Any]) -> dict[str, Any]:
    """An entry as its document has it, with the names of files as they are, for ``emit_json``."""
    return {
        key: entry_document(value)
        if isinstance(value, dict)
        else from_json(value)
        if key == "file"
        else value
        for key, value in raw.items()
    }


def load(origin: str | None, *, offline: bool = True) -> Registry:
    """The registry that ``--registry`` names, or the usual one; its warnings are told."""
    from ds4q.registry.entries import load_registry

    registry = load_registry(origin, offline=offline)
    for warning in registry.warnings:
        common.warn(warning)
    return registry


def open_store(folder: Path | None) -> Store:
    """The folder that ``--models-dir`` names, or the usual one; it need not exist yet."""
    from ds4q.registry.store import Store, models_folder

    if folder is not None and folder.exists() and not folder.is_dir():
        raise click.BadParameter(f"{str(folder)!r} is not a folder", param_hint="--models-dir")
    return Store(models_folder() if folder is None else folder)
