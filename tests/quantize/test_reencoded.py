"""Jobs that re-encode experts, from source to proof: every recipe, weighed or not, and faults."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds4q import api
from ds4q.artifact.codings import Codings
from ds4q.artifact.files import ForeignFileError
from ds4q.artifact.formats import RowCodec, codec_for, hfp4g32
from ds4q.artifact.hfq import Reader
from ds4q.artifact.metadata import seal
from ds4q.artifact.receipt import read_receipt, receipt_path
from ds4q.artifact.report import Check, Report
from ds4q.artifact.tables import mix_index_sha256
from ds4q.artifact.types import MIXED, RAW, ROCMFPX, TYPES, TensorType
from ds4q.quantize.audit import Unit
from ds4q.quantize.books import FittedBooks
from ds4q.quantize.checkpoint import Checkpoint
from ds4q.quantize.fitting import Fitting
from ds4q.quantize.imatrix import LayerStatistics, read_imatrix, write_imatrix
from ds4q.quantize.job import Job, SpaceError
from ds4q.quantize.journal import ResumeError
from ds4q.quantize.outputs import OutputPlaceError
from ds4q.quantize.recipe import DENSE_RECIPES, RECIPES
from tests.checks import same_bits
from tests.quantize import models

LOSSY = [name for name in RECIPES if name not in DENSE_RECIPES]
D, WIDTH, EXPERTS, LAYERS = 256, 128, 4, 4


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    return models.save(folder / "s", models.expert_tensors(), config=models.EXPERT_CONFIG)


def quantize(source: Path, out: Path, recipe: str, **options: Any) -> dict[str, Any]:
    summary = api.quantize(
        source, out, recipe=recipe, allow_partial=True, warn=lambda text: None, **options
    )
    return summary.document()


def check_of(report: Report, name: str) -> Check:
    return next(check for check in report.checks if check.name == name)


def expected_payload(
    reader: Reader, name: str, importance: np.ndarray[Any, Any] | None = None
) -> bytes:
    """What the general encoder makes of a source tensor."""
    entry = reader.tensors[name]
    codec = codec_for(entry.type_id, Codings.of(reader).coding(name))
    assert isinstance(codec, RowCodec)
    held = models.expert_tensors()
    weight, scale = held[name], held[name.removesuffix("weight") + "scale"]
    codes = np.frombuffer(weight.data, np.uint8).reshape(weight.shape)
    scales = np.frombuffer(scale.data, np.uint8).reshape(scale.shape)
    return codec.encode_rows(hfp4g32.source_values(codes, scales), importance)[0].tobytes()


@pytest.mark.parametrize("recipe", LOSSY)
@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_every_recipe_packs_what_the_general_encoder_gives(
    every: int, recipe: str, source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "x.hfq"
    document = quantize(source, out, recipe, threads=2)
    with Reader(out) as reader:
        names = [e.name for e in reader.tensors.values() if TYPES[e.type_id] in ROCMFPX]
        assert len(names) == 2 * EXPERTS * 3
        for name in names[:: 5 if "affine" in recipe else every]:
            assert reader.read(name).tobytes() == expected_payload(reader, name)
    assert document["lossless"] is False
    report = api.verify(out, source=source, threads=2)
    assert report.failure_lines() == []
    figures = check_of(report, "source").figures
    assert figures["lossy_tensors"] == 2 * EXPERTS * 3
    assert figures["reencoded"] is True
    assert len(figures["worst"]) == 10
    assert ("rocmfp6" in recipe) == (figures["nrmse"] == 0)  # six bits hold every FP4 value here
    assert figures["nrmse"] < 0.6


@pytest.mark.parametrize("recipe", ["mix", "mix2", "rocmfp23"])
def test_bytes_do_not_depend_on_threads(recipe: str, source: Path, tmp_path: Path) -> None:
    for threads in (1, 3):
        quantize(source, tmp_path / f"{threads}.hfq", recipe, threads=threads)
    assert (tmp_path / "1.hfq").read_bytes() == (tmp_path / "3.hfq").read_bytes()


def test_a_dry_run_promises_the_bytes_that_are_written(source: Path, tmp_path: Path) -> None:
    promised = quantize(source, tmp_path / "x.hfq", "mix", dry_run=True)
    written = quantize(source, tmp_path / "x.hfq", "mix")
    assert promised["bytes"] == written["bytes"] == (tmp_path / "x.hfq").stat().st_size
    assert promised["bpw_experts"] == pytest.approx((2 * 2.5 + 3.5) / 3, abs=1e-6)
    assert promised["types"] == written["types"]
    assert written["types"]["Raw"]["tensors"] == 6


def test_gate_and_up_share_their_books(source: Path, tmp_path: Path) -> None:
    quantize(source, tmp_path / "x.hfq", "mix")
    with Reader(tmp_path / "x.hfq") as reader:
        tables = {(t.layer, t.projection): t for t in Codings.of(reader).tables}
    assert tables.keys() == {(layer, w) for layer in (0, 3) for w in ("w1", "w2", "w3")}
    for layer in (0, 3):
        assert tables[layer, "w1"].rows == tables[layer, "w3"].rows
        rows = tables[layer, "w2"].rows
        assert len(set(rows)) == EXPERTS  # each expert's own


def test_the_receipt_knows_the_tables(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.hfq"
    quantize(source, out, "mix")
    receipt = read_receipt(receipt_path(out))
    records = {record.name: record for record in receipt.tensors}
    with Reader(out) as reader:
        assert list(records) == list(reader.tensors)
        tables = [e for e in reader.tensors.values() if e.type_id == RAW.id]
        for entry in tables:
            assert records[entry.name].sources == ()
            found = hashlib.sha256(reader.read(entry.name).tobytes()).hexdigest()
            told = {i["table"]: i["sha256"] for i in reader.metadata["rocmfpx"]["mix_tables"]}
            assert told[entry.name] == found


# ---------------------------------------------------------------- importance


@pytest.fixture(scope="module")
def imatrix(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Statistics of all layers that the model could have, from a seeded generator."""
    return statistics(source, tmp_path_factory.mktemp("imatrix") / "i.imatrix", seed=1)


def statistics(source: Path, path: Path, seed: int) -> Path:
    rng = np.random.default_rng(seed)
    layers = [
        LayerStatistics(
            tokens=rng.permutation([10, 20, 30, 40]),
            gain=rng.random(EXPERTS, np.float32),
            gate_up=rng.gamma(1.0, 1.0, (EXPERTS, D)).astype(np.float32),
            down=rng.gamma(1.0, 1.0, (EXPERTS, WIDTH)).astype(np.float32),
        )
        for _ in range(LAYERS)
    ]
    with Checkpoint.open(source, allow_partial=True) as checkpoint:
        write_imatrix(
            path,
            layers,
            fingerprint=checkpoint.fingerprint(),
            total_tokens=100,
            window_tokens=512,
            texts=["0" * 64],
        )
    return path


@pytest.mark.parametrize("recipe", ["rocmfp23", "mix", "rocmfp4", "rocmfp8"])
def test_an_imatrix_weighs_and_is_demanded_again(
    recipe: str, source: Path, imatrix: Path, tmp_path: Path
) -> None:
    out = tmp_path / "x.hfq"
    quantize(source, out, recipe, imatrix=imatrix)
    quantize(source, tmp_path / "plain.hfq", recipe)
    held = read_imatrix(imatrix, dims=None, fingerprint=None)
    with Reader(out) as reader, Reader(tmp_path / "plain.hfq") as plain:
        for w in ("w1", "w2", "w3"):
            name = f"layers.3.ffn.experts.2.{w}.weight"
            wanted = expected_payload(reader, name, held.importance(3, 2, w))
            assert reader.read(name).tobytes() == wanted
            assert plain.read(name).tobytes() != wanted
        assert reader.metadata["ds4q"]["imatrix_sha256"] == held.sha256
        assert reader.metadata["rocmfpx"]["calibration"] == "imatrix"
    assert read_receipt(receipt_path(out)).imatrix_sha256 == held.sha256

    assert api.verify(out, source=source, imatrix=imatrix).failure_lines() == []
    refused = check_of(api.verify(out, source=source), "source").failures
    assert [f.message for f in refused] == [
        "the artifact was made with an imatrix; name it with --imatrix, or ask for the errors "
        "alone with --errors-only"
    ]
    other = statistics(source, tmp_path / "other.imatrix", seed=2)
    refused = check_of(api.verify(out, source=source, imatrix=other), "source").failures
    assert [f.message for f in refused] == ["the artifact was made with another imatrix"]
    plain_check = check_of(
        api.verify(tmp_path / "plain.hfq", source=source, imatrix=imatrix), "source"
    )
    assert "made without an imatrix" in plain_check.failures[0].message

    alone = api.verify(out, source=source, errors_only=True)
    assert alone.failure_lines() == []
    assert check_of(alone, "source").figures["reencoded"] is False


# ---------------------------------------------------------------- faults


def changed(out: Path, name: str, at: int, mask: int) -> Path:
    """The artifact with one byte of a payload changed, its receipt left behind."""
    raw = bytearray(out.read_bytes())
    with Reader(out) as reader:
        raw[reader.tensors[name].offset + at] ^= mask
    path = out.with_name("changed.hfq")
    path.write_bytes(raw)
    return path


@pytest.mark.parametrize("recipe", ["rocmfp23", "mix"])
@pytest.mark.parametrize("w", ["w1", "w2"])
def test_a_changed_code_is_named(recipe: str, w: str, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.hfq"
    quantize(source, out, recipe)
    receipt_path(out).unlink()
    name = f"layers.3.ffn.experts.1.{w}.weight"
    with Reader(out) as reader:
        entry = reader.tensors[name]
        block = TYPES[entry.type_id].block_bytes
        row_bytes = entry.nbytes // entry.shape[0]
    bad = changed(out, name, 5 * row_bytes + 3 * block, 1)
    (failure,) = check_of(api.verify(bad, source=source), "source").failures
    assert (failure.tensor, failure.row, failure.block) == (name, 5, 3)
    assert (failure.layer, failure.expert, failure.projection) == (3, 1, w)


def with_other_book(out: Path, table: str, expert: int) -> Path:
    """One level of a book moved and every digest put right: only a fit can tell."""
    with Reader(out) as reader:
        raw, metadata = bytearray(out.read_bytes()), reader.metadata
        entry, payload = reader.tensors[table], reader.read(table)
    at = 24 + 2 * EXPERTS + expert * 32  # the last mantissa bit of the expert's lowest level
    payload[at] ^= 1
    raw[entry.offset : entry.offset + entry.nbytes] = payload.tobytes()
    index = metadata["rocmfpx"]["mix_tables"]
    for item in index:
        if item["table"] == table:
            item["sha256"] = hashlib.sha256(payload.tobytes()).hexdigest()
    metadata["rocmfpx"]["mix_index_sha256"] = mix_index_sha256(index)
    front = seal(metadata)
    raw[32 : 32 + len(front)] = front
    path = out.with_name("books.hfq")
    path.write_bytes(raw)
    return path


def test_books_that_no_fit_gives_are_named(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.hfq"
    quantize(source, out, "mix")
    bad = with_other_book(out, "layers.3.ffn.experts.w2.mix_table", 1)
    report = api.verify(bad, source=source)
    assert check_of(report, "structure").ok
    (failure,) = check_of(report, "source").failures
    assert failure.tensor == "layers.3.ffn.experts.1.w2.weight"
    assert "codebooks differ" in failure.message
    alone = api.verify(bad, source=source, errors_only=True)
    assert check_of(alone, "source").ok


def test_a_half_of_gate_and_up_cannot_be_fitted(tmp_path: Path) -> None:
    tensors = models.expert_tensors()
    held = {n: t for n, t in tensors.items() if not n.startswith("layers.0.ffn.experts.0.w3")}
    source = models.save(tmp_path / "s", held, config=models.EXPERT_CONFIG)
    with pytest.raises(Exception, match=r"gate and up share their books") as caught:
        quantize(source, tmp_path / "x.hfq", "mix")
    assert "layers.0.ffn.experts.0.w3.weight" in str(caught.value)
    assert list(tmp_path.glob("x.hfq*")) == []


def test_json_has_what_scripts_rely_on(source: Path, tmp_path: Path) -> None:
    document = quantize(source, tmp_path / "x.hfq", "mix")
    json.dumps(document)
    assert document.keys() >= {"output", "bytes", "tensors", "sha256", "seconds", "source_bytes"}
    assert {TYPES[k.id].name for k in MIXED} <= document["types"].keys()


def test_values_survive_where_the_type_is_wide_enough(source: Path, tmp_path: Path) -> None:
    """FP6 holds every FP4 block of this range: decoding gives the source back, bit for bit."""
    quantize(source, tmp_path / "x.hfq", "rocmfp6-zero")
    held = models.expert_tensors()
    with Reader(tmp_path / "x.hfq") as reader:
        codings = Codings.of(reader)
        for name, entry in reader.tensors.items():
            scale = held[name.removesuffix("weight") + "scale"]
            codes = np.frombuffer(held[name].data, np.uint8).reshape(held[name].shape)
            scales = np.frombuffer(scale.data, np.uint8).reshape(scale.shape)
            wanted = hfp4g32.source_values(codes, scales)
            found = codings.codec(entry).decode(reader.read(name), entry.shape)
            exact = (scales >= 118).repeat(32, axis=1)
            same_bits(np.where(exact, found, 0) + 0, np.where(exact, wanted, 0) + 0)


# ---------------------------------------------------------------- stops


def stop_after(nbytes: int) -> Any:
    """A progress whose job is stopped (Ctrl-C) once so many packed bytes are done."""

    @contextmanager
    def progress(label: str, total: int) -> Iterator[Any]:
        done = 0

        def advance(amount: int) -> None:
            nonlocal done
            done += amount
            if done > nbytes:
                raise KeyboardInterrupt

        yield advance

    return progress


@pytest.mark.parametrize("share", [0.02, 0.3, 0.7, 0.97])
def test_a_stopped_job_fits_every_book_again_and_ends_in_the_same_bytes(
    share: float, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Books in a journal are not evidence."""
    quantize(source, tmp_path / "whole.hfq", "mix")
    with Reader(tmp_path / "whole.hfq") as reader:
        entries = list(reader.tensors.values())
    total = sum(e.nbytes for e in entries if TYPES[e.type_id] in MIXED)
    out = tmp_path / "x.hfq"
    with pytest.raises(KeyboardInterrupt):
        quantize(source, out, "mix", progress=stop_after(int(share * total)))
    fitted: list[str] = []
    real = Fitting.books

    def books(self: Fitting, unit: Unit, kind: TensorType) -> FittedBooks:
        fitted.append(unit.name)
        return real(self, unit, kind)

    monkeypatch.setattr(Fitting, "books", books)
    resumed = quantize(source, out, "mix", resume=True)
    assert out.read_bytes() == (tmp_path / "whole.hfq").read_bytes()
    assert resumed["resumed_bytes"] > 0
    assert len(fitted) == 2 * EXPERTS * 3


def test_another_imatrix_does_not_go_on(source: Path, imatrix: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.hfq"
    with pytest.raises(KeyboardInterrupt):
        quantize(source, out, "mix", progress=stop_after(5000))
    with pytest.raises(ResumeError, match="imatrix"):
        quantize(source, out, "mix", imatrix=imatrix, resume=True)


# ---------------------------------------------------------------- inputs and outputs


def test_no_output_takes_the_place_of_an_input(source: Path, imatrix: Path, tmp_path: Path) -> None:
    """Whatever --force allows: what weighed the errors is needed again by verify."""
    held = tmp_path / "held.imatrix"
    held.write_bytes(imatrix.read_bytes())
    rules = tmp_path / "rules.toml"
    rules.write_text('default = "rocmfp3"\n')
    link = tmp_path / "x.hfq.receipt"
    for out, more in (
        (held, {"recipe": "mix", "imatrix": held}),
        (rules, {"recipe": str(rules)}),
        (tmp_path / "x.hfq", {"recipe": "mix", "imatrix": link}),
    ):
        if more.get("imatrix") == link:
            link.write_bytes(imatrix.read_bytes())
        with pytest.raises((OutputPlaceError, ForeignFileError), match="an input of this job"):
            quantize(source, out, force=True, **more)
    assert held.read_bytes() == link.read_bytes() == imatrix.read_bytes()
    assert rules.read_text() == 'default = "rocmfp3"\n'


def test_a_plan_never_takes_the_place_of_its_own_recipe(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.hfq"
    quantize(source, out, "budget", target_bpw=3.0)
    plan = tmp_path / "x.hfq.plan.toml"
    again = quantize(source, tmp_path / "y.hfq", str(plan))
    assert again["bpw_experts"] <= 3.0
    with Reader(out) as one, Reader(tmp_path / "y.hfq") as other:
        assert one.tensors.keys() == other.tensors.keys()
        for name in one.tensors:
            assert (one.read(name) == other.read(name)).all()


def test_a_resumed_job_says_what_differs(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.hfq"
    with pytest.raises(KeyboardInterrupt):
        quantize(source, out, "mix", progress=stop_after(5000))
    with pytest.raises(ResumeError, match=r"\(options\.recipe\.name\)") as caught:
        quantize(source, out, "mix2", resume=True)
    assert "expected mix, found mix2" in str(caught.value)


def test_a_dry_run_prices_what_the_disk_cannot_hold(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []

    def full(self: Job) -> None:
        raise SpaceError(path=tmp_path)

    monkeypatch.setattr(Job, "_check_space", full)
    summary = api.quantize(
        source, tmp_path / "x.hfq", allow_partial=True, dry_run=True, warn=heard.append
    )
    assert summary.document()["bytes"] > 0
    assert any("not enough free space" in line for line in heard)
    with pytest.raises(SpaceError):
        quantize(source, tmp_path / "x.hfq", "fp4")
