"""Code objects by ziglang: built for real, held to gates that broken kernels break."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from ds4q.hipkern import codeobject, objects
from ds4q.hipkern.codeobject import inspect, metadata
from ds4q.hipkern.driver import BUILT_ARCHS
from ds4q.hipkern.errors import CodeObjectError, HipLibraryError, KernelBuildError
from ds4q.hipkern.kernels import builds
from ds4q.hipkern.source import FOLDER, Source, load

ONE_OF_EACH_WAVE = ("gfx1151", "gfx942")
GOOD = """\
// axpy: block 64, LDS 256 bytes
#include "ds4q_dev.h"
DS4Q_KERNEL(axpy, 64, (const float* x, float* y, float a, int n)) {
  DS4Q_SHARED(float, room, 64);
  ds4q_u32 i = ds4q_thread();
  room[i] = x[i];
  ds4q_barrier();
  if ((int)i < n) y[i] = ds4q_fma(a, room[63 - i], y[i]);
}
"""
# An array that is indexed by what memory holds cannot live in registers.
SCRATCH = """\
// deep: block 64, LDS 0 bytes
#include "ds4q_dev.h"
DS4Q_KERNEL(deep, 64, (const int* at, float* y)) {
  float room[64];
  for (int i = 0; i < 64; i++) room[at[i] & 63] = y[i];
  y[ds4q_thread()] = room[at[ds4q_thread()] & 63];
}
"""


def kernel_folder(folder: Path, text: str) -> Source:
    for header in FOLDER.glob("*.h"):
        shutil.copy(header, folder)
    (folder / "k.hip").write_text(text)
    return load("k.hip", folder)


def built(folder: Path, text: str, arch: str = "gfx1151") -> tuple[Source, bytes]:
    source = kernel_folder(folder, text)
    objects.compile_object(source, {}, arch, folder / "k.hsaco", folder)
    return source, (folder / "k.hsaco").read_bytes()


@pytest.mark.parametrize("arch", BUILT_ARCHS)
def test_a_kernel_passes_the_gates_on_every_target(tmp_path: Path, arch: str) -> None:
    source, image = built(tmp_path, GOOD, arch)
    (kernel,) = inspect(image, arch, source, {})
    assert kernel.problems == ()
    assert (kernel.lds_bytes, kernel.argument_bytes, kernel.block_threads) == (256, 24, 64)
    assert kernel.wave_lanes == (64 if arch in ("gfx942", "gfx950") else 32)
    assert 0 < kernel.vgprs < 64


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("LDS 256", "LDS 128", "LDS bytes 256, its comment states 128"),
        ("LDS 256 bytes", "", "LDS bytes 256, its comment states no figure"),
        ("room, 64", "room, 80", "LDS bytes 320, its comment states 256"),
    ],
)
def test_a_wrong_figure_breaks_a_gate(tmp_path: Path, old: str, new: str, problem: str) -> None:
    source, image = built(tmp_path, GOOD.replace(old, new))
    assert inspect(image, "gfx1151", source, {})[0].problems == (problem,)


def test_scratch_breaks_a_gate(tmp_path: Path) -> None:
    source, image = built(tmp_path, SCRATCH)
    (problem,) = inspect(image, "gfx1151", source, {})[0].problems
    assert re.fullmatch(r"scratch bytes \d+, expected 0", problem)


@pytest.mark.parametrize(
    ("facts", "problems"),
    [
        ({".vgpr_spill_count": 2, ".sgpr_spill_count": 1}, ("3 spills",)),
        ({".wavefront_size": 64}, ("lanes a wave 64, expected 32",)),
        ({".vgpr_count": 256}, ()),
        ({".vgpr_count": 257}, ("257 VGPRs",)),
        ({".max_flat_workgroup_size": 63}, ("blocks of at most 63, launched with 64",)),
    ],
)
def test_each_figure_has_its_gate(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    facts: dict[str, int],
    problems: tuple[str, ...],
) -> None:
    source, image = built(tmp_path, GOOD)
    said = metadata(image)
    said["amdhsa.kernels"][0] |= facts
    monkeypatch.setattr(codeobject, "metadata", lambda image, path: said)
    assert inspect(image, "gfx1151", source, {})[0].problems == problems


def test_a_code_object_of_other_declarations_breaks_gates(tmp_path: Path) -> None:
    _, image = built(tmp_path, GOOD)
    wider = kernel_folder(
        tmp_path, GOOD.replace("axpy, 64", "axpy, 128").replace("int n", "int n, int m")
    )
    assert inspect(image, "gfx1151", wider, {})[0].problems == (
        "argument bytes 24, expected 28",
        "blocks of at most 64, launched with 128",
    )
    with pytest.raises(CodeObjectError, match="expected gfx942, found amdgcn-amd-amdhsa--gfx1151"):
        inspect(image, "gfx942", wider, {})
    other = kernel_folder(tmp_path, GOOD.replace("axpy", "other"))
    with pytest.raises(CodeObjectError, match="expected other, found axpy"):
        inspect(image, "gfx1151", other, {})


def test_damaged_code_objects_are_refused(tmp_path: Path) -> None:
    _, image = built(tmp_path, GOOD)
    assert metadata(image)["amdhsa.kernels"]
    damaged = [b"", b"\x7fELF", image[:200], image.replace(b"amdhsa.kernels", b"amdhsa.kernelz")]
    damaged += [bytes([*image[:40], *(b"\xff" * 8), *image[48:]])]  # the section table's offset
    for data in damaged:
        with pytest.raises(CodeObjectError, match="holds no AMDGPU metadata"):
            metadata(data)


def test_a_kernel_that_does_not_compile_shows_the_first_error(tmp_path: Path) -> None:
    with pytest.raises(
        KernelBuildError, match=r"k\.hip does not compile for gfx1151: .*error: "
    ) as e:
        built(tmp_path, GOOD.replace("room[i] = x[i]", "room[i] = zap[i]"))
    assert "zap" in str(e.value)
    assert "zap" in Path(str(e.value.path)).read_text()
    assert not (tmp_path / "k.hsaco").exists()


def test_an_architecture_that_was_never_built_is_refused(tmp_path: Path) -> None:
    source = kernel_folder(tmp_path, GOOD)
    with pytest.raises(CodeObjectError, match=r"expected gfx1100, .* found gfx1036"):
        objects.compile_object(source, {}, "gfx1036", tmp_path / "k.hsaco", tmp_path)


def test_another_release_of_the_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "ZIGLANG", "0.0.1")
    with pytest.raises(HipLibraryError, match=r"expected 0\.0\.1, found 0\..*ziglang==0\.0\.1"):
        objects.zig()


@pytest.mark.slow
def test_every_kernel_compiles_for_one_target_of_each_wave(tmp_path: Path) -> None:
    """One decoder stands for the others here; ``make objects`` builds all of them for all."""
    firsts = {}
    for file, defines in builds():
        if defines.get("DS4Q_DECODER", 21) == 21 and defines.get("DS4Q_GATE", 21) == 21:
            firsts[file] = (load(file), defines)
    rows = objects.build_all(firsts.values(), ONE_OF_EACH_WAVE, tmp_path)
    assert {build.split()[0] for build, _ in rows} == {p.name for p in FOLDER.glob("*.hip")}
    bad = [f"{build} {k.name} {k.arch}: {k.problems}" for build, k in rows if k.problems]
    assert not bad, "\n" + "\n".join(bad)


@pytest.mark.slow
def test_the_program_builds_everything(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert objects.main(["--output", str(tmp_path)]) == 0
    shown = capfd.readouterr().out
    assert "all gates hold; none has run on AMD hardware" in shown
    assert {p.name for p in tmp_path.iterdir()} == set(BUILT_ARCHS)
    for arch in BUILT_ARCHS:
        assert len(os.listdir(tmp_path / arch)) == len(builds())


def test_the_program_says_which_gate_is_broken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kernel_folder(tmp_path, GOOD.replace("LDS 256", "LDS 128"))
    assert objects.main(["--arch", "gfx1100"], tmp_path) == 1
    shown = capsys.readouterr().out
    assert "GATE k.hip: axpy, gfx1100: LDS bytes 256, its comment states 128" in shown
    assert "1 break a gate" in shown
    assert objects.main(["--arch", "gfx1"], tmp_path) == 1
    assert "error: kernels were never built" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        objects.main(["--file", "absent.hip"])
    assert stop.value.code == 2
