"""Peak memory of real commands on matrices of true size: bounded by runs of rows, not files."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

LIMIT_BYTES = 400 << 20
NOISE_BYTES = 24 << 20  # the allocator's, and one more journal line or index entry a tensor

pytestmark = pytest.mark.slow

Made = Callable[[int, bool], tuple[Path, Path]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A checkpoint of so many experts, with or without the embedding, and its artifact."""
    known: dict[tuple[int, bool], tuple[Path, Path]] = {}

    def make(experts: int, embedding: bool) -> tuple[Path, Path]:
        key = experts, embedding
        if key not in known:
            folder = tmp_path_factory.mktemp(f"flash{experts}")
            program = f"flash_layer.write(Path({str(folder / 'source')!r}), {experts}, {embedding})"
            program = f"from pathlib import Path; from benchmarks import flash_layer; {program}"
            subprocess.run([sys.executable, "-c", program], check=True)
            known[key] = folder / "source", folder / "x.hfq"
        return known[key]

    return make


LAUNCHER = """
import resource, subprocess, sys
done = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL)
print(done.returncode, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def peak_bytes(*words: object) -> int:
    """Largest resident size of ``ds4q WORDS``, which must end well.

    A small process starts it: a child's peak counts that of its parent before the exec.
    """
    command = [sys.executable, "-c", LAUNCHER, sys.executable, "-m", "ds4q", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    status, kib = map(int, done.stdout.split())
    assert status == 0, done.stderr
    return kib << 10


def quantize(made: Made, experts: int, *, embedding: bool = False, threads: int = 2) -> int:
    source, out = made(experts, embedding)
    words = ("--allow-partial", "-q", "--force", "--threads", threads)
    return peak_bytes("quantize", source, "-o", out, *words)


def verify(made: Made, experts: int, *, embedding: bool = False, threads: int = 2) -> int:
    source, out = made(experts, embedding)
    return peak_bytes("verify", out, "--source", source, "-q", "--threads", threads)


def inspect(made: Made, experts: int, *, embedding: bool = False, threads: int = 2) -> int:
    return peak_bytes("inspect", made(experts, embedding)[1], "--tensors")


@pytest.mark.parametrize("command", [quantize, verify, inspect])
def test_memory_does_not_grow_with_the_number_of_experts(
    command: Callable[..., int], made: Made
) -> None:
    for experts in (16, 64):
        if not made(experts, False)[1].exists():
            quantize(made, experts)
    few, many = command(made, 16), command(made, 64)
    assert many < LIMIT_BYTES
    assert many - few < NOISE_BYTES, f"{few:,} bytes for 16 experts, {many:,} for 64"


@pytest.mark.parametrize("command", [quantize, verify])
def test_memory_does_not_grow_with_a_tensor(command: Callable[..., int], made: Made) -> None:
    """embed.weight alone has a gigabyte."""
    for embedding in (False, True):
        if not made(16, embedding)[1].exists():
            quantize(made, 16, embedding=embedding)
    without, with_it = command(made, 16), command(made, 16, embedding=True)
    assert with_it < LIMIT_BYTES
    assert with_it - without < NOISE_BYTES, f"{without:,} bytes without, {with_it:,} with it"


@pytest.mark.parametrize("command", [quantize, verify])
def test_eight_threads_stay_below_the_limit(command: Callable[..., int], made: Made) -> None:
    if not made(16, True)[1].exists():
        quantize(made, 16, embedding=True)
    assert command(made, 16, embedding=True, threads=8) < LIMIT_BYTES
