"""Regular files: bounded reads, atomic writes, publishing without replacing, proof of ownership.

A name that ds4q derives from a user's name (``NAME.journal``, ``NAME.partial``, ``NAME.receipt``)
belongs to the user until ``claim`` has shown that ds4q wrote the file: it is a regular file with
one link, it is not an input of the job, and it begins as only ds4q begins such a file.

Artifacts are written in place, block by block, and can be resumed: see ``writer.py``.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import secrets
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ds4q.artifact import stops
from ds4q.artifact.errors import Ds4qError

HEAD_BYTES = 136 << 10  # of a file, for recognizing it: enough for one zstd block

_AT_FDCWD = -100  # linux/fcntl.h
_RENAME_NOREPLACE = 1  # linux/fs.h
# What a kernel or a file system answers that lacks RENAME_NOREPLACE, or hard links.
_NOT_OFFERED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM, errno.EMLINK)

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class NotRegularError(Ds4qError):
    """A path that must be a regular file is something else."""

    rule = "not a regular file"


class TooLongError(Ds4qError):
    """A file is longer than any file of its kind."""

    rule = "file is too long"


class ForeignFileError(Ds4qError):
    """A name that ds4q derives is taken by a file that ds4q did not write."""

    rule = "ds4q needs this name, but did not write the file that has it"
    cure = "move it away, or choose another output"


class AppearedError(Ds4qError):
    """A file appeared at the final name while the output was being written."""

    rule = "a file appeared here while the output was being written; it was kept"
    cure = "move it away, or choose another output"


Recognize = Callable[[bytes], bool]
"""Whether a file that begins with these bytes (at most ``HEAD_BYTES``) was written by ds4q."""


# --- reading -----------------------------------------------------------------------------------


def file_kind(mode: int) -> str:
    """``a folder``, ``a named pipe``, ...: what ``st_mode`` says of something not regular."""
    return _KINDS.get(stat.S_IFMT(mode), "not a regular file")


def open_regular(path: str | os.PathLike[str], *, follow: bool = True) -> int:
    """A descriptor of a regular file, open for reading. Never waits, as opening a FIFO could.

    ``follow`` allows a symbolic link as the last part of the path.

    Raises
    ------
    NotRegularError : anything but a regular file
    OSError : it cannot be opened
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    try:
        fd = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ELOOP and not follow:
            raise NotRegularError(path=path, found="a symbolic link") from None
        if error.errno == errno.ENXIO:  # a socket, or a device that is not there
            raise NotRegularError(path=path) from None
        raise
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        raise NotRegularError(path=path, found=file_kind(mode))
    return fd


def read_small(path: str | os.PathLike[str], most_bytes: int, *, follow: bool = True) -> bytes:
    """The bytes of a regular file of at most ``most_bytes``; nothing longer is read into memory.

    Raises
    ------
    NotRegularError, TooLongError : without reading
    OSError : it cannot be opened or read
    """
    with open(open_regular(path, follow=follow), "rb") as file:
        found = os.fstat(file.fileno()).st_size
        raw = b"" if found > most_bytes else file.read(most_bytes + 1)
        if max(found, len(raw)) > most_bytes:
            raise TooLongError(
                path=path,
                expected=f"at most {most_bytes:,} bytes",
                found=f"{max(found, len(raw)):,} bytes",
            )
    return raw


def read_head(path: str | os.PathLike[str], nbytes: int = HEAD_BYTES) -> bytes:
    """The first bytes of a regular file, at most ``nbytes``. Raises as ``open_regular``."""
    fd = open_regular(path)
    try:
        return os.pread(fd, nbytes, 0)
    finally:
        os.close(fd)


# --- ownership ---------------------------------------------------------------------------------


def beginning(pattern: bytes) -> Recognize:
    """Recognizes files whose first bytes match a regular expression."""
    match = re.compile(pattern).match
    return lambda head: match(head) is not None


def empty_or(is_ours: Recognize) -> Callable[[Path], bool]:
    """Whether a path is a regular file that is empty or that ds4q wrote: for ``publish``."""

    def may_go(path: Path) -> bool:
        try:
            head = read_head(path)
        except NotRegularError:
            return False
        return not head or is_ours(head)

    return may_go


def claim(
    path: Path, recognize: Recognize, *, inputs: Iterable[os.stat_result] = ()
) -> os.stat_result | None:
    """The status of a file that is proven to be ds4q's own; None where there is no file.

    Reads at most ``HEAD_BYTES`` and never waits.

    Parameters
    ----------
    recognize : is given the beginning of the file
    inputs : files that the job reads, which are never its own

    Raises
    ------
    ForeignFileError : something else has the name
    """
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):  # a device must not even be opened
            raise ForeignFileError(path=path, found=file_kind(status.st_mode))
        fd = open_regular(path, follow=False)
    except FileNotFoundError:
        return None
    except NotRegularError as error:
        raise ForeignFileError(path=path, found=error.found) from None
    except PermissionError:
        raise ForeignFileError(path=path, found="a file that cannot be read") from None
    try:
        status = os.fstat(fd)
        if status.st_nlink > 1:
            found = f"a file with {status.st_nlink} hard links"
        elif any(os.path.samestat(status, other) for other in inputs):
            found = "an input of this job"
        elif not recognize(os.pread(fd, HEAD_BYTES, 0)):
            found = "another file" if status.st_size else "an empty file"
        else:
            return status
    finally:
        with suppress(OSError):  # nothing was written
            os.close(fd)
    raise ForeignFileError(path=path, found=found)


def remove_own(path: Path, recognize: Recognize) -> None:
    """Remove a file of ds4q's; one that is not proven to be stays."""
    with suppress(ForeignFileError):
        if claim(path, recognize) is not None:
            path.unlink(missing_ok=True)


# --- writing -----------------------------------------------------------------------------------


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Have an ``OSError`` of a descriptor say which file it is about."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def write_whole(
    path: Path,
    data: str | bytes,
    *,
    mode: int | None = None,
    replace: bool | Callable[[Path], bool],
) -> None:
    """Put ``data`` (text as UTF-8) at ``path`` atomically and durably.

    Parameters
    ----------
    mode : permissions of the file; None keeps those of a file that is replaced, else 0o644
    replace : see ``publish``; it has no default, since True may lose a file of the user's

    Raises
    ------
    AppearedError : a file is at ``path`` and may not be replaced
    OSError : no temporary file is left behind
    """
    kept = None
    if mode is None:
        mode = 0o644
        with suppress(FileNotFoundError):
            status = path.lstat()
            kept = stat.S_IMODE(status.st_mode) if stat.S_ISREG(status.st_mode) else None
    temporary = path.with_name(f".ds4q-{secrets.token_hex(8)}.part")  # fits beside any name
    with stops.held():
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
            with open(fd, "wb") as file:
                if kept is not None:
                    _keep_mode(file.fileno(), kept)
                file.write(data.encode("utf-8") if isinstance(data, str) else data)
                file.flush()
                os.fsync(file.fileno())
            publish(temporary, path, replace=replace)
        except BaseException as error:
            with suppress(OSError):  # it must not hide what went wrong
                temporary.unlink(missing_ok=True)
            if isinstance(error, OSError):  # users know no temporary file
                error.filename, error.filename2 = str(path), None
            raise


def _keep_mode(fd: int, mode: int) -> None:
    """Set permissions, where the file system has any: FAT and some shared folders have not."""
    try:
        os.fchmod(fd, mode)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL):
            raise


def create(path: Path, data: bytes, *, mode: int = 0o666) -> int:
    """Create a file that holds ``data`` from its first moment; its descriptor, for read and write.

    The file is written without a name and then linked, so a process that is killed leaves the whole
    file or none. A file system without O_TMPFILE gets it under its name: a kill between two system
    calls may then leave it empty.

    Raises ``FileExistsError`` where the name is taken by anything.
    """
    fd = _open_nameless(path.parent, mode)
    if fd is not None:
        try:
            _write(fd, data)
            # A directory descriptor makes Python call linkat, which can follow the link in /proc.
            os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd, follow_symlinks=True)
            return fd
        except BaseException as error:
            os.close(fd)
            offered = not isinstance(error, OSError) or error.errno not in (
                *_NOT_OFFERED,
                errno.ENOENT,
                errno.EXDEV,
            )
            if offered:
                _name(error, path)
                raise
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        _write(fd, data)
    except BaseException as error:
        os.close(fd)
        path.unlink(missing_ok=True)
        _name(error, path)
        raise
    return fd


def _name(error: BaseException, path: Path) -> None:
    """Have an error of the system name the file that it is about."""
    if isinstance(error, OSError) and error.filename is None:
        error.filename = str(path)


def _write(fd: int, data: bytes) -> None:
    """Write all of ``data``, durably."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.fsync(fd)


def _open_nameless(folder: Path, mode: int) -> int | None:
    """A file without a name; None where the file system does not offer that."""
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno in (*_NOT_OFFERED, errno.EISDIR):
            return None
        raise


def publish(
    temporary: Path, final: Path, *, replace: bool | Callable[[Path], bool] = False
) -> None:
    """Give a finished temporary file (or folder) its final name in the same folder, atomically.

    Parameters
    ----------
    replace : whether a file at ``final`` may be replaced. False keeps any file, even one that
        appears during this call. A function is asked about the file that is there at that moment.

    The kernel refuses to replace by RENAME_NOREPLACE, or else by ``link``. On a file system with
    neither, ``final`` is looked up right before the rename. An exclusively created placeholder
    would close that last gap only against programs that create exclusively themselves, and a crash
    would leave it: an empty file at the final name.

    Raises
    ------
    AppearedError : ``final`` exists and may not be replaced; both files are as they were
    OSError : renaming failed
    """
    if replace is not True:
        try:
            _rename_noreplace(temporary, final)
            return
        except FileExistsError:
            if _same_file(temporary, final):  # an earlier link, whose unlink was cut off
                os.unlink(temporary)
                return
            if replace is False or not replace(final):
                raise AppearedError(path=final) from None
    os.replace(temporary, final)


def _rename_noreplace(old: Path, new: Path) -> None:
    """Rename; ``FileExistsError`` where ``new`` exists."""
    if _renameat2(old, new):
        return
    if not old.is_dir():
        try:
            os.link(old, new, follow_symlinks=False)
        except OSError as error:
            if error.errno not in _NOT_OFFERED:
                raise
        else:
            os.unlink(old)
            return
    if os.path.lexists(new):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(new))
    os.rename(old, new)


def _renameat2(old: Path, new: Path) -> bool:
    """``renameat2(RENAME_NOREPLACE)``; False where libc, kernel or file system lack it."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    if call(_AT_FDCWD, os.fsencode(old), _AT_FDCWD, os.fsencode(new), _RENAME_NOREPLACE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _NOT_OFFERED:
        return False
    raise OSError(number, os.strerror(number), str(old), None, str(new))


def _same_file(one: Path, other: Path) -> bool:
    try:
        return os.path.samestat(one.lstat(), other.lstat())
    except FileNotFoundError:
        return False


def file_identity(path: Path) -> tuple[int, int, int, int] | None:
    """What changes when another file takes the name, or the file is written to; None: no file."""
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def unless_changed(path: Path) -> Callable[[Path], bool]:
    """For ``publish``: whether a path has the file, unwritten since, that it has now, or none."""
    before = file_identity(path)
    return lambda path: file_identity(path) == before


def fsync_folder(folder: Path) -> None:
    """Make renames and removals in ``folder`` durable, where the file system can (CIFS cannot)."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with named(folder):
            os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(fd)


# --- what not every file system has --------------------------------------------------------------


def advise(fd: int, offset: int, nbytes: int, advice: int = os.POSIX_FADV_WILLNEED) -> None:
    """Tell the system what will be read; one that takes no advice reads all the same."""
    with suppress(OSError):
        os.posix_fadvise(fd, offset, nbytes, advice)


def free_bytes(folder: Path) -> int:
    """Bytes that can still be written in ``folder``; ``sys.maxsize`` where that is unknown."""
    try:
        status = os.statvfs(folder)
    except OSError as error:
        if error.errno in _NOT_OFFERED:
            return sys.maxsize
        raise
    return status.f_bavail * status.f_frsize if status.f_blocks else sys.maxsize
