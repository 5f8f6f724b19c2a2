"""Calibration: windows, what the file says of them, and what is refused before any work."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ds4q import api
from ds4q.api import calibrate
from ds4q.artifact.fastpath import reference_wanted
from ds4q.artifact.hfq import ARCH_DEEPSEEK4
from ds4q.artifact.metadata import front_digest, seal
from ds4q.artifact.receipt import receipt_path
from ds4q.artifact.writer import TensorSpec, layout
from ds4q.quantize.checkpoint import Checkpoint
from ds4q.quantize.config import check_config
from ds4q.quantize.errors import ImatrixModelError
from ds4q.quantize.imatrix import Imatrix, LayerStatistics, read_imatrix
from ds4q.quantize.imatrix.writing import ImatrixPlaceError
from ds4q.runtime import calibrate as module
from ds4q.runtime.calibrate import Calibration
from ds4q.runtime.collect import Collector
from ds4q.runtime.engine import Engine
from ds4q.runtime.errors import CorpusError, RunError
from tests.checks import check_refused, same_bits
from tests.runtime.artifacts import DATA, Packed, config_of, write

RANDOM, TINY = DATA / "ds4-random", DATA / "ds4-tiny"
TEXT = (DATA / "text" / "calibration.txt").read_text()[:150]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def ids(tmp_path: Path) -> Path:
    path = tmp_path / "text.ids"
    path.write_text(" ".join(map(str, TEXT.encode())))
    return path


def sealed(path: Path, config: dict[str, Any], tensors: dict[str, Packed], **ours: Any) -> Path:
    """An artifact with a ``ds4q`` object, and the digests that it owes."""
    metadata = {"config": config, "ds4q": ours | {"index_xxh3": "0" * 32}}
    specs = [TensorSpec(name, kind.id, shape) for name, (kind, shape, _) in tensors.items()]
    plan = layout(specs, len(seal(metadata)), arch_id=ARCH_DEEPSEEK4)
    metadata["ds4q"]["index_xxh3"] = front_digest(plan.header, plan.index)
    payloads = b"".join(payload.tobytes() for _, _, payload in tensors.values())
    path.write_bytes(plan.front(seal(metadata)) + payloads)
    return path


def resident(engine: Engine, windows: list[npt.NDArray[Any]]) -> list[LayerStatistics]:
    """What the experts see while the whole model is in memory, one window after another."""
    collector = Collector(engine.config, 1)
    for window in windows:
        engine.forward(engine.new_state(), window, observer=collector)
    return collector.statistics()


def opened(path: Path, folder: Path) -> Imatrix:
    with Checkpoint.open(folder) as checkpoint:
        dims = check_config(checkpoint.config, folder)
        return read_imatrix(path, dims=dims, fingerprint=checkpoint.fingerprint())


def test_the_file_and_what_is_told_of_it(tiny_artifact: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "tiny.imatrix"
    done = calibrate(tiny_artifact, [text, text], out, window_tokens=51)
    imatrix = opened(out, TINY)
    assert done == Calibration(
        output=str(out),
        sha256=hashlib.sha256(out.read_bytes()).hexdigest(),
        source_fingerprint=str(imatrix.fingerprint),
        texts=[{"file": str(text), "sha256": hashlib.sha256(TEXT.encode()).hexdigest()}] * 2,
        tokens=2 * (150 + 3),  # three windows of each: BOS and 50 bytes
        windows=6,
        window_tokens=51,
        layers=4,
        experts=16,
        unseen=imatrix.unseen,
        seconds=done.seconds,
    )
    for layer in range(4):
        assert imatrix.tokens(layer).sum() == 4 * done.tokens


def test_windows_are_sequences_of_their_own(
    tiny_artifact: Path, tiny_engine: Engine, text: Path, tmp_path: Path
) -> None:
    calibrate(tiny_artifact, [text], tmp_path / "a", window_tokens=64, limit_tokens=100)
    raw = TEXT.encode()
    windows = [np.array([256, *raw[:63]]), np.array([256, *raw[63:100]])]
    expected = resident(tiny_engine, windows)
    found = opened(tmp_path / "a", TINY)
    for layer, stats in enumerate(expected):
        assert found.tokens(layer).tolist() == stats.tokens.tolist()
        for expert in np.flatnonzero(stats.tokens):
            rows = {"w1": stats.gate_up, "w2": stats.down, "w3": stats.gate_up}
            for projection, values in rows.items():
                row = found.importance(layer, int(expert), projection)
                np.testing.assert_allclose(row, values[expert], rtol=1e-3 * reference_wanted())


def test_the_same_texts_give_the_same_bytes(
    tiny_artifact: Path, text: Path, ids: Path, tmp_path: Path
) -> None:
    digests = {
        calibrate(tiny_artifact, [source], tmp_path / "a", threads=threads).sha256
        for source, threads in ((text, 1), (text, 3))
    }
    assert len(digests) == 1
    by_text = opened(tmp_path / "a", TINY)
    calibrate(tiny_artifact, [ids], tmp_path / "b")
    by_ids = opened(tmp_path / "b", TINY)
    for layer in range(4):
        same_bits(by_ids.tokens(layer), by_text.tokens(layer))
        same_bits(by_ids.importance(layer, 0, "w2"), by_text.importance(layer, 0, "w2"))


def test_an_artifact_without_a_tokenizer_reads_ids(
    random_artifact: Path, text: Path, ids: Path, tmp_path: Path
) -> None:
    done = calibrate(random_artifact, [ids], tmp_path / "a")
    assert (done.tokens, done.windows, done.layers) == (151, 1, 6)
    check_refused(
        CorpusError,
        lambda: calibrate(random_artifact, [text], tmp_path / "b"),
        path=text,
        says=["no tokenizer", ".ids"],
    )
    check_refused(
        ImatrixModelError,
        lambda: opened(tmp_path / "a", TINY),
        path=tmp_path / "a",
        says=["number of layers"],
    )


def test_progress_counts_every_layer(tiny_artifact: Path, text: Path, tmp_path: Path) -> None:
    heard: list[list[Any]] = []

    @contextmanager
    def progress(label: str, total: int, *, unit: str) -> Iterator[Any]:
        heard.append([label, unit, total, 0])

        def advance(amount: int) -> None:
            heard[-1][-1] += amount

        yield advance

    calibrate(tiny_artifact, [text], tmp_path / "a", window_tokens=64, progress=progress)
    assert heard == [["calibrating", "tokens x layers", 4 * 153, 4 * 153]]


# ---------------------------------------------------------------- refused before the weights


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def observe(*args: Any, **kwargs: Any) -> list[LayerStatistics]:
        raise AssertionError("the weights were read")

    monkeypatch.setattr(module, "observe_layers", observe)


@pytest.mark.usefixtures("no_weights")
def test_windows_longer_than_the_model(tmp_path: Path, ids: Path) -> None:
    config = config_of(RANDOM) | {"max_position_embeddings": 100}
    path = sealed(tmp_path / "m.hfq", config, {}, source_fingerprint="0" * 64)
    check_refused(
        RunError,
        lambda: calibrate(path, [ids], tmp_path / "a", window_tokens=101),
        path=path,
        says=["at most 100", "101"],
    )


def test_default_windows_fit_the_model(tmp_path: Path, ids: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(RANDOM, source)
    config = config_of(RANDOM) | {"max_position_embeddings": 100}
    (source / "config.json").write_text(json.dumps(config))
    path = tmp_path / "m.hfq"
    api.quantize(source, path, draft="drop", warn=lambda text: None)
    receipt_path(path).unlink()
    heard: list[str] = []
    done = calibrate(path, [ids], tmp_path / "a", warn=heard.append)
    assert "no receipt" in heard[0]
    assert (done.window_tokens, done.windows, done.tokens) == (100, 2, 152)


@pytest.mark.usefixtures("no_weights")
def test_artifacts_that_cannot_be_calibrated(tmp_path: Path, ids: Path) -> None:
    config, out = config_of(RANDOM), tmp_path / "a"
    foreign = write(tmp_path / "foreign.hfq", config, {})
    nameless = sealed(tmp_path / "nameless.hfq", config, {}, recipe="fp4")
    part = sealed(tmp_path / "part.hfq", config, {}, partial=True, source_fingerprint="0" * 64)
    for path, words in (
        (foreign, "which checkpoint"),
        (nameless, "which checkpoint"),
        (part, "only part of a model"),
    ):
        check_refused(RunError, partial(calibrate, path, [ids], out), path=path, says=[words])
    assert not out.exists()


@pytest.mark.usefixtures("no_weights")
def test_a_draft_file(random_artifact: Path, ids: Path, tmp_path: Path) -> None:
    draft = random_artifact.with_name("ds4-random-dspark.hfq")
    check_refused(
        RunError,
        lambda: calibrate(draft, [ids], tmp_path / "a"),
        path=draft,
        says=["draft part of a model"],
    )


@pytest.mark.usefixtures("no_weights")
def test_output_that_is_an_input(tiny_artifact: Path, text: Path, tmp_path: Path) -> None:
    for path in (text, tiny_artifact):
        check_refused(ImatrixPlaceError, partial(calibrate, tiny_artifact, [text], path), path=path)
    check_refused(
        ImatrixPlaceError,
        lambda: calibrate(tiny_artifact, [text], text, force=True),
        path=text,
        says=["one of the inputs"],
    )
    assert text.read_text() == TEXT
    for path in (tiny_artifact, receipt_path(tiny_artifact)):
        before = path.read_bytes()
        check_refused(
            ImatrixPlaceError,
            partial(calibrate, tiny_artifact, [text], path, force=True),
            path=path,
            says=["an artifact or a receipt"],
        )
        assert path.read_bytes() == before


@pytest.mark.usefixtures("no_weights")
def test_texts_that_cannot_be_read(tiny_artifact: Path, tmp_path: Path) -> None:
    path, out = tmp_path / "t.ids", tmp_path / "a"
    for content, words in (("", "no tokens"), ("1 512", "vocabulary"), ("1 x", "token id")):
        path.write_text(content)
        check_refused(CorpusError, lambda: calibrate(tiny_artifact, [path], out), says=[words])
    assert not out.exists()


def test_metadata_names_texts_and_windows(tiny_artifact: Path, ids: Path, tmp_path: Path) -> None:
    out = tmp_path / "a"
    calibrate(tiny_artifact, [ids], out, limit_tokens=20, window_tokens=12)
    raw = out.read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    assert header["__metadata__"]["tokens"] == "22"
    assert header["__metadata__"]["window_tokens"] == "12"
    digest = hashlib.sha256(ids.read_bytes()).hexdigest()
    assert json.loads(header["__metadata__"]["texts"]) == [digest]
