"""Owns reading a code object's metadata, and the gates that a kernel has to pass. Builds nothing.

A code object is an ELF file; a note of type 32 (``NT_AMDGPU_METADATA``) holds a msgpack map, see
"Code Object V3 and Above Metadata" in LLVM's "User Guide for AMDGPU Backend".
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ds4q.hipkern.errors import CodeObjectError
from ds4q.hipkern.handles import argument_struct
from ds4q.hipkern.source import Source

METADATA_NOTE = 32
NOTE_SECTION = 7  # SHT_NOTE
MOST_VGPRS = 256  # loose: compilers differ by a factor of three for one source
WAVE_LANES = {"gfx9": 64, "gfx11": 32, "gfx12": 32}
"""Lanes of a wave by the family that an architecture's name begins with."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """What the compiler says of one kernel, and what is wrong with it."""

    name: str
    arch: str
    vgprs: int
    sgprs: int
    lds_bytes: int
    scratch_bytes: int
    spills: int
    argument_bytes: int
    wave_lanes: int
    block_threads: int
    problems: tuple[str, ...]


def metadata(image: bytes, path: object = None) -> dict[str, Any]:
    """The metadata of a code object.

    Raises
    ------
    CodeObjectError : not an ELF file, or without the note
    """
    import msgpack

    try:
        for kind, text in _notes(image):
            if kind == METADATA_NOTE:
                found = msgpack.unpackb(text)
                if isinstance(found, dict) and "amdhsa.kernels" in found:
                    return found
    except (struct.error, OverflowError, ValueError, msgpack.exceptions.UnpackException):
        pass  # cut short or damaged: as good as none
    raise CodeObjectError("not a code object: it holds no AMDGPU metadata", path=path)


def _notes(image: bytes) -> Iterator[tuple[int, bytes]]:
    """(type, contents) of every note in an ELF64 file of little-endian order."""
    if image[:6] != b"\x7fELF\x02\x01":
        return
    (table,) = struct.unpack_from("<Q", image, 40)
    entry_bytes, count = struct.unpack_from("<HH", image, 58)
    for i in range(count):
        _, kind, _, _, at, size = struct.unpack_from("<IIQQQQ", image, table + i * entry_bytes)
        end = at + size
        while kind == NOTE_SECTION and at < end:
            name_bytes, text_bytes, note = struct.unpack_from("<III", image, at)
            at += 12 + (name_bytes + 3) // 4 * 4  # both parts are padded to four bytes
            yield note, image[at : at + text_bytes]
            at += (text_bytes + 3) // 4 * 4


def inspect(
    image: bytes, arch: str, source: Source, defines: Mapping[str, int], path: object = None
) -> list[Kernel]:
    """Hold every kernel of ``image``, which was built from ``source``, to the gates.

    Raises
    ------
    CodeObjectError : not a code object, for another architecture, or other kernels than declared
    """
    found = metadata(image, path)
    target = str(found.get("amdhsa.target", ""))
    if target.rpartition("--")[2].split(":")[0] != arch:
        raise CodeObjectError("for another architecture", path=path, expected=arch, found=target)
    kernels = {str(k[".name"]): k for k in found["amdhsa.kernels"]}
    if kernels.keys() != source.kernels.keys():
        raise CodeObjectError(
            "other kernels than the source declares",
            path=path,
            expected=", ".join(sorted(source.kernels)),
            found=", ".join(sorted(kernels)),
        )
    return [_kernel(kernels[name], arch, source, defines) for name in source.kernels]


def _kernel(
    facts: Mapping[str, Any], arch: str, source: Source, defines: Mapping[str, int]
) -> Kernel:
    name = str(facts[".name"])
    declared = source.kernel(name)
    threads = source.threads(name, defines)
    spills = int(facts[".vgpr_spill_count"]) + int(facts[".sgpr_spill_count"])
    wave = next(lanes for family, lanes in WAVE_LANES.items() if arch.startswith(family))
    packed = argument_struct(declared.kinds).size

    def differs(what: str, key: str, expected: int) -> str:
        return "" if facts[key] == expected else f"{what} {facts[key]}, expected {expected}"

    lds = int(facts[".group_segment_fixed_size"])
    stated = " or ".join(map(str, declared.lds_bytes)) or "no figure"
    problems = (
        f"{spills} spills" if spills else "",
        differs("scratch bytes", ".private_segment_fixed_size", 0),
        f"LDS bytes {lds}, its comment states {stated}" if lds not in declared.lds_bytes else "",
        differs("argument bytes", ".kernarg_segment_size", packed),
        differs("lanes a wave", ".wavefront_size", wave),
        f"blocks of at most {facts['.max_flat_workgroup_size']}, launched with {threads}"
        if facts[".max_flat_workgroup_size"] < threads
        else "",
        f"{facts['.vgpr_count']} VGPRs" if facts[".vgpr_count"] > MOST_VGPRS else "",
    )
    return Kernel(
        name,
        arch,
        vgprs=int(facts[".vgpr_count"]),
        sgprs=int(facts[".sgpr_count"]),
        lds_bytes=lds,
        scratch_bytes=int(facts[".private_segment_fixed_size"]),
        spills=spills,
        argument_bytes=int(facts[".kernarg_segment_size"]),
        wave_lanes=int(facts[".wavefront_size"]),
        block_threads=threads,
        problems=tuple(problem for problem in problems if problem),
    )
