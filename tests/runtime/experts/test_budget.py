"""The automatic budget: from texts to bytes, or a request for a size; never a guess."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from ds4q.runtime.errors import CacheError
from ds4q.runtime.experts.budget import RESERVE_BYTES, Group, available, available_bytes, grant
from tests.checks import check_refused

MEMINFO = "MemTotal:       990000000 kB\nMemFree:        1 kB\nMemAvailable:   880426716 kB\n"
HOST = 901_556_957_184
TIGHT = Group("96636764160\n", "45000000000\n", "anon 5000000000\ninactive_file 40000000000\n")
TIGHT_LEFT = 91_636_764_160
NO_LIMIT_V1 = Group("9223372036854771712\n", "45000000000\n", "inactive_file 1\n")


def cannot_tell(call: Callable[[], object], *says: str) -> None:
    check_refused(CacheError, call, says=["cannot tell", "--expert-cache 8GiB", *says])


def test_idle_page_cache_of_a_container_is_free() -> None:
    assert available(MEMINFO, [TIGHT]) == TIGHT_LEFT


def test_the_word_max_is_no_limit() -> None:
    assert available(MEMINFO, [TIGHT._replace(limit="max\n")]) == HOST
    assert available(MEMINFO, []) == HOST


def test_nothing_to_read_is_no_guess() -> None:
    cannot_tell(lambda: available(None, []), "MemAvailable")
    cannot_tell(lambda: available(None, [TIGHT]), "MemAvailable")
    cannot_tell(lambda: available(MEMINFO, [TIGHT._replace(used=None)]), "memory use")
    cannot_tell(lambda: available(MEMINFO, [TIGHT._replace(stat=None)]), "inactive_file")


def test_the_sentinel_of_version_1_is_no_limit() -> None:
    assert available(MEMINFO, [NO_LIMIT_V1]) == HOST
    assert available(MEMINFO, [NO_LIMIT_V1._replace(used=None, stat=None)]) == HOST
    huge_pages = NO_LIMIT_V1._replace(limit=str(2**63 - 65536))
    assert available(MEMINFO, [huge_pages]) == HOST


@pytest.mark.parametrize("text", ["", "garbage", "-5", "1e9", "12 34", "0x10", "9" * 40, "٣"])
def test_garbage_is_no_number(text: str) -> None:
    cannot_tell(lambda: available(MEMINFO, [TIGHT._replace(limit=text)]), "memory limit")
    cannot_tell(lambda: available(MEMINFO, [TIGHT._replace(used=text)]), "memory use")
    cannot_tell(lambda: available(MEMINFO, [TIGHT._replace(stat=f"inactive_file {text}")]))
    cannot_tell(lambda: available(f"MemAvailable: {text} kB\n", []))
    cannot_tell(lambda: available(text, [TIGHT]))


def test_the_tightest_group_counts() -> None:
    own = TIGHT._replace(limit="max")
    parent = Group("50000000000", "20000000000", "inactive_file 5000000000")
    assert available(MEMINFO, [own, parent]) == 35_000_000_000
    assert available(MEMINFO, [TIGHT, parent]) == 35_000_000_000
    assert available(MEMINFO, [parent, TIGHT]) == 35_000_000_000
    assert available("MemAvailable: 1000 kB\n", [TIGHT, parent]) == 1_024_000


def test_a_group_over_its_limit_has_nothing_left() -> None:
    assert available(MEMINFO, [Group("1000", "5000", "inactive_file 2000")]) == 0
    # Idle page cache beyond the use cannot be: it makes no memory.
    assert available(MEMINFO, [Group("1000", "500", "inactive_file 2000")]) == 1000


def test_children_count_in_version_1() -> None:
    stat = "inactive_file 0\ntotal_inactive_file 300\n"
    assert available(MEMINFO, [Group("1000", "500", stat)]) == 800


# ----------------------------------------------------------------------------- the system's files


class System:
    """A root folder with the files that are read."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("proc/meminfo", MEMINFO)

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def group(self, folder: str, group: Group, names: tuple[str, str]) -> None:
        for name, text in zip((*names, "memory.stat"), group, strict=True):
            if text is not None:
                self.write(f"sys/fs/cgroup/{folder}/{name}", text)

    def v2(self, folder: str, group: Group) -> None:
        self.group(folder, group, ("memory.max", "memory.current"))

    def v1(self, folder: str, group: Group) -> None:
        self.group(folder, group, ("memory.limit_in_bytes", "memory.usage_in_bytes"))

    def mount(self, root: str, at: str, kind: str, options: str) -> str:
        return f"31 23 0:28 {root} {at} rw,relatime shared:9 - {kind} {kind} {options}\n"


@pytest.fixture
def system(tmp_path: Path) -> System:
    return System(tmp_path)


def test_no_control_groups_at_all(system: System) -> None:
    assert available_bytes(system.root) == HOST


def test_all_parents_up_to_the_mount_count(system: System) -> None:
    system.write("proc/self/cgroup", "0::/a/b/c\n")
    system.write("proc/self/mountinfo", system.mount("/", "/sys/fs/cgroup", "cgroup2", "rw"))
    assert available_bytes(system.root) == HOST  # no controller, no limit
    system.v2("a/b/c", TIGHT._replace(limit="max"))
    system.v2("a/b", Group("70000000000", "0", "inactive_file 0"))
    assert available_bytes(system.root) == 70_000_000_000
    system.v2("a", Group("60000000000", "0", "inactive_file 0"))
    assert available_bytes(system.root) == 60_000_000_000
    system.v2("", Group("50000000000", "0", "inactive_file 0"))
    assert available_bytes(system.root) == 50_000_000_000
    system.v2("a/b/c/below", Group("1", "0", "inactive_file 0"))
    system.v2("beside", Group("1", "0", "inactive_file 0"))
    assert available_bytes(system.root) == 50_000_000_000


def test_version_1_beside_an_idle_version_2(system: System) -> None:
    system.write("proc/self/cgroup", "9:cpu,cpuacct:/x\n4:memory:/x\n0::/\n")
    system.write(
        "proc/self/mountinfo",
        system.mount("/", "/sys/fs/cgroup/cpu", "cgroup", "rw,cpu,cpuacct")
        + system.mount("/", "/sys/fs/cgroup/memory", "cgroup", "rw,memory"),
    )
    system.v1("cpu/x", Group("1", "0", "inactive_file 0"))
    system.v1("memory", NO_LIMIT_V1)
    system.v1("memory/x", TIGHT)
    assert available_bytes(system.root) == TIGHT_LEFT


@pytest.mark.parametrize("path", ["/docker/abc", "/docker/abc/inner", "/../../elsewhere", "/"])
def test_a_container_sees_part_of_the_tree(system: System, path: str) -> None:
    """The mount shows the host's folder of the container, or the paths count from it."""
    system.write("proc/self/cgroup", f"0::{path}\n")
    mount = system.mount("/docker/abc", "/sys/fs/cgroup", "cgroup2", "rw,nsdelegate")
    system.write("proc/self/mountinfo", mount)
    system.v2("", TIGHT)
    assert available_bytes(system.root) == TIGHT_LEFT
    system.v2("inner", Group("1000", "0", "inactive_file 0"))
    expected = 1000 if path.endswith("inner") else TIGHT_LEFT
    assert available_bytes(system.root) == expected


def test_a_group_outside_the_mount_is_not_looked_for_there(system: System) -> None:
    """A process that was moved out of its namespace has a path upwards."""
    system.write("proc/self/cgroup", "0::/../../elsewhere\n")
    system.write("proc/self/mountinfo", system.mount("/", "/sys/fs/cgroup", "cgroup2", "rw"))
    system.v2("", TIGHT)
    system.v2("../../elsewhere", Group("1000", "0", "inactive_file 0"))
    assert available_bytes(system.root) == TIGHT_LEFT


def test_groups_that_cannot_be_seen_are_no_guess(system: System) -> None:
    system.write("proc/self/cgroup", "0::/a\n")
    cannot_tell(lambda: available_bytes(system.root))
    system.write("proc/self/mountinfo", system.mount("/", "/", "ext4", "rw"))
    cannot_tell(lambda: available_bytes(system.root))
    system.write("proc/self/mountinfo", "garbage\n")
    cannot_tell(lambda: available_bytes(system.root))
    system.write("proc/self/mountinfo", system.mount("/", "/sys/fs/cgroup", "cgroup2", "rw"))
    assert available_bytes(system.root) == HOST
    system.write("proc/self/cgroup", "garbage\n")
    cannot_tell(lambda: available_bytes(system.root))


def test_a_file_that_may_not_be_read_is_no_guess(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    system.write("proc/self/cgroup", "0::/\n")
    system.write("proc/self/mountinfo", system.mount("/", "/sys/fs/cgroup", "cgroup2", "rw"))
    system.v2("", TIGHT)
    real = Path.read_text

    def denied(self: Path, *args: str, **kwargs: str) -> str:
        if self.name == "memory.max":
            raise PermissionError(13, "Permission denied")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", denied)
    cannot_tell(lambda: available_bytes(system.root), "Permission denied")


@pytest.mark.skipif(sys.platform != "linux", reason="the real files are Linux's")
def test_this_system_can_be_told() -> None:
    total = next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemTotal:")
    )
    assert 0 < available_bytes() <= total


# ----------------------------------------------------------------------------- what is granted

GIB = 1 << 30


def nobody_can_tell() -> int:
    raise CacheError("cannot tell")


def test_auto_takes_what_is_left() -> None:
    assert grant("auto", least=1, needed=5 * GIB, available=lambda: 80 * GIB) == 67 * GIB
    assert grant("auto", least=1, needed=5, available=lambda: 16) == 9  # an eighth in reserve
    assert RESERVE_BYTES == 8 * GIB


def test_auto_is_never_nothing_and_never_a_guess() -> None:
    check_refused(
        CacheError,
        lambda: grant("auto", least=3, needed=13, available=lambda: 16),
        says=["13 for the rest", "2 in reserve", "3 for experts", "found 16", "--expert-cache 3"],
    )
    with pytest.raises(CacheError, match="cannot tell"):
        grant("auto", least=1, needed=0, available=nobody_can_tell)


def test_a_size_is_used_as_given() -> None:
    # nothing in reserve: the user's choice
    assert grant(7, least=1, needed=3, available=lambda: 10) == 7
    assert grant(10**18, least=1, needed=3, available=nobody_can_tell) == 10**18


def test_a_size_beyond_memory_names_both() -> None:
    check_refused(
        CacheError,
        lambda: grant(8_000, least=9, needed=3_000, available=lambda: 10_000, path="model.hfq"),
        path="model.hfq",
        says=["larger than memory", "7,000", "8,000", "from 9 to 7000 (--expert-cache 7000)"],
    )
    check_refused(
        CacheError,
        lambda: grant(1, least=1, needed=3_000, available=lambda: 2_000),
        says=["at most 0 bytes", "3,000", "shorter context"],
    )


@pytest.mark.parametrize("free", range(0, 40, 3))
@pytest.mark.parametrize("asked", ["auto", 7, 30])
@pytest.mark.parametrize("advice", [False, True])
def test_a_remedy_that_names_a_size_works(
    free: int, asked: int | Literal["auto"], advice: bool
) -> None:
    """auto and a size do not send the user to each other."""
    room: dict[str, Any] = {"least": 7, "needed": 5, "available": lambda: free, "advice": advice}
    try:
        grant(asked, **room)
    except CacheError as error:
        remedy = str(error.remedy)
        assert "auto" not in remedy
        if "--expert-cache" in remedy:
            size = int(remedy.split("--expert-cache ")[1].split(")")[0].split(" ")[0])
            assert grant(size, **room) == size
        else:
            assert free < 5 + 7
            assert "shorter context" in remedy


def test_what_an_integrated_gpu_reports_is_advice() -> None:
    told: dict[str, Any] = {"least": 7, "needed": 5, "available": lambda: 6, "advice": True}
    assert grant(30, **told) == 30
    check_refused(
        CacheError, lambda: grant("auto", **told), says=["--expert-cache 7 or more is tried"]
    )


@pytest.mark.parametrize("asked", [0, -1])
def test_a_cache_of_nothing_is_refused(asked: int) -> None:
    for room in (lambda: 10_000, nobody_can_tell):
        check_refused(
            CacheError,
            lambda room=room: grant(asked, least=1, needed=0, available=room),  # type: ignore[misc]
            says=["1 or more", str(asked)],
        )
