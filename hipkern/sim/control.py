"""Owns the settings and counts of the simulated device that is open in this process.

The library reads ``DS4Q_SIM_<NAME>`` from the environment when it is loaded; these calls change and
ask it later. README.md lists the names.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["Control"]


class Control:
    """Settings and counts of the library in ``folder`` (what ``sim.build`` gave).

    Loading it here and through hip-python gives one library, with one state.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._library = ctypes.CDLL(str(folder / "lib" / "libamdhip64.so"))
        self._library.ds4q_sim_get.restype = ctypes.c_int64

    def set(self, **values: int | str) -> None:
        """Change settings, by name; ``fail="hipMalloc:2:2"`` makes the second call answer 2."""
        for name, value in values.items():
            if self._library.ds4q_sim_set(name.encode(), str(value).encode()) != 0:
                raise ValueError(f"the simulated device has no setting {name}={value}")

    def get(self, name: str) -> int:
        """A setting or a count."""
        value = int(self._library.ds4q_sim_get(name.encode()))
        if value < 0:
            raise ValueError(f"the simulated device counts no {name}")
        return value

    def live(self) -> dict[str, int]:
        """What has been made and not freed, by kind; empty when all is freed."""
        kinds = (
            "allocations",
            "pinned",
            "streams",
            "events",
            "graphs",
            "graph_execs",
            "modules",
        )
        counts = {kind: self.get(f"live_{kind}") for kind in kinds}
        return {kind: count for kind, count in counts.items() if count}

    def reset(self) -> None:
        """Settings, faults and counts as in a fresh process; what is alive stays alive."""
        self._library.ds4q_sim_reset()

    @contextmanager
    def using(self, **values: int | str) -> Iterator[None]:
        """``set`` for a while; then ``reset``."""
        self.set(**values)
        try:
            yield
        finally:
            self.reset()
