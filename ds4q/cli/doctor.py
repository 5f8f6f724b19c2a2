"""Owns ``ds4q doctor``: what this machine is and whether ds4q can work on it. Changes nothing.

Facts come from ``/proc`` and ``/sys`` where the system has them; what cannot be read is null.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from ds4q import __version__
from ds4q.artifact.errors import Ds4qError, one_line
from ds4q.artifact.places import HOME_VARIABLE, home_folder
from ds4q.cli import common
from ds4q.cli.common import (
    amount_text,
    available_cores,
    emit_json,
    json_option,
    progress,
    talk_options,
)
from ds4q.hipkern import library
from ds4q.hipkern.probe import HipReport, probe

PACKAGES = (
    "click", "jsonschema", "rich", "numpy", "numba", "xxhash", "zstandard", "tokenizers",
    "huggingface_hub",
)  # fmt: skip
"""What ds4q imports from others: the ``dependencies`` of pyproject.toml."""

HIP_PACKAGES = ("hip-python", "ziglang")
"""What a device needs, and what compiles kernels without ROCm: neither is required."""

CPU_FEATURES = ("ssse3", "avx2", "avx512f", "sha_ni")
"""What makes the matrix kernels (ssse3, avx512f) and the digests faster; none is required."""

CGROUP_NO_LIMIT_BYTES = 1 << 60  # cgroup v1 says "no limit" with a number just under 2^63

Read = Callable[[str], str | None]


def read_text(path: str) -> str | None:
    """Text of a file, or None where there is none or it may not be read."""
    try:
        return Path(path).read_text("utf-8", "replace")
    except OSError:
        return None


def cpu_facts(cpuinfo: str | None) -> dict[str, Any]:
    """Model name and ``CPU_FEATURES`` of the text of ``/proc/cpuinfo``."""
    fields: dict[str, str] = {}
    for line in (cpuinfo or "").splitlines():
        key, colon, value = line.partition(":")
        if colon:
            fields.setdefault(key.strip(), value.strip())  # the first core speaks for all
    flags = fields.get("flags", "").split()
    return {
        "model": fields.get("model name") or platform.machine(),
        "cores": os.cpu_count(),
        "cores_available": available_cores(),
        "features": {name: name in flags for name in CPU_FEATURES},
    }


def memory_facts(read: Read) -> dict[str, int | None]:
    """Bytes of memory in all, available now, and the limit of this process's group, if any."""
    sizes = dict(re.findall(r"^(\w+):\s+(\d+) kB$", read("/proc/meminfo") or "", re.MULTILINE))
    total = int(sizes["MemTotal"]) * 1024 if "MemTotal" in sizes else None
    available = int(sizes["MemAvailable"]) * 1024 if "MemAvailable" in sizes else None
    limit = cgroup_limit(read)
    if limit is not None and total is not None and limit >= total:
        limit = None  # bounds nothing
    return {"total_bytes": total, "available_bytes": available, "limit_bytes": limit}


def cgroup_limit(read: Read) -> int | None:
    """The tightest memory limit, in bytes, over this process's control group and its parents."""
    limits = []
    for line in (read("/proc/self/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if number == "0" and not controllers:
            root, file = "/sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            root, file = "/sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        steps = [step for step in group.split("/") if step]
        for depth in range(len(steps), -1, -1):
            value = (read("/".join([root, *steps[:depth], file])) or "").strip()
            if value.isdecimal() and int(value) < CGROUP_NO_LIMIT_BYTES:
                limits.append(int(value))
    return min(limits, default=None)


def disk_facts(folder: Path) -> dict[str, Any]:
    """Free space where ``folder`` is, or would be made."""
    place = folder.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    usage = shutil.disk_usage(place)
    return {"path": str(folder.absolute()), "free_bytes": usage.free, "total_bytes": usage.total}


def compiler_facts(environ_cc: str | None) -> dict[str, str | None] | None:
    """The C compiler of ``$CC`` or the first usual name found, with its own first line."""
    for name in (environ_cc, "cc", "gcc", "clang"):
        path = shutil.which(name) if name else None
        if path is None:
            continue
        try:
            answer = subprocess.run(
                [path, "--version"], stdin=subprocess.DEVNULL, capture_output=True, timeout=20
            )
        except (OSError, subprocess.TimeoutExpired):
            return {"path": path, "version": None}
        lines = answer.stdout.decode("utf-8", "replace").splitlines()
        return {"path": path, "version": lines[0].strip() if lines else None}
    return None


def package_facts() -> tuple[dict[str, str | None], list[str]]:
    """Versions of the ``PACKAGES`` that import, and a problem for each that does not."""
    versions: dict[str, str | None] = {}
    problems = []
    for name in PACKAGES:
        try:
            importlib.import_module(name)
            versions[name] = importlib.metadata.version(name)
        except Exception as error:  # a broken binary package raises whatever it likes
            versions[name] = None
            problems.append(f"{name} does not import: {one_line(str(error))}; install ds4q again")
    return versions, problems


def kernel_problem() -> str | None:
    """Compile one kernel and use it: packs FP4 blocks and takes them apart again."""
    try:
        import numpy as np

        from ds4q.artifact.formats import hfp4g32

        codes = np.arange(256, dtype=np.uint8).reshape(4, 64)  # 4 rows of 128 codes
        scales = np.arange(120, 136, dtype=np.uint8).reshape(4, 4)
        again = hfp4g32.unpack(hfp4g32.repack(codes, scales))
        if not (np.array_equal(again[0], codes) and np.array_equal(again[1], scales)):
            return "a compiled kernel gives wrong bytes; DS4Q_REFERENCE=1 avoids them"
    except Exception as error:  # numba and LLVM raise what they like, too
        return (
            f"kernels cannot be compiled: {one_line(str(error))}; "
            "if the folder is read-only, set NUMBA_CACHE_DIR to one that is not"
        )
    return None


def hip_facts() -> dict[str, Any]:
    """The library that ``--device hip`` would use, its devices, and the Python packages for it."""
    environ = dict(os.environ)
    try:
        chosen = library.choice()
        if root := library.built_root(chosen):
            environ["ROCM_PATH"] = root
        found = probe(environ)
    except Ds4qError as error:
        chosen, found = os.environ.get(library.VARIABLE, ""), HipReport(problem=str(error))
    return {
        **asdict(found),
        "choice": chosen or None,
        "packages": {name: package_version(name) for name in HIP_PACKAGES},
    }


def package_version(name: str) -> str | None:
    """Version of an installed distribution, which is not imported; None where it is absent."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def can_use_hip(hip: dict[str, Any]) -> bool:
    """Whether ``--device hip`` has all that it needs."""
    return bool(hip["devices"] and hip["hiprtc"] and hip["packages"]["hip-python"])


def selftest_facts(quiet: bool) -> tuple[dict[str, Any], list[str]]:
    """Every kernel on the device, held to the committed digests; a problem for each that differs.

    The first time on a machine its compiler builds all of them, which takes a minute or two.
    """
    from ds4q.artifact.errors import Ds4qError
    from ds4q.hipkern import selftest
    from ds4q.hipkern.driver import Device

    chosen = selftest.cases()
    results: list[selftest.Result] = []
    facts: dict[str, Any] = {"kernels": len(chosen), "complete": False, "notes": []}
    problems = []
    begin = time.perf_counter()
    try:
        with (
            Device.open() as device,
            progress("self-test", len(chosen), unit="kernels", quiet=quiet) as advance,
        ):
            facts |= {"device": device.name, "arch": device.arch, "kind": device.kind}
            facts["notes"] = list(device.notes)
            results = selftest.run(device, only=chosen, advance=advance)
    except Ds4qError as error:
        problems.append(f"the self-test of kernels stopped: {error}")
    wrong = [result for result in results if not result.ok]
    facts |= {"complete": bool(results), "equal": len(results) - len(wrong)}
    facts["differ"] = [result._asdict() for result in wrong]
    facts["seconds"] = round(time.perf_counter() - begin, 3)
    problems += [
        f"{f'{kernel} {decoder}'.strip()} gives other bits on this device: "
        f"expected {expected}, found {digest}; do not use --device hip, and please report this"
        for kernel, decoder, digest, expected in wrong
    ]
    return facts, problems


def report(device: str = "cpu", quiet: bool = True) -> dict[str, Any]:
    """All facts as the document of ``--json``; ``ok`` says whether what was asked for can work.

    ``device`` "hip" runs the self-test of kernels there, too.
    """
    packages, problems = package_facts()
    if not problems and (problem := kernel_problem()):
        problems.append(problem)
    hip = hip_facts()
    kernels = None
    if device == "hip":
        kernels, wrong = selftest_facts(quiet)
        problems += wrong
    disks = [disk_facts(Path.cwd())]
    if os.environ.get(HOME_VARIABLE):
        disks.append(disk_facts(home_folder()))
    return {
        "ok": not problems,
        "problems": problems,
        "ds4q": __version__,
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "system": {"name": platform.system(), "machine": platform.machine()},
        "packages": packages,
        "cpu": cpu_facts(read_text("/proc/cpuinfo")),
        "memory": memory_facts(read_text),
        "disks": disks,
        "compiler": compiler_facts(os.environ.get("CC")),
        "hip": hip,
        "run": {"device": "cpu", "hip": can_use_hip(hip)},
        "selftest": kernels,
    }


def _hip_lines(hip: dict[str, Any]) -> list[str]:
    if hip["library"] is None:
        rows = [f"no library ({hip['problem']})"]
    elif hip["problem"] is not None:
        rows = [f"{hip['library']}: {hip['problem']}"]
    else:
        rows = [f"{hip['library']}: version {hip['version']}, devices: {hip['devices']}"]
    for index, device in enumerate(hip["found"]):
        size = amount_text(device["total_bytes"])
        rows.append(f"device {index}: {device['name']}, {device['arch']}, {size}{_kind(device)}")
    parts = {"hiprtc": hip["hiprtc"], **hip["packages"]}
    rows.append(", ".join(f"{name} {version or 'absent'}" for name, version in parts.items()))
    return rows


def _kind(device: dict[str, Any]) -> str:
    if device["arch"] == "sim":
        return " (simulated on this CPU: for correctness, not for speed)"
    if device["arch"].startswith("sm_"):
        return " (NVIDIA, behind HIP's names: a test vehicle)"
    return " (nothing of ds4q has run on AMD hardware so far)"


def _run_text(facts: dict[str, Any]) -> str:
    hip = facts["hip"]
    if facts["run"]["hip"]:
        return "the CPU; with --device hip, the device above"
    if not hip["devices"]:
        return "the CPU; --device hip needs a device (DS4Q_HIP=sim simulates one)"
    if not hip["packages"]["hip-python"]:
        return "the CPU; --device hip needs hip-python: pip install 'ds4q[hip]'"
    return "the CPU; --device hip needs ROCm's hiprtc"


def _selftest_lines(facts: dict[str, Any]) -> list[str]:
    found = facts["selftest"]
    if not found["complete"]:
        return ["stopped before its end", *found["notes"]]
    equal = f"{found['equal']} of {found['kernels']} kernels give the bits that are expected"
    return [f"{equal}, in {found['seconds']:.1f} s", *found["notes"]]


def lines(facts: dict[str, Any]) -> list[str]:
    """The report for people."""
    cpu, memory, compiler = facts["cpu"], facts["memory"], facts["compiler"]
    python, system = facts["python"], facts["system"]

    def size(value: int | None) -> str:
        return "unknown" if value is None else amount_text(value)

    rows = [
        ("ds4q", facts["ds4q"]),
        ("Python", f"{python['version']}, {python['executable']}"),
        ("system", f"{system['name']} {system['machine']}"),
        ("packages", ", ".join(f"{n} {v or 'MISSING'}" for n, v in facts["packages"].items())),
        ("processor", f"{cpu['model']}, {cpu['cores_available']} of {cpu['cores']} cores"),
        ("", " ".join(f"{n}:{'yes' if v else 'no'}" for n, v in cpu["features"].items())),
        ("memory", f"{size(memory['available_bytes'])} available of {size(memory['total_bytes'])}"),
    ]
    if memory["limit_bytes"] is not None:
        rows.append(("", f"limited to {size(memory['limit_bytes'])} by the control group"))
    rows += [("disk", f"{size(d['free_bytes'])} free at {d['path']}") for d in facts["disks"]]
    rows.append(("compiler", "none found" if compiler is None else _compiler_text(compiler)))
    rows += [("" if i else "HIP", text) for i, text in enumerate(_hip_lines(facts["hip"]))]
    rows.append(("run uses", _run_text(facts)))
    if facts["selftest"] is not None:
        rows += [("" if i else "self-test", text) for i, text in enumerate(_selftest_lines(facts))]
    rows += [("PROBLEM", problem) for problem in facts["problems"]]
    if facts["ok"]:
        rows.append(("verdict", "quantize, verify and run work here"))
    return [f"{name:<10} {text}" for name, text in rows]


def _compiler_text(compiler: dict[str, str | None]) -> str:
    return f"{compiler['path']} ({compiler['version'] or 'gives no version'})"


@click.command()
@click.option(
    "--device",
    type=click.Choice(["cpu", "hip"]),
    default="cpu",
    show_default=True,
    help="hip: also run every kernel on the device and compare the bits with those expected.",
)
@json_option
@talk_options
@click.pass_context
def command(ctx: click.Context, device: str, as_json: bool, quiet: bool, verbose: bool) -> None:
    """Report what this machine can do.

    Shows Python and packages, processor, memory, free disk space, C compiler, HIP library and
    devices, and compiles one kernel. Exit status 0 means that the CPU path works, and with --device
    hip that every kernel of the device gives the right bits; 1 says what is in the way.

    \b
    Example:
      ds4q doctor
      ds4q doctor --device hip
    """
    facts = report(device, quiet)
    if as_json:
        emit_json(facts)
    else:
        for each in lines(facts):
            common.line(each)
    if not facts["ok"]:
        ctx.exit(1)
