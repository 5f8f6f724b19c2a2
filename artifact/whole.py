"""Owns writing a small file so that readers see all of it or nothing. Knows no content.

Artifacts are written otherwise, piece by piece and to be gone on with: ``writer.py``.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path


def write_whole(path: Path, text: str, *, mode: int | None = None) -> None:
    """Put ``text`` at ``path`` at once: readers see what was there before, or all of it.

    ``mode`` holds for a new file and for one that is replaced; None keeps that of a file that is
    there, and is 0o644 for a new one.

    Raises
    ------
    OSError : nothing is left behind then
    """
    kept = None
    if mode is None:
        mode = 0o644
        with suppress(FileNotFoundError):
            kept = stat.S_IMODE(path.stat().st_mode)
    number = 0
    while True:
        temporary = path.with_name(f".{path.name}.part.{os.getpid()}.{number}")
        try:
            handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
            break
        except FileExistsError:
            number += 1
    try:
        with open(handle, "wb") as file:
            if kept is not None:
                os.fchmod(file.fileno(), kept)
            file.write(text.encode("utf-8"))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
