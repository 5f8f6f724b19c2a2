"""ds4q inspect: what it shows of each kind of file, what it calls a problem, and what it reads."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ds4q.artifact.hfq import Reader
from ds4q.artifact.receipt import read_receipt, receipt_path
from ds4q.cli import main
from tests.quantize import models
from tests.quantize.builders import RANDOM, TINY, listing_of
from tests.quantize.damage import flip

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.mini(tmp_path_factory.mktemp("mini"))


@pytest.fixture
def artifact(source: Path, tmp_path: Path) -> Path:
    models.run(source, tmp_path / "x.hfq")
    return tmp_path / "x.hfq"


def inspect(*words: object) -> Result:
    return CliRunner().invoke(main, ["inspect", *map(str, words)])


def document(*words: object) -> dict[str, Any]:
    result = inspect(*words, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


# ---------------------------------------------------------------- artifacts


def test_census_of_an_artifact(tiny_artifact: Path) -> None:
    found = document(tiny_artifact)
    assert (found["kind"], found["version"], found["arch_id"]) == ("artifact", 1, 9)
    assert found["bytes"] == tiny_artifact.stat().st_size
    assert found["tensors"] == 306
    assert sum(entry["tensors"] for entry in found["types"].values()) == 306
    payload = sum(entry["bytes"] for entry in found["types"].values())
    assert payload == found["bytes"] - found["data_offset"]
    assert found["types"]["HFP4G32"]["tensors"] == 192
    assert found["metadata"]["ds4q"]["recipe"] == "fp4"
    assert found["metadata"]["tokenizer"].startswith("<")  # its length, not its text
    assert (found["ok"], found["problems"]) == (True, [])


def test_census_for_people(tiny_artifact: Path) -> None:
    result = inspect(tiny_artifact)
    assert result.stderr == ""
    assert result.stdout.startswith(f"{tiny_artifact}: artifact, ")
    assert "306 tensors" in result.stdout
    assert "  HFP4G32           192 tensors" in result.stdout
    assert "layers.0.ffn.experts.0.w1.weight" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) < 1000


@pytest.mark.parametrize(
    ("arch_id", "says"),
    [
        (9, "DeepSeek V4"),
        (16, "Spark-X2.5 or Qwen3.8 Flash-Next"),  # claimed twice
        (17, "of no family that is known"),
    ],
)
def test_the_architecture_is_shown_by_name(
    arch_id: int, says: str, cases_dir: Path, tmp_path: Path
) -> None:
    file = tmp_path / "x.hfq"
    raw = bytearray((cases_dir / "c10_id22.hfq").read_bytes())
    raw[8:12] = arch_id.to_bytes(4, "little")
    file.write_bytes(raw)
    assert f"\n  arch_id: {arch_id}, {says}\n" in inspect(file).stdout


def test_tensors_are_listed_on_request(artifact: Path) -> None:
    listed = document(artifact, "--tensors")["tensor_list"]
    with Reader(artifact) as reader:
        assert [(t["name"], t["shape"], t["offset"], t["bytes"]) for t in listed] == [
            (e.name, list(e.shape), e.offset, e.nbytes) for e in reader.tensors.values()
        ]
    lines = inspect(artifact, "--tensors").stdout.splitlines()
    assert "layers.0.ffn.experts.2.w2.weight  HFP4G32  4x64  200" in lines
    assert "tensor_list" not in document(artifact)


def test_one_layer(random_artifact: Path) -> None:
    listed = document(random_artifact, "--layer", 2)["tensor_list"]
    with Reader(random_artifact) as reader:
        wanted = [name for name in reader.tensors if name.startswith("layers.2.")]
    assert [tensor["name"] for tensor in listed] == wanted
    assert document(random_artifact, "--layer", 99)["tensor_list"] == []


@pytest.mark.parametrize("damage", ["padding", "appended"])
def test_strict_turns_what_is_unusual_into_exit_status_1(damage: str, artifact: Path) -> None:
    assert inspect(artifact, "--strict").exit_code == 0
    if damage == "padding":
        with Reader(artifact) as reader:
            flip(artifact, reader.data_offset - 1)
    else:
        with artifact.open("ab") as file:
            file.write(b"x")
    word = "padding" if damage == "padding" else "1 bytes follow"
    lax = inspect(artifact)
    assert lax.exit_code == 0
    assert word in lax.stderr
    strict = inspect(artifact, "--strict")
    assert strict.exit_code == 1
    assert word in strict.stderr
    assert json.loads(inspect(artifact, "--json", "--strict").stdout)["ok"] is False


def test_a_changed_index_is_refused_even_without_strict(artifact: Path) -> None:
    with Reader(artifact) as reader:
        flip(artifact, 32 + len(reader.metadata_raw) + 9)
    for words in ([], ["--strict"], ["--json"]):
        result = inspect(artifact, *words)
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr.startswith(f"ds4q: error: {artifact}: ")
        assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "says"),
    [("c10_id22", None), ("c10_id23", "reserved tensor type 23"), ("c10_id99", "type 99")],
)
def test_unknown_types_are_listed_and_flagged(name: str, says: str | None, cases_dir: Path) -> None:
    path = cases_dir / f"{name}.hfq"
    result = inspect(path, "--json", "--tensors")
    if name == "c10_id23":
        assert (result.exit_code, result.stdout) == (1, "")
        assert "t.weight: reserved tensor type 23" in result.stderr
        return
    found = json.loads(result.stdout)
    assert found["tensor_list"][0]["type"] == ("TidI32" if says is None else says)
    assert any("type 99" in problem for problem in found["problems"]) == (says is not None)


# ---------------------------------------------------------------- receipts


def test_a_receipt(artifact: Path) -> None:
    path = receipt_path(artifact)
    receipt = read_receipt(path)
    found = document(path, "--tensors")
    assert (found["kind"], found["bytes"]) == ("receipt", artifact.stat().st_size)
    assert found["metadata"]["sha256"] == receipt.sha256
    assert found["metadata"]["partial"] is True
    assert [t["xxh3"] for t in found["tensor_list"]] == [t.xxh3 for t in receipt.tensors]
    assert document(artifact)["types"] == found["types"]
    assert receipt.sha256 in inspect(path).stdout


def test_a_receipt_of_any_name_is_known_by_its_first_bytes(artifact: Path) -> None:
    moved = receipt_path(artifact).rename(artifact.with_name("anything"))
    assert document(moved)["kind"] == "receipt"


def test_a_broken_receipt_is_one_line(artifact: Path) -> None:
    path = receipt_path(artifact)
    flip(path, 100)
    result = inspect(path)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"ds4q: error: {path}: receipt")


# ---------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("model", [TINY, RANDOM], ids=lambda path: path.name)
def test_a_whole_checkpoint_is_sound(model: Path) -> None:
    found = document(model, "--tensors")
    assert (found["kind"], found["tensors"]) == ("checkpoint", len(listing_of(model)))
    assert [t["name"] for t in found["tensor_list"]] == sorted(listing_of(model))
    assert found["shards"] == len(list(model.glob("*.safetensors")))
    result = inspect(model, "--strict")
    warned = "tokenizer.json is absent" in result.stderr
    assert (result.exit_code, warned) == ((0, False) if model is TINY else (1, True))


def test_a_part_of_a_checkpoint_is_shown_with_its_gaps(source: Path) -> None:
    result = inspect(source)
    assert result.exit_code == 0
    assert "checkpoint" in result.stdout
    found = document(source)
    assert found["ok"] is False
    assert inspect(source, "--strict").exit_code == 1


def test_one_shard_alone(cases_dir: Path) -> None:
    found = document(cases_dir / "c06_nibble.safetensors", "--tensors", "--layer", 0)
    assert (found["kind"], found["shards"]) == ("checkpoint", 1)
    assert {t["type"] for t in found["tensor_list"]} == {"I8", "F8_E8M0"}


def test_a_checkpoint_that_fails_its_audit_is_still_shown(tmp_path: Path) -> None:
    tensors = models.mini_tensors()
    del tensors["layers.0.attn.wq_a.scale"]
    folder = models.save(tmp_path, tensors)
    found = document(folder)
    assert found["tensors"] == len(tensors)
    assert any("layers.0.attn.wq_a.weight" in problem for problem in found["problems"])
    assert inspect(folder, "--strict").exit_code == 1


@pytest.mark.parametrize(
    "case",
    ["c01_len_max", "c01_len_1TiB", "c01_len_plus1", "c01_len_zero", "c04_cut", "c04_cut_header"],
)
def test_broken_shards_are_one_line(case: str, cases_dir: Path) -> None:
    path = cases_dir / f"{case}.safetensors"
    result = inspect(path)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"ds4q: error: {path}: ")
    assert len(result.stderr.splitlines()) == 1


# ---------------------------------------------------------------- neither


@pytest.mark.parametrize("kind", ["missing", "empty", "text", "empty folder", "fifo", "device"])
def test_what_is_none_of_these_is_one_line(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "thing"
    if kind == "empty":
        path.write_bytes(b"")
    elif kind == "text":
        path.write_text("nothing that ds4q knows\n" * 10)
    elif kind == "empty folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)  # nobody writes to it: opening it plainly would wait for ever
    elif kind == "device":
        path = Path("/dev/zero")
    result = inspect(path)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"ds4q: error: {path}: ")
    assert len(result.stderr.splitlines()) == 1


def test_names_cannot_write_on_the_terminal(tmp_path: Path, artifact: Path) -> None:
    odd = artifact.rename(tmp_path / "a\x1b[31m\nb.hfq")
    with odd.open("r+b") as file:
        file.truncate(100)
    result = inspect(odd)
    assert result.exit_code == 1
    assert "\x1b" not in result.output
    assert len(result.stderr.splitlines()) == 1


def test_names_cannot_write_on_the_terminal_of_a_sound_file(artifact: Path, tmp_path: Path) -> None:
    odd = artifact.rename(tmp_path / "a\x1b[31m\nb.hfq")
    result = inspect(odd)
    assert result.exit_code == 0
    assert "\x1b" not in result.output
    assert result.stdout.splitlines()[0].startswith(f"{tmp_path}/a\\x1b[31m\\x0ab.hfq: artifact")


# ---------------------------------------------------------------- what is read


class Reads:
    """Counts the calls and the bytes of every positioned read."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls = self.nbytes = 0
        real_preadv, real_pread = os.preadv, os.pread

        def preadv(fd: int, buffers: list[Any], offset: int, *more: int) -> int:
            n = real_preadv(fd, buffers, offset, *more)
            self.calls, self.nbytes = self.calls + 1, self.nbytes + n
            return n

        def pread(fd: int, n: int, offset: int) -> bytes:
            data = real_pread(fd, n, offset)
            self.calls, self.nbytes = self.calls + 1, self.nbytes + len(data)
            return data

        patch.setattr(os, "preadv", preadv)
        patch.setattr(os, "pread", pread)


def test_no_payload_of_an_artifact_is_read(
    tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Reader(tiny_artifact) as reader:
        data_offset = reader.data_offset
    reads = Reads(monkeypatch)
    assert inspect(tiny_artifact, "--tensors", "--strict").exit_code == 0
    assert 0 < reads.nbytes <= data_offset + 32  # and what kind of file it is
    assert reads.calls < 10


def test_no_payload_of_a_checkpoint_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = Reads(monkeypatch)
    assert inspect(TINY, "--tensors").exit_code == 0
    headers = 0
    for shard in TINY.glob("*.safetensors"):
        with shard.open("rb") as file:
            headers += 8 + int.from_bytes(file.read(8), "little")
    texts = sum(path.stat().st_size for path in TINY.glob("*.json"))
    assert headers <= reads.nbytes <= headers + texts


def test_a_hole_of_terabytes_is_inspected_in_no_time(tiny_artifact: Path, tmp_path: Path) -> None:
    """The file's length costs nothing: only the front is looked at."""
    copy = tmp_path / "t.hfq"
    shutil.copy(tiny_artifact, copy)
    os.truncate(copy, 4 << 40)
    result = inspect(copy)
    assert result.exit_code == 0
    assert "bytes follow the last payload" in result.stderr


@pytest.fixture(scope="module")
def large_cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large")
    script = ROOT / "tests" / "data" / "cases" / "make_fixtures.py"
    subprocess.run([sys.executable, str(script), str(folder), "--large"], check=True)
    return folder


@pytest.mark.slow
def test_c24_a_hundred_thousand_tensors(large_cases: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls grow with the shards, bytes with the headers: C24 of the case files."""
    reads = Reads(monkeypatch)
    found = document(large_cases / "c24_100k")
    assert (found["tensors"], found["shards"], found["bytes"]) == (100_000, 20, 100_000)
    assert reads.calls < 100
    monkeypatch.undo()
    result = inspect(large_cases / "c24_100k", "--tensors")
    assert result.stdout.count("\n") > 100_000


@pytest.mark.slow
def test_c24_a_sparse_shard_of_4_gib(large_cases: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = Reads(monkeypatch)
    found = document(large_cases / "c24_sparse.safetensors")
    assert found["bytes"] == 4_831_838_208
    assert reads.nbytes < 1_000_000


@pytest.mark.slow
def test_c01_a_header_of_two_million_tensors_is_no_damage(large_cases: Path) -> None:
    """It opens, or a documented limit is named; it is never called corrupt."""
    result = inspect(large_cases / "c01_header_2M.safetensors")
    if result.exit_code:
        assert "at most" in result.stderr
        assert "damaged" not in result.stderr
    else:
        assert "2,000,000 tensors" in result.stdout
