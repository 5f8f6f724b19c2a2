"""Calibration layer by layer: the bits of a model in memory, whatever is held; room; endings."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds4q.artifact.fastpath import reference_wanted
from ds4q.artifact.hfq import Reader
from ds4q.quantize.imatrix import LayerStatistics
from ds4q.runtime import layerwise as module
from ds4q.runtime.backend.cpu import CpuBackend
from ds4q.runtime.collect import Collector
from ds4q.runtime.config import checked_config
from ds4q.runtime.engine import Engine
from ds4q.runtime.errors import CacheError, SpoolError
from ds4q.runtime.experts.catalogue import Catalogue
from ds4q.runtime.layerwise import observe_layers, plan_layers
from ds4q.runtime.source import ArtifactSource
from tests.checks import check_refused, same_bits
from tests.runtime import mixed
from tests.runtime.artifacts import DATA, config_of, pack, write

PROMPT = np.load(DATA / "ds4-random" / "prompt.npy")
WINDOWS = [PROMPT[:300], PROMPT[7:8], PROMPT[20:150]]  # more than a batch, one token, less


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Temporary files go where the test sees them, and none is ever left, nor has a name."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path
    assert list(tmp_path.iterdir()) == []


def layered(path: Path, expert_bytes: int, threads: int = 2) -> list[LayerStatistics]:
    with Reader(path) as reader:
        config = checked_config(reader)
        return observe_layers(reader, config, WINDOWS, expert_bytes=expert_bytes, threads=threads)


def resident(path: Path) -> list[LayerStatistics]:
    engine = Engine.load(path, threads=1)
    collector = Collector(engine.config, 1)
    for window in WINDOWS:
        engine.forward(engine.new_state(), window, observer=collector)
    return collector.statistics()


def same_statistics(found: list[LayerStatistics], expected: list[LayerStatistics]) -> None:
    for layer, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a.tokens.tolist() == b.tokens.tolist()
        for name in ("gain", "gate_up", "down"):
            if reference_wanted():  # numpy's products depend on the batch's shape
                np.testing.assert_allclose(getattr(a, name), getattr(b, name), rtol=1e-3, atol=1e-7)
            else:
                same_bits(getattr(a, name), getattr(b, name), what=f"{name} of layer {layer}")


def sizes(path: Path) -> tuple[int, int]:
    """Bytes of the largest expert, and of all."""
    with Reader(path) as reader:
        catalogue = Catalogue(checked_config(reader), ArtifactSource(reader), bind=False)
        return max(record.nbytes for record in catalogue), catalogue.file_bytes


@pytest.fixture(scope="module")
def mixed_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every type among the experts of two layers, decode tables too."""
    folder = DATA / "ds4-random"
    made, _, metadata = mixed.encode(pack(folder), "dual", "zero")
    path = tmp_path_factory.mktemp("mixed") / "mixed.hfq"
    return write(path, config_of(folder), made, rocmfpx=metadata)


@pytest.fixture(scope="module")
def expected(random_path: Path) -> list[LayerStatistics]:
    return resident(random_path)


@pytest.mark.parametrize("share", [1.0, 0.1, 0.0])
def test_what_is_in_memory_never_shows(
    share: float,
    random_path: Path,
    expected: list[LayerStatistics],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All experts of a layer, a tenth of the model's, one; 0.0 also takes other batches."""
    largest, every = sizes(random_path)
    if share == 0.0:
        monkeypatch.setattr(module, "BATCH_TOKENS", 7)
    found = layered(random_path, max(largest, int(share * every)), threads=1 + bool(share))
    same_statistics(found, expected)


def test_experts_of_mixed_types(mixed_path: Path) -> None:
    same_statistics(layered(mixed_path, sizes(mixed_path)[0] * 3), resident(mixed_path))


def test_each_expert_is_loaded_once(random_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    real = ArtifactSource.fill

    def fill(self: ArtifactSource, progress: Any) -> None:
        read.extend(entry.name for entry, _ in self._planned)
        real(self, progress)

    monkeypatch.setattr(ArtifactSource, "fill", fill)
    for expert_bytes in (sizes(random_path)[0], 1 << 40):
        read.clear()
        layered(random_path, expert_bytes)
        assert len(set(read)) == len(read)
        assert not any(name.startswith("head.") for name in read)  # nothing asks for logits


# ------------------------------------------------------------------------------ memory and disk


def planned(path: Path, asked: Any, tokens: int = 1000) -> module.Plan:
    with Reader(path) as reader:
        return plan_layers(reader, checked_config(reader), tokens, asked)


def test_what_is_asked_of_memory(tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    largest, every = sizes(tiny_artifact)
    layer = every // 4
    whole = planned(tiny_artifact, None)
    assert whole == planned(tiny_artifact, "auto") == planned(tiny_artifact, every)
    assert whole.expert_bytes == layer
    d, k, n = 256, 4, 4
    assert whole.disk_bytes == 4 * 1000 * n * d
    small = planned(tiny_artifact, largest)
    assert small.expert_bytes == largest
    assert small.disk_bytes == 4 * 1000 * (n + 1 + k) * d
    check_refused(
        CacheError,
        lambda: planned(tiny_artifact, largest - 1),
        path=tiny_artifact,
        says=[f"{largest:,}", f"--expert-cache {largest}"],
    )
    monkeypatch.setattr(module, "available_bytes", lambda: 1 << 20)
    for asked in (None, "auto", largest):
        check_refused(CacheError, lambda asked=asked: planned(tiny_artifact, asked))  # type: ignore[misc]


def test_memory_that_cannot_be_told(tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> int:
        raise CacheError("cannot tell")

    monkeypatch.setattr(module, "available_bytes", unknown)
    check_refused(CacheError, lambda: planned(tiny_artifact, "auto"), says=["cannot tell"])
    largest, every = sizes(tiny_artifact)
    for asked, granted in ((None, every // 4), (largest, largest)):
        plan = planned(tiny_artifact, asked)
        assert plan.expert_bytes == granted
        assert "memory was not checked" in plan.notes[0]


def test_a_disk_without_room_is_told_first(
    tiny_artifact: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = planned(tiny_artifact, None).disk_bytes
    usage = shutil.disk_usage(folder)._replace(free=needed - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    says = [f"{needed:,} bytes free", "TMPDIR"]
    check_refused(SpoolError, lambda: planned(tiny_artifact, None), path=folder, says=says)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "")])
def test_nothing_is_left_of_a_failure(
    error: Any, random_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fixture sees that no file has a name; here no descriptor is left open."""
    largest = sizes(random_path)[0]
    before = len(os.listdir("/proc/self/fd"))

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    with monkeypatch.context() as patch:
        if isinstance(error, OSError):
            patch.setattr(os, "pwrite", fail)
        else:
            patch.setattr(CpuBackend, "experts", fail)
        with pytest.raises((KeyboardInterrupt, SpoolError)):
            layered(random_path, largest)
    assert len(os.listdir("/proc/self/fd")) == before
