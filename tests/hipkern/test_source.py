"""What the host reads out of kernel files: declarations, includes, block sizes, LDS figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds4q.hipkern.errors import HipUsageError
from ds4q.hipkern.source import load

TEXT = """\
// Owns two kernels of this test.
//
// twice: grid (n), block THREADS,
//   LDS 512 or 1024 bytes, one for each width.
// once, less: grid (1), block 64, no LDS. See twice: it needs LDS 99.
#include "a.h"
#ifndef THREADS
#define THREADS 128  // lanes
#endif
// DS4Q_KERNEL(gone, 32, (int n)) {}
DS4Q_KERNEL(twice, THREADS, (const float* x, /* in place */ float *y,
                             float a, int n)) {}
// states: nothing, so it keeps none of the figures above
DS4Q_KERNEL(once, 64, (ds4q_u64 when, const ds4q_u32 count)) {}
DS4Q_KERNEL(less, 32, ()) {}
DS4Q_KERNEL(mute, 32, ()) {}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "k.hip").write_text(TEXT)
    (tmp_path / "a.h").write_text('#include "b.h"\n#define WIDE 256\n')
    (tmp_path / "b.h").write_text('#include "a.h"\n')
    (tmp_path / "unused.h").write_text("")
    return tmp_path


def test_declarations_with_kinds_and_figures(folder: Path) -> None:
    source = load("k.hip", folder)
    assert list(source.kernels) == ["twice", "once", "less", "mute"]
    twice = source.kernel("twice")
    assert twice.kinds == ("pointer", "pointer", "float", "int")
    assert twice.lds_bytes == (512, 1024)
    assert source.kernel("once").kinds == ("ds4q_u64", "ds4q_u32")
    assert source.kernel("once").lds_bytes == (0,)
    assert source.kernel("less").lds_bytes == (0,)
    assert source.kernel("mute").kinds == ()
    assert source.kernel("mute").lds_bytes == ()


def test_only_headers_that_are_reached_belong_to_a_source(folder: Path) -> None:
    assert set(load("k.hip", folder).headers) == {"a.h", "b.h"}


def test_block_sizes_from_literals_macros_and_defines(folder: Path) -> None:
    source = load("k.hip", folder)
    assert source.threads("once", {}) == 64
    assert source.threads("twice", {}) == 128
    assert source.threads("twice", {"THREADS": 256}) == 256


def test_a_block_size_of_a_header_counts(folder: Path) -> None:
    (folder / "k.hip").write_text('#include "a.h"\nDS4Q_KERNEL(wide, WIDE, (int n)) {}\n')
    assert load("k.hip", folder).threads("wide", {}) == 256


@pytest.mark.parametrize("lines", ["", "#define N 32\n#define N 64\n", "#define N (2 * 32)\n"])
def test_a_block_size_that_cannot_be_told_is_an_error(folder: Path, lines: str) -> None:
    (folder / "k.hip").write_text(f"{lines}DS4Q_KERNEL(k, N, (int n)) {{}}\n")
    with pytest.raises(HipUsageError, match="block size of k cannot be told"):
        load("k.hip", folder).threads("k", {})


@pytest.mark.parametrize("argument", ["double x", "unsigned int n", "n", "ds4q_matrix m"])
def test_an_argument_that_cannot_be_packed_is_an_error(folder: Path, argument: str) -> None:
    (folder / "k.hip").write_text(f"DS4Q_KERNEL(k, 32, ({argument})) {{}}\n")
    with pytest.raises(HipUsageError, match=f"found {argument}"):
        load("k.hip", folder)


def test_unknown_names_are_errors(folder: Path) -> None:
    with pytest.raises(HipUsageError, match=r"no such kernel file"):
        load("absent.hip", folder)
    with pytest.raises(HipUsageError, match="expected twice, once, less, mute, found thrice"):
        load("k.hip", folder).kernel("thrice")


def test_every_kernel_file_of_the_product_can_be_read() -> None:
    from ds4q.hipkern.kernels import builds

    wanted = builds()
    assert {file for file, _ in wanted}
    for file, defines in wanted:
        source = load(file)
        assert source.kernels, f"{file} declares no kernel"
        for kernel in source.kernels.values():
            assert source.threads(kernel.name, defines) % 32 == 0
            assert kernel.lds_bytes, f"{file}: no LDS figure for {kernel.name}"
