"""Damaged files: whatever the damage, the reader refuses cleanly or reads what is there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4q.artifact.errors import ArtifactError
from ds4q.artifact.hfq import Reader, TensorEntry
from tests.artifact.build import TWO, File, Tensor, sealed

TENSORS = (*TWO, Tensor("c.weight", 21, (2, 32), 32, bytes(66)))
PLAIN = File(TENSORS).data()
VERSION_2 = File(TENSORS, version=2).data()
SEALED = sealed(TENSORS)
FRONT_BYTES = len(SEALED.split(b"c.weight")[0]) + 40  # where the damage is interesting

Parse = tuple[object, bytes, tuple[TensorEntry, ...]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file that every example overwrites."""
    return tmp_path_factory.mktemp("mutation") / "x.hfq"


def parse(path: Path, data: bytes) -> Parse | None:
    """What the reader makes of ``data``; None where it refuses with a clean error."""
    path.write_bytes(data)
    try:
        reader = Reader(path)
    except ArtifactError as error:
        text = str(error)
        assert text.isprintable()
        assert text.startswith(f"{path}: ")
        return None
    with reader:
        for entry in reader.tensors.values():
            assert len(reader.read(entry.name)) == entry.nbytes
            assert entry.offset + entry.nbytes <= len(data)
        return (
            (reader.version, reader.arch_id, reader.metadata_raw),
            reader.header_raw,
            tuple(reader.tensors.values()),
        )


@dataclass(frozen=True)
class Damage:
    """Replace ``length`` bytes at ``at`` by ``new``."""

    at: int
    length: int
    new: bytes

    def applied(self, data: bytes) -> bytes:
        at = self.at % (len(data) + 1)
        return data[:at] + self.new + data[at + self.length :]


NEAR = st.integers(0, FRONT_BYTES) | st.integers(0, len(PLAIN))
SOUP = st.sampled_from([b"\0", b"\xff", b'"', b"{", b"}", b"\\", b"\xc3", b"HFQM", b"\xff" * 8])
DAMAGES = st.builds(
    Damage,
    NEAR,
    st.integers(0, 9) | st.integers(0, 5000),
    st.binary(max_size=9) | SOUP,
)


@settings(max_examples=400)
@given(st.sampled_from([PLAIN, VERSION_2]), st.lists(DAMAGES, min_size=1, max_size=3))
def test_damaged_file_is_refused_or_read(path: Path, data: bytes, damages: list[Damage]) -> None:
    for damage in damages:
        data = damage.applied(data)
    parse(path, data)


@settings(max_examples=400)
@given(st.lists(DAMAGES, min_size=1, max_size=2))
def test_damaged_sealed_file_is_refused_or_means_the_same(
    path: Path, damages: list[Damage]
) -> None:
    data = SEALED
    for damage in damages:
        data = damage.applied(data)
    found = parse(path, data)
    assert found is None or found == parse(path, SEALED)


@settings(max_examples=200)
@given(st.binary(max_size=200), st.booleans())
def test_noise_is_refused(path: Path, noise: bytes, with_header: bool) -> None:
    head = b"HFQM" + (1).to_bytes(4, "little") if with_header else b""
    assert parse(path, head + noise) is None


@pytest.mark.parametrize("data", [PLAIN, VERSION_2, SEALED], ids=["v1", "v2", "sealed"])
def test_every_cut_is_refused(path: Path, data: bytes) -> None:
    front = range(0, 400)
    for length in (*front, *range(400, len(data), 97), len(data) - 1):
        assert parse(path, data[:length]) is None


@pytest.mark.parametrize("data", [PLAIN, VERSION_2], ids=["v1", "v2"])
def test_every_byte_of_the_front_set_to_its_extremes(path: Path, data: bytes) -> None:
    end = data.index(b"c.weight") + 40
    for at in range(end):
        for value in (0x00, 0x01, 0x7F, 0x80, 0xFF):
            parse(path, data[:at] + bytes([value]) + data[at + 1 :])


def test_undamaged_files_are_read(path: Path) -> None:
    for data in (PLAIN, VERSION_2, SEALED):
        found = parse(path, data)
        assert found is not None
        assert len(found[2]) == 3
