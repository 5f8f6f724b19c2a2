"""Owns building code objects for AMD GPUs without ROCm: clang and LLD of the ``ziglang`` wheel.

``python -m ds4q.hipkern.objects`` builds every kernel for every architecture, holds each to the
gates of ``codeobject`` and prints a table. None of it has run on AMD hardware. No wheel ships code
objects; where ROCm is, hiprtc builds kernels at first use.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ds4q.artifact.errors import escape_unencodable
from ds4q.hipkern.build import BASE_OPTIONS, first_error, label
from ds4q.hipkern.codeobject import Kernel, inspect
from ds4q.hipkern.driver import BUILT_ARCHS
from ds4q.hipkern.errors import CodeObjectError, HipError, HipLibraryError, KernelBuildError
from ds4q.hipkern.kernels import Defines, builds
from ds4q.hipkern.source import FOLDER, Source, load

ZIGLANG = "0.17.1"
"""The only release whose hidden sub-commands ``clang`` and ``ld.lld`` were tried."""


def zig() -> Path:
    """The compiler's program.

    Raises
    ------
    HipLibraryError : ziglang is absent, or of another release
    """
    try:
        found = importlib.metadata.version("ziglang")
        import ziglang
    except ImportError:
        raise HipLibraryError(
            "the compiler of code objects is not installed",
            remedy=f"pip install ziglang=={ZIGLANG}",
        ) from None
    if found != ZIGLANG:
        raise HipLibraryError(
            "another release of ziglang is installed",
            expected=ZIGLANG,
            found=found,
            remedy=f"pip install ziglang=={ZIGLANG}",
        )
    return Path(str(ziglang.__file__)).parent / "zig"


def compile_object(
    source: Source, defines: Defines, arch: str, target: Path, folder: Path = FOLDER
) -> None:
    """Build ``source``, which lies in ``folder``, for ``arch`` into the file ``target``.

    Raises
    ------
    CodeObjectError : an architecture that was never tried
    KernelBuildError : the compiler refused; its log lies beside ``target``
    """
    if arch not in BUILT_ARCHS:
        raise CodeObjectError(
            "kernels were never built for this architecture",
            expected=", ".join(BUILT_ARCHS),
            found=arch,
            remedy="where ROCm is, hiprtc builds kernels for the GPU that is there",
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    macros = [f"-D{name}={value:d}" for name, value in sorted(defines.items())]
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        bitcode, relocatable, linked = (
            Path(temporary) / f"kernel.{end}" for end in ("bc", "o", "so")
        )
        hip = (
            "-x",
            "hip",
            f"--offload-arch={arch}",
            "--cuda-device-only",
            "-nogpuinc",
            "-nogpulib",
        )
        hip_output = ("--no-gpu-bundle-output", "-fgpu-rdc", "-emit-llvm", "-c", "-o", bitcode)
        machine = ("--target=amdgcn-amd-amdhsa", f"-mcpu={arch}", "-nogpulib", "-O3", "-x", "ir")
        steps = (
            ("clang", *hip, *BASE_OPTIONS, *macros, *hip_output, folder / source.file),
            ("clang", *machine, "-c", "-o", relocatable, bitcode),
            ("ld.lld", "-shared", "-o", linked, relocatable),
        )
        for step in steps:
            command = [str(part) for part in (zig(), *step)]
            done = subprocess.run(command, capture_output=True, text=True, errors="replace")
            if done.returncode:
                log = target.with_suffix(".log")
                log.write_text(f"{' '.join(command)}\n\n{done.stderr}{done.stdout}", "utf-8")
                raise KernelBuildError(
                    f"{label(source, defines)} does not compile for {arch}: "
                    f"{first_error(done.stderr) or f'status {done.returncode}'}",
                    path=log,
                )
        os.replace(linked, target)


def object_name(source: Source, defines: Defines) -> str:
    """File name of a code object: ``linear-DS4Q_DECODER=21.hsaco``."""
    words = [f"{name}={value}" for name, value in sorted(defines.items())]
    return "-".join([Path(source.file).stem, *words]) + ".hsaco"


def build_all(
    wanted: Iterable[tuple[Source, Defines]],
    archs: Sequence[str],
    output: Path,
    workers: int | None = None,
    folder: Path = FOLDER,
) -> list[tuple[str, Kernel]]:
    """Build every combination under ``output``; (label, kernel) of all kernels, gates applied."""

    def one(job: tuple[Source, Defines, str]) -> list[tuple[str, Kernel]]:
        source, defines, arch = job
        target = output / arch / object_name(source, defines)
        compile_object(source, defines, arch, target, folder)
        kernels = inspect(target.read_bytes(), arch, source, defines, target)
        return [(label(source, defines), kernel) for kernel in kernels]

    jobs = [(source, defines, arch) for source, defines in wanted for arch in archs]
    with ThreadPoolExecutor(workers or len(os.sched_getaffinity(0))) as pool:
        return [row for rows in pool.map(one, jobs) for row in rows]


def table(rows: Sequence[tuple[str, Kernel]]) -> str:
    """What the compiler says of each kernel, one line a kernel and architecture."""
    head = ("build", "kernel", "arch", "VGPR", "SGPR", "LDS", "scratch", "spills", "args", "block")
    cells = [head] + [
        (
            build,
            k.name,
            k.arch,
            *(str(n) for n in (k.vgprs, k.sgprs, k.lds_bytes, k.scratch_bytes, k.spills)),
            str(k.argument_bytes),
            str(k.block_threads),
        )
        for build, k in rows
    ]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    words = ("<", "<", "<")  # the rest are numbers
    sides = words + (">",) * (len(head) - len(words))
    return "\n".join(
        "  ".join(f"{c:{side}{w}}" for c, side, w in zip(row, sides, widths, strict=True))
        for row in cells
    )


def main(arguments: Sequence[str] | None = None, folder: Path = FOLDER) -> int:
    """The program; 1 where a kernel does not compile or breaks a gate."""
    parser = argparse.ArgumentParser(
        prog="python -m ds4q.hipkern.objects",
        description="Build ds4q's kernels for AMD GPUs without ROCm, and check what came out.",
    )
    parser.add_argument("--arch", action="append", help="one architecture; may be repeated")
    parser.add_argument("--file", action="append", help="one kernel file; may be repeated")
    parser.add_argument("--output", type=Path, help="keep the code objects in this folder")
    parser.add_argument("--jobs", type=int, help="compilers at a time (all cores)")
    asked = parser.parse_args(arguments)
    escape_unencodable(sys.stdout, sys.stderr)
    wanted = [
        (load(file, folder), defines)
        for file, defines in builds(folder)
        if asked.file is None or file in asked.file
    ]
    if not wanted:
        parser.error("no such kernel file")
    try:
        with tempfile.TemporaryDirectory() as temporary:
            output = asked.output or Path(temporary)
            rows = build_all(wanted, asked.arch or BUILT_ARCHS, output, asked.jobs, folder)
    except HipError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(table(rows))
    bad = [(build, kernel) for build, kernel in rows if kernel.problems]
    for build, kernel in bad:
        print(f"GATE {build}: {kernel.name}, {kernel.arch}: {'; '.join(kernel.problems)}")
    verdict = f"{len(bad)} break a gate" if bad else "all gates hold"
    print(f"{len(rows)} kernels in {len(wanted)} builds: {verdict}; none has run on AMD hardware")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
