"""Owns the kernels of a device: builds a file at its first use, loads it, launches by name.

The sources lie in the folder ``kernels`` beside this module. What a launch needs to know of a
kernel is read from its declaration there.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds4q.hipkern.build import compile_source, label
from ds4q.hipkern.handles import Function, Module
from ds4q.hipkern.source import FOLDER, Source, load

if TYPE_CHECKING:
    from ds4q.hipkern.driver import Device
    from ds4q.hipkern.streams import Stream

Defines = Mapping[str, int]
Grid = tuple[int, int, int]
_NONE: Defines = {}

DECODERS = (1, 2, 3, 16, 19, 21, 100, 101, 102, 103, 104, 106, 358, 363)
"""Ways to decode a block, by tensor type; 358 and 363 are second readings of 102 and 107."""

KV_TYPES = {"f32": 0, "f16": 1, "bf16": 2}
"""DS4Q_KV_TYPE: how window rows and compressed entries are kept."""

EXPERTS = (
    *((d, d, 16) for d in DECODERS),
    *((21, 21, shared) for shared in (1, 3)),
    (19, 19, 3),
    (106, 104, 16),
    (0, 0, 16),
)
"""Decoders of gate and up, of down, and of the shared expert's three, as artifacts have them; the
code for 0 looks the decoder up for each matrix."""


def builds(folder: Path = FOLDER) -> list[tuple[str, Defines]]:
    """Every (file, defines) that code objects are made of, by the macros that a file leaves open.

    Macros with a default, which follow a model's shape, keep it.
    """
    found: list[tuple[str, Defines]] = []
    for path in sorted(folder.glob("*.hip")):
        text = path.read_text("utf-8")
        if "DS4Q_DECODER" in text:
            found += [(path.name, {"DS4Q_DECODER": decoder}) for decoder in DECODERS]
        elif "DS4Q_KV_TYPE" in text:
            found += [(path.name, {"DS4Q_KV_TYPE": kind}) for kind in KV_TYPES.values()]
        elif "DS4Q_GATE" in text:
            names = ("DS4Q_GATE", "DS4Q_DOWN", "DS4Q_SHARED_EXPERT")
            found += [(path.name, dict(zip(names, trio, strict=True))) for trio in EXPERTS]
        else:
            found.append((path.name, _NONE))
    return found


class Kernels:
    """All kernels of one device, one module for each file and set of defines.

    Parameters
    ----------
    device : owns the modules
    folder : where the sources are
    """

    def __init__(self, device: Device, folder: Path = FOLDER) -> None:
        self.device = device
        self._folder = folder
        self._lock = threading.Lock()
        self._sources: dict[str, Source] = {}
        self._modules: dict[tuple[str, tuple[tuple[str, int], ...]], Module] = {}
        self._functions: dict[tuple[Any, ...], Function] = {}

    def launch(
        self,
        stream: Stream,
        file: str,
        kernel: str,
        grid: Grid,
        *arguments: Any,
        defines: Defines = _NONE,
    ) -> None:
        """Run ``kernel`` of ``file``, built with ``defines``, on ``stream``.

        Raises
        ------
        HipUsageError : no such kernel, or arguments that do not fit its declaration
        KernelBuildError : it does not compile
        """
        function = self._functions.get((file, kernel, *defines.items()))
        if function is None:
            function = self.function(file, kernel, defines)
        function.launch(stream, grid, *arguments)

    def function(self, file: str, kernel: str, defines: Defines = _NONE) -> Function:
        """The kernel itself, for those who launch it often."""
        key = (file, kernel, *defines.items())
        with self._lock:
            found = self._functions.get(key)
            if found is None:
                source = self._source(file)
                declared = source.kernel(kernel)
                threads = source.threads(kernel, defines)
                module = self._module(source, defines)
                found = module.function(kernel, threads, declared.kinds)
                self._functions[key] = found
            return found

    def prepare(self, builds: Iterable[tuple[str, Defines]], workers: int | None = None) -> None:
        """Build what is not in the cache yet, several at a time, and load it all."""
        wanted = [(self._source(file), defines) for file, defines in builds]
        count = workers or len(os.sched_getaffinity(0))
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(lambda build: compile_source(self.device, *build), wanted))
        with self._lock:
            for source, defines in wanted:
                self._module(source, defines)

    def _source(self, file: str) -> Source:
        found = self._sources.get(file)
        if found is None:
            found = self._sources[file] = load(file, self._folder)
        return found

    def _module(self, source: Source, defines: Defines) -> Module:
        key = (source.file, tuple(sorted(defines.items())))
        found = self._modules.get(key)
        if found is None:
            found = self.device.module(
                compile_source(self.device, source, defines), label(source, defines)
            )
            self._modules[key] = found
        return found
