"""Owns compiling kernels at run time by hiprtc, and the cache of what was compiled.

An entry is found by everything that it depends on: the source with its headers, options,
architecture, library. A damaged entry is compiled again.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from ds4q.artifact.places import home_folder
from ds4q.hipkern.cache import NO_ROOM, first_error, publish
from ds4q.hipkern.errors import HipLibraryError, KernelBuildError
from ds4q.hipkern.library import Library
from ds4q.hipkern.source import Source

if TYPE_CHECKING:
    from ds4q.hipkern.driver import Device

MAGIC = b"ds4qkrn1"  # of a cache entry; its digest and the code follow
DIGEST_BYTES = 16
BASE_OPTIONS = ("-std=c++17", "-O3", "-ffp-contract=off")
"""The same for every library; those for other hardware translate them."""


def label(source: Source, defines: Mapping[str, int]) -> str:
    """How messages name a build: ``linear.hip DS4Q_DECODER=21``."""
    return " ".join([source.file, *(f"{name}={value}" for name, value in sorted(defines.items()))])


def options(arch: str, defines: Mapping[str, int]) -> list[str]:
    """The compiler's options for a build."""
    macros = [f"-D{name}={value:d}" for name, value in sorted(defines.items())]
    return [f"--offload-arch={arch}", *BASE_OPTIONS, *macros]


def compile_source(device: Device, source: Source, defines: Mapping[str, int]) -> bytes:
    """The code object of ``source`` for ``device``, from the cache or from hiprtc.

    Raises
    ------
    KernelBuildError : with the compiler's first line, and the file that holds its whole log
    HipLibraryError : there is no hiprtc
    """
    wanted = options(device.arch, defines)
    key = _key(device.library, source, wanted)
    folder = home_folder() / "kernels" / f"{device.kind}-{device.arch}"
    entry = folder / f"{Path(source.file).stem}-{key}.bin"
    code = read_entry(entry)
    if code is None:
        log = entry.with_suffix(".log")
        code = _compile(device.library, source, wanted, label(source, defines), log)
        write_entry(entry, code)
        log.unlink(missing_ok=True)  # of an attempt that failed
    return code


def read_entry(path: Path) -> bytes | None:
    """What the cache holds at ``path``; None where it is absent or damaged."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    head = len(MAGIC) + DIGEST_BYTES
    code = data[head:]
    if data[:head] != MAGIC + xxhash.xxh3_128_digest(code) or not code:
        return None
    return code


def write_entry(path: Path, code: bytes) -> None:
    """Put ``code`` at ``path`` whole, or not at all."""
    publish(path, MAGIC + xxhash.xxh3_128_digest(code) + code)


def _key(library: Library, source: Source, wanted: list[str]) -> str:
    digest = xxhash.xxh3_128()
    parts = [source.file, source.text, *wanted]
    parts += [part for pair in source.headers.items() for part in pair]
    parts += [str(library.version), library.rtc_version, library.choice and library.path]
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def _compile(library: Library, source: Source, wanted: list[str], name: str, log: Path) -> bytes:
    if library.rtc_problem:
        raise HipLibraryError(
            f"{name} has to be compiled, but hiprtc is not available: {library.rtc_problem}",
            remedy="install ROCm's hiprtc beside its runtime",
        )
    rtc = library.hiprtc
    headers = [text.encode() for text in source.headers.values()] or None
    names = [header.encode() for header in source.headers] or None
    program = _call(
        rtc, "hiprtcCreateProgram", source.text.encode(), source.file.encode(),
        len(source.headers), headers, names,
    )  # fmt: skip
    try:
        (code,) = rtc.hiprtcCompileProgram(program, len(wanted), [o.encode() for o in wanted])
        if code:
            text = _text(rtc, program)
            found = first_error(text) or code.name
            if code.name == "HIPRTC_ERROR_INTERNAL_ERROR" or NO_ROOM in found:
                raise KernelBuildError(
                    f"{name} was not compiled: {found}",
                    remedy="see that the temporary folder (TMPDIR) has room, and try again",
                )
            publish(log, f"{name}\noptions: {' '.join(wanted)}\n\n{text}".encode())
            raise KernelBuildError(
                f"{name} does not compile: {found}",
                path=log,
                remedy="the file holds the compiler's whole log; please report it",
            )
        image = bytearray(_call(rtc, "hiprtcGetCodeSize", program))
        _call(rtc, "hiprtcGetCode", program, image)
        return bytes(image)
    finally:
        _call(rtc, "hiprtcDestroyProgram", program.createRef())


def _text(rtc: Any, program: Any) -> str:
    size = _call(rtc, "hiprtcGetProgramLogSize", program)
    if not size:
        return ""
    text = bytearray(size)
    _call(rtc, "hiprtcGetProgramLog", program, text)
    return text.rstrip(b"\0").decode("utf-8", "replace")


def _call(rtc: Any, function: str, *arguments: Any) -> Any:
    code, *values = getattr(rtc, function)(*arguments)
    if code:
        raise KernelBuildError(f"{function} failed with {code.name} ({int(code)})")
    return values[0] if values else None
