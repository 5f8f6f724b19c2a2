"""One changed byte anywhere in an artifact: who notices, and where it is said to be."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest
from click.testing import CliRunner

from ds4q import api
from ds4q.artifact.errors import ArtifactError
from ds4q.artifact.hfq import Reader, TensorEntry
from ds4q.artifact.receipt import receipt_path
from ds4q.artifact.report import Check, Failure, Report
from ds4q.artifact.types import TYPES, matrix_shape
from ds4q.cli import main
from tests.quantize import models
from tests.quantize.builders import TINY
from tests.quantize.damage import flip, new_receipt

W2 = "layers.0.ffn.experts.2.w2.weight"


@pytest.fixture
def tiny(tiny_artifact: Path, tmp_path: Path) -> Path:
    """A copy of ds4-tiny and its receipt that may be written to."""
    for path in (tiny_artifact, receipt_path(tiny_artifact)):
        shutil.copy(path, tmp_path / path.name)
    return tmp_path / tiny_artifact.name


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.mini(tmp_path_factory.mktemp("mini"))


@pytest.fixture(params=["fp4", "fp4-q8"])
def small(request: pytest.FixtureRequest, source: Path, tmp_path: Path) -> Path:
    """An artifact of a few tensors; the two recipes have every type between them."""
    models.run(source, tmp_path / "x.hfq", recipe=request.param)
    return tmp_path / "x.hfq"


def front_end(path: Path) -> tuple[int, int]:
    """Where the index ends, and where the payload begins."""
    with Reader(path) as reader:
        return 32 + len(reader.metadata_raw) + len(reader.index_raw), reader.data_offset


def entries_of(path: Path) -> list[TensorEntry]:
    with Reader(path) as reader:
        return list(reader.tensors.values())


def failures(report: Report, name: str) -> list[Failure]:
    return next(check for check in report.checks if check.name == name).failures


def failed(report: Report) -> list[str]:
    assert report.ok == all(check.ok for check in report.checks)
    return [check.name for check in report.checks if not check.ok]


# ---------------------------------------------------------------- header, metadata, index


class Front:
    """The front of an artifact in a sparse file of its length, to be damaged byte by byte."""

    def __init__(self, artifact: Path, folder: Path) -> None:
        self.index_end, data_offset = front_end(artifact)
        with artifact.open("rb") as file:
            self.data = file.read(data_offset)
        self.path = folder / "front.hfq"
        self.path.write_bytes(self.data)
        with self.path.open("r+b") as file:
            file.truncate(artifact.stat().st_size)
        assert self.refusal() == "opened"

    def check_refused(self, places: Iterable[int]) -> int:
        """Every changed byte at ``places`` must be refused; how many there were."""
        rng = random.Random(1)
        count = 0
        with self.path.open("r+b", buffering=0) as file:
            for at in places:
                changed = self.data[at] ^ rng.randrange(1, 256)
                file.seek(at)
                file.write(bytes([changed]))
                said = self.refusal()
                assert said.startswith(f"{self.path}: "), f"byte {at} as {changed:#x}: {said}"
                assert said.isprintable()
                file.seek(at)
                file.write(self.data[at : at + 1])
                count += 1
        assert self.refusal() == "opened"
        return count

    def refusal(self) -> str:
        """What the reader says; ``opened`` where it finds nothing wrong."""
        try:
            Reader(self.path).close()
        except ArtifactError as error:
            return str(error)
        return "opened"


def test_changed_bytes_of_header_metadata_and_index_are_refused(
    tiny_artifact: Path, tmp_path: Path
) -> None:
    """All of the header and of ds4q's own metadata, both ends of the index, a stride between."""
    front = Front(tiny_artifact, tmp_path)
    ours = front.data.index(b'"ds4q":')
    with Reader(tiny_artifact) as reader:
        index = front.index_end - len(reader.index_raw)
    places = {*range(36), *range(ours - 4, ours + 300), *range(index - 3, index + 100)}
    places |= {*range(front.index_end - 60, front.index_end), *range(0, front.index_end, 29)}
    assert front.check_refused(sorted(places)) > 1200


@pytest.mark.slow
def test_each_changed_byte_of_header_metadata_and_index_is_refused(
    tiny_artifact: Path, tmp_path: Path
) -> None:
    front = Front(tiny_artifact, tmp_path)
    assert front.check_refused(range(front.index_end)) == front.index_end > 20_000


def check_commands_refuse(path: Path) -> None:
    """verify, inspect --strict and run: exit status 1 and one line that names the file."""
    for words in (["verify"], ["inspect", "--strict"], ["run", "-p", "x"]):
        done = CliRunner().invoke(main, [words[0], str(path), *words[1:]])
        assert (done.exit_code, type(done.exception)) == (1, SystemExit), (words, done)
        lines = done.stderr.splitlines()
        assert len(lines) == 1, (words, done.stderr)
        assert words[0] == "verify" or str(path) in lines[0]


@pytest.mark.parametrize("part", ["magic", "version", "metadata", "index"])
def test_the_commands_refuse_a_changed_front_without_a_receipt(part: str, tiny: Path) -> None:
    receipt_path(tiny).unlink()
    index_end, _ = front_end(tiny)
    flip(tiny, {"magic": 0, "version": 4, "metadata": 700, "index": index_end - 5}[part], 0x20)
    check_commands_refuse(tiny)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_the_commands_refuse_any_changed_front(seed: int, tiny: Path) -> None:
    receipt_path(tiny).unlink()
    rng = random.Random(seed)
    flip(tiny, rng.randrange(front_end(tiny)[0]), rng.randrange(1, 256))
    check_commands_refuse(tiny)


@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_padding_is_part_of_the_file(where: str, tiny: Path) -> None:
    index_end, data_offset = front_end(tiny)
    assert data_offset - index_end > 2
    at = {"first": index_end, "middle": (index_end + data_offset) // 2, "last": data_offset - 1}
    flip(tiny, at[where])
    assert failed(api.verify(tiny)) == ["structure"]
    receipt_path(tiny).unlink()
    (failure,) = failures(api.verify(tiny), "structure")
    assert "padding" in failure.message


# ---------------------------------------------------------------- payload


def place_of(entry: TensorEntry, at: int) -> tuple[int, int | None, slice]:
    """Row, block (None in a row header) and file range of the unit that holds byte ``at``."""
    kind = TYPES[entry.type_id]
    rows, k = matrix_shape(entry.shape)
    header = kind.row_header_bytes
    if header:
        row, rest = divmod(at - entry.offset, entry.nbytes // rows)
        start = entry.offset + row * (entry.nbytes // rows)
        if rest < header:
            return row, None, slice(start, start + header)
        block = (rest - header) // kind.block_bytes
        start += header + block * kind.block_bytes
        return row, block, slice(start, start + kind.block_bytes)
    unit = (at - entry.offset) // kind.block_bytes
    row, column = divmod(unit * kind.block, k)
    start = entry.offset + unit * kind.block_bytes
    return row, column // kind.block, slice(start, start + kind.block_bytes)


def check_placed(failure: Failure, entry: TensorEntry, at: int, was: bytes, now: bytes) -> None:
    """``failure`` names the very unit, with its bytes before and after."""
    row, block, unit = place_of(entry, at)
    assert failure.tensor == entry.name
    assert (failure.row, failure.block) == (row, block), entry.name
    assert (failure.expected, failure.found) == (was[unit].hex(), now[unit].hex())
    parts = entry.name.split(".")
    layer = int(parts[1]) if parts[0] in ("layers", "mtp") else None
    assert failure.layer == layer
    routed = "experts" in parts
    assert failure.expert == (int(parts[parts.index("experts") + 1]) if routed else None)
    if routed:
        assert failure.projection == parts[-2]


def spread(entries: list[TensorEntry], rng: random.Random) -> dict[str, tuple[TensorEntry, int]]:
    """One byte in each of 80 tensors, every type among them; by name, in file order."""
    shuffled = rng.sample(entries, len(entries))
    first_of_type = {entry.type_id: entry for entry in shuffled}
    chosen = {entry.name: entry for entry in [*first_of_type.values(), *shuffled[:80]]}
    return {n: (e, e.offset + rng.randrange(e.nbytes)) for n, e in sorted(chosen.items())}


@pytest.mark.parametrize("recipe", ["fp4", "fp4-q8", "fp4-f16"])
def test_eighty_changed_bytes_of_ds4_tiny_are_each_found_at_their_place(
    recipe: str, tmp_path: Path
) -> None:
    path = tmp_path / "t.hfq"
    models.run(TINY, path, recipe=recipe, allow_partial=False, threads=2)
    was = path.read_bytes()
    entries = entries_of(path)
    rng = random.Random(recipe)
    changed = spread(entries, rng)
    for _, at in changed.values():
        flip(path, at, 1 << rng.randrange(8))
    now = path.read_bytes()
    report = api.verify(path, source=TINY, threads=2)
    found = failures(report, "source")
    assert [failure.tensor for failure in found] == list(changed)
    for failure in found:
        entry, at = changed[str(failure.tensor)]
        check_placed(failure, entry, at, was, now)
    named = {failure.tensor for failure in failures(report, "receipt")}
    assert named == {*changed, None}  # each tensor, and the SHA-256 of the file
    types = {TYPES[entry.type_id].name for entry, _ in changed.values()}
    assert types == {TYPES[entry.type_id].name for entry in entries}


@pytest.mark.parametrize("seed", range(24))
def test_a_changed_byte_alone_is_found(seed: int, small: Path, source: Path) -> None:
    """With the receipt its tensor is named, with the source the place too."""
    was = small.read_bytes()
    rng = random.Random(seed)
    entry = rng.choice(entries_of(small))
    at = entry.offset + rng.randrange(entry.nbytes)
    flip(small, at, 1 << rng.randrange(8))
    report = api.verify(small, source=source)
    digest, whole = failures(report, "receipt")
    assert (digest.tensor, whole.tensor) == (entry.name, None)
    assert "SHA-256" in whole.message
    (failure,) = failures(report, "source")
    check_placed(failure, entry, at, was, small.read_bytes())
    assert {"receipt", "source"} <= set(failed(report)) <= {"payload", "receipt", "source"}
    receipt_path(small).unlink()
    assert "source" in failed(api.verify(small, source=source))


@pytest.mark.parametrize("small", ["fp4"], indirect=True)
def test_each_byte_of_an_expert_is_found(small: Path, source: Path) -> None:
    """Headers, scales and codes of one matrix, byte by byte, and the file is sound again after."""
    was = small.read_bytes()
    (entry,) = (entry for entry in entries_of(small) if entry.name == W2)
    assert entry.nbytes == 200
    for at in range(entry.offset, entry.offset + entry.nbytes):
        flip(small, at, 0x11)
        (failure,) = failures(api.verify(small, source=source), "source")
        check_placed(failure, entry, at, was, small.read_bytes())
        flip(small, at, 0x11)
    assert failed(api.verify(small, source=source)) == []


@pytest.mark.parametrize("seed", range(6))
def test_sealed_again_the_source_still_names_the_place(
    seed: int, small: Path, source: Path
) -> None:
    """The receipt was made to agree, so only the source can tell."""
    was = small.read_bytes()
    rng = random.Random(seed)
    entry = rng.choice([e for e in entries_of(small) if e.nbytes > 300])
    at = entry.offset + 20 + rng.randrange(entry.nbytes - 20)
    if TYPES[entry.type_id].name == "HFP4G32":
        at = entry.offset + 17 + rng.randrange(16)  # codes: any byte is legal
    flip(small, at, 1)
    new_receipt(small)
    assert failed(api.verify(small)) == []
    report = api.verify(small, source=source)
    assert failed(report) == ["source"]
    (failure,) = failures(report, "source")
    check_placed(failure, entry, at, was, small.read_bytes())


def test_a_swap_of_two_experts_in_ds4_tiny(tiny: Path) -> None:
    """Sealed again: every byte is one of the file's own, and legal."""
    names = [f"layers.2.ffn.experts.{n}.w1.weight" for n in (3, 7)]
    with Reader(tiny) as reader:
        a, b = (reader.entry(name) for name in names)
        payloads = [reader.read(name).tobytes() for name in names]
    with tiny.open("r+b") as file:
        for entry, payload in ((a, payloads[1]), (b, payloads[0])):
            file.seek(entry.offset)
            file.write(payload)
    new_receipt(tiny)
    report = api.verify(tiny, source=TINY, threads=2)
    assert failed(report) == ["source"]
    found = failures(report, "source")
    assert [(f.layer, f.expert, f.projection) for f in found] == [(2, 3, "w1"), (2, 7, "w1")]


@pytest.mark.parametrize("small", ["fp4"], indirect=True)
@pytest.mark.parametrize(
    ("offset", "value", "says"),
    [
        (50 + 16 + 17, 0xFF, "NaN scale byte in row 1, block 1"),
        (100 + 1, 0x00, "row header in row 2"),
        (4, 0x03, "row header in row 0"),
        (150 + 6, 0x01, "row header in row 3"),
        (150 + 15, 0x01, "row header in row 3"),
    ],
)
def test_illegal_bytes_need_neither_receipt_nor_source(
    offset: int, value: int, says: str, small: Path
) -> None:
    receipt_path(small).unlink()
    (entry,) = (entry for entry in entries_of(small) if entry.name == W2)
    was = small.read_bytes()[entry.offset + offset]
    assert was != value
    flip(small, entry.offset + offset, was ^ value)
    report = api.verify(small)
    assert failed(report) == ["payload"]
    (failure,) = failures(report, "payload")
    assert failure.tensor == W2
    assert says in failure.message


@pytest.mark.parametrize("small", ["fp4"], indirect=True)
@pytest.mark.parametrize("name", ["layers.0.attn_norm.weight", "layers.0.hc_attn_base"])
def test_infinity_in_a_payload_is_illegal(name: str, small: Path) -> None:
    receipt_path(small).unlink()
    (entry,) = (entry for entry in entries_of(small) if entry.name == name)
    value = b"\x80\x7f" if TYPES[entry.type_id].name == "BF16" else b"\x00\x00\x80\x7f"
    with small.open("r+b") as file:
        file.seek(entry.offset + 3 * len(value))
        file.write(value)
    (failure,) = failures(api.verify(small), "payload")
    assert (failure.tensor, failure.found) == (name, "element 3")


# ---------------------------------------------------------------- length and receipt


def test_an_appended_byte(tiny: Path) -> None:
    with tiny.open("ab") as file:
        file.write(b"\0")
    assert failed(api.verify(tiny)) == ["structure"]
    receipt_path(tiny).unlink()
    (failure,) = failures(api.verify(tiny), "structure")
    assert "1 bytes follow the last payload" in failure.message


@pytest.mark.parametrize("cut", [1, 1000, 14_000_000, 14_870_000])
def test_a_cut_file(cut: int, tiny: Path) -> None:
    with tiny.open("r+b") as file:
        file.truncate(tiny.stat().st_size - cut)
    report = api.verify(tiny)
    assert failed(report) == ["structure"]
    (failure,) = failures(report, "structure")
    assert "past the end" in failure.message or "too short" in failure.message


def receipt_check(path: Path) -> Check | None:
    return next((check for check in api.verify(path).checks if check.name == "receipt"), None)


def test_a_renamed_file_finds_its_receipt(small: Path) -> None:
    moved = small.rename(small.with_name("renamed.hfq"))
    check = receipt_check(moved)
    assert check is not None
    assert check.ok
    assert check.figures["file"] == "x.hfq.receipt"
    entry = entries_of(moved)[0]
    flip(moved, entry.offset)
    check = receipt_check(moved)  # and the damage is not taken for another file
    assert check is not None
    assert check.failures[0].tensor == entry.name


def test_the_receipt_of_another_file(small: Path, tmp_path: Path) -> None:
    other = models.mini(tmp_path / "other", seed=3)
    (tmp_path / "o").mkdir()
    models.run(other, tmp_path / "o" / "x.hfq")
    shutil.copy(tmp_path / "o" / "x.hfq.receipt", receipt_path(small))
    check = receipt_check(small)
    assert check is not None
    assert not check.ok
    assert any("SHA-256" in failure.message for failure in check.failures)


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "text"])
def test_a_broken_receipt_is_a_failed_check(damage: str, small: Path) -> None:
    path = receipt_path(small)
    raw = path.read_bytes()
    path.write_bytes(
        {
            "flipped": raw[:90] + bytes([raw[90] ^ 1]) + raw[91:],
            "cut": raw[:-9],
            "empty": b"",
            "text": b"{}",
        }[damage]
    )
    report = api.verify(small)
    assert failed(report) == ["receipt"]
    assert str(path) in failures(report, "receipt")[0].message


def test_without_a_receipt_there_is_no_receipt_check(small: Path) -> None:
    receipt_path(small).unlink()
    report = api.verify(small)
    assert report.ok
    assert [check.name for check in report.checks] == ["structure", "inventory", "payload"]
    assert report.checks[-1].notes == ["no receipt: digests not checked"]
