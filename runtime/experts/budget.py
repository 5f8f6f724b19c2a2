"""How much memory a model and its expert cache may take. Allocates nothing.

What is free is the least of what the host has available and what each memory control group above
this process has left. A bound that cannot be read is never guessed: an automatic cache asks the
user for a size, and a resident load goes on with a warning.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple

from ds4q.runtime.errors import CacheError

RESERVE_BYTES = 8 << 30  # that an automatic budget leaves free, as in hipfire
RESERVE_PART = 8  # of what is free, where that is less

_NO_LIMIT_BYTES = 1 << 62  # version 1 writes a number near 2**63 where there is no limit
_SIZE_REMEDY = "pass the size of the expert cache, as in --expert-cache 8GiB"
_DIGITS = re.compile(r"\d{1,20}", re.ASCII)


class Group(NamedTuple):
    """The texts of a control group's memory files; None where there is no such file.

    ``limit`` and ``used`` are memory.max and memory.current, in version 1 memory.limit_in_bytes and
    memory.usage_in_bytes; ``stat`` is memory.stat.
    """

    limit: str | None
    used: str | None
    stat: str | None


class _Version(NamedTuple):
    mount_type: str
    files: tuple[str, str, str]  # of a ``Group``


_V1 = _Version("cgroup", ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat"))
_V2 = _Version("cgroup2", ("memory.max", "memory.current", "memory.stat"))


def grant(
    asked: int | Literal["auto"],
    *,
    least: int,
    needed: int,
    available: Callable[[], int],
    advice: bool = False,
    path: object = None,
) -> int:
    """Bytes that the slots may take.

    Parameters
    ----------
    asked : a size, or "auto", all that is left
    least : the fewest bytes that the model can run with; a size of fewer is refused by the caller
    needed : bytes that the rest of the model, sequences and buffers will take
    available : bytes that are free; raises ``CacheError`` where they cannot be told
    advice : more than ``available`` may be free, as on integrated GPUs: a size is then taken as it
        is, and an allocation that fails is the error
    path : the artifact; named in errors

    Raises
    ------
    CacheError : memory is too small, or "auto" where the free bytes are unknown. The remedy is
        always one that works: it names sizes only where one of them would be granted.
    """
    if asked == "auto":
        free = available()
        reserve = min(RESERVE_BYTES, free // RESERVE_PART)
        left = free - needed - reserve
        if left >= least:
            return left
        raise CacheError(
            "memory leaves too little for an expert cache",
            path=path,
            expected=f"at least {needed + reserve + least:,} bytes free: {needed:,} for the rest "
            f"of the model, {reserve:,} in reserve and {least:,} for experts",
            found=f"{free:,}",
            remedy=_sizes(least, free - needed, advice),
        )
    if asked <= 0:
        raise CacheError(
            "an expert cache of no bytes", path=path, expected="1 or more", found=asked
        )
    try:
        left = available() - needed
    except CacheError:
        return asked
    if advice or asked <= left:
        return asked
    raise CacheError(
        "the expert cache is larger than memory",
        path=path,
        expected=f"at most {max(left, 0):,} bytes, beside {needed:,} for the rest of the model",
        found=f"{asked:,}",
        remedy=_sizes(least, left, advice),
    )


def _sizes(least: int, left: int, advice: bool) -> str:
    """What to do where a cache of ``left`` bytes is all that there is room for."""
    if advice:
        return (
            "free memory, or give a size: an integrated GPU may have more memory than it reports, "
            f"and --expert-cache {least} or more is tried"
        )
    if left >= least:
        return f"give a size from {least} to {left} (--expert-cache {left})"
    return "free memory, ask for a shorter context, or use a smaller artifact"


def available_bytes(root: Path = Path("/")) -> int:
    """Memory that this process may still take, of the system under ``root``.

    Raises
    ------
    CacheError : it cannot be told
    """
    cgroup, mountinfo = (_text(root / "proc/self" / name) for name in ("cgroup", "mountinfo"))
    try:
        folders = list(_folders(root, cgroup or "", mountinfo or ""))
    except ValueError:
        raise _cannot_tell("/proc/self/cgroup and mountinfo", cgroup) from None
    groups = [
        Group(*(_text(folder / name) for name in version.files)) for folder, version in folders
    ]
    return available(_text(root / "proc/meminfo"), groups)


def available(meminfo: str | None, groups: Iterable[Group]) -> int:
    """Bytes that are free, from the texts of /proc/meminfo and of all control groups above us.

    Raises
    ------
    CacheError : a text is not what it should be, or the host's is missing
    """
    host = re.search(r"^MemAvailable:\s*(\d{1,18}) kB$", meminfo or "", re.ASCII | re.MULTILINE)
    if host is None:
        raise _cannot_tell("MemAvailable of /proc/meminfo", meminfo)
    bounds = [int(host[1]) * 1024]
    for group in groups:
        left = _left(group)
        if left is not None:
            bounds.append(left)
    return min(bounds)


def _left(group: Group) -> int | None:
    """What a control group has left, its idle page cache included; None where it has no limit."""
    if group.limit is None or group.limit.strip() == "max":
        return None
    limit = _number("the memory limit of a control group", group.limit)
    if limit >= _NO_LIMIT_BYTES:
        return None
    used = _number("the memory use of a control group", group.used)
    # Version 1 counts its children's use, but their page cache under another name.
    idle = re.search(r"^total_inactive_file (\d{1,20})$", group.stat or "", re.ASCII | re.MULTILINE)
    idle = idle or re.search(
        r"^inactive_file (\d{1,20})$", group.stat or "", re.ASCII | re.MULTILINE
    )
    if idle is None:
        raise _cannot_tell("inactive_file of a control group", group.stat)
    return max(0, limit - max(0, used - int(idle[1])))


def _number(what: str, text: str | None) -> int:
    found = _DIGITS.fullmatch((text or "").strip())
    if found is None:
        raise _cannot_tell(what, text)
    return int(found[0])


def _cannot_tell(what: str, text: str | None) -> CacheError:
    return CacheError(
        f"cannot tell how much memory is free: {what} cannot be read",
        found="nothing" if text is None else repr(text[:40]),
        remedy=_SIZE_REMEDY,
    )


def _folders(root: Path, cgroup: str, mountinfo: str) -> Iterator[tuple[Path, _Version]]:
    """Folders of our memory control groups and of all groups above that are to be seen.

    Raises ``ValueError`` where a text is not what it should be, or the groups are not to be seen.
    """
    ours: dict[_Version, str] = {}
    for line in cgroup.splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            ours[_V1] = path
        elif hierarchy == "0":
            ours[_V2] = path
    seen = set()
    for line in mountinfo.splitlines():
        mount, rest = line.split(" - ", 1)
        _, _, _, mounted, at, *_ = mount.split()
        kind, *_, options = rest.split()
        for version, path in ours.items():
            one = version is _V2 or "memory" in options.split(",")
            if kind != version.mount_type or not one:
                continue
            seen.add(version)
            # In a container the path may be the host's, and the mount show part of its tree.
            inside = PurePosixPath("/")
            with suppress(ValueError):
                inside /= PurePosixPath(path).relative_to(mounted)
            if ".." in inside.parts:
                inside = PurePosixPath("/")
            for part in (inside, *inside.parents):
                yield Path(os.path.normpath(f"{root}/{at}/{part}")), version
    # Version 2 is listed also where version 1 does the limiting, mounted or not.
    if ours and (_V1 if _V1 in ours else _V2) not in seen:
        raise ValueError("no mount shows our groups")


def _text(path: Path) -> str | None:
    """The file's text; None where there is none, and no number where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return str(error.strerror)
