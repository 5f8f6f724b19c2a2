"""Owns what of a file lies in the kernel's page cache, and driving it out. Reads no payload.

What a load costs can be told only where it is known whether the disk was asked.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os

import numpy as np

from ds4q.artifact.files import open_regular

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


def cached_bytes(path: str | os.PathLike[str]) -> int:
    """Bytes of the file in the page cache, in whole pages.

    The kernel tells it of files that this user may write; of others it says that all of it is.

    Raises
    ------
    OSError : the file cannot be read, or this system does not tell
    """
    with open(open_regular(path), "rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return 0
        # Mapped, not read: only its address is used, so a file cut short does no harm.
        with mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ) as mapped:
            pages = np.zeros(-(-len(mapped) // mmap.PAGESIZE), np.uint8)
            view = np.frombuffer(mapped, np.uint8)
            status = _libc.mincore(view.ctypes.data, len(mapped), pages.ctypes.data)
            code = ctypes.get_errno()
            del view  # or the map could not be closed
    if status:
        raise OSError(code, os.strerror(code or errno.ENOSYS), os.fspath(path))
    return int((pages & 1).sum()) * mmap.PAGESIZE


def drop(path: str | os.PathLike[str]) -> bool:
    """Drive the file out of the page cache; whether none of it is left there.

    Pages that are not on disk yet are written first. The storage's own cache stays as it is.
    """
    fd = open_regular(path)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    try:
        return cached_bytes(path) == 0
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
        return False
