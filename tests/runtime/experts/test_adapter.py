"""The file of an expert predictor: both versions, its ranks, and every way that it can be wrong."""

from __future__ import annotations

import dataclasses
import struct
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from ds4q.artifact.metadata import canonical
from ds4q.runtime.config import ModelConfig, parse_config
from ds4q.runtime.errors import AdapterError
from ds4q.runtime.experts.adapter import (
    NORMALISATION,
    STATE,
    TARGET,
    About,
    Adapter,
    Entry,
    predict,
    read_adapter,
)
from ds4q.runtime.experts.header import Identity
from tests.checks import check_refused, same_bits
from tests.runtime.artifacts import DATA, config_of

ABOUT = About("ab" * 16, STATE, TARGET, NORMALISATION, 0.001, 7, ("cd" * 16,))
D, E, RANK = 6, 5, 3


def made(layers: tuple[int, ...] = (0, 2), d: int = D, about: About | None = ABOUT) -> Adapter:
    rng = np.random.default_rng(7)

    def part(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float16).astype(np.float32)

    return Adapter({n: Entry(part(RANK, d), part(E, RANK), part(E)) for n in layers}, about)


def zeros(d: int, e: int, rank: int) -> Entry:
    return Entry(*(np.zeros(shape, np.float32) for shape in ((rank, d), (e, rank), e)))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "m.adapter"
    path.write_bytes(made().encode())
    return path


def sealed(body: bytes) -> bytes:
    return body + xxhash.xxh3_128(body).digest()


def test_what_is_written_is_read_again(path: Path) -> None:
    adapter, expected = read_adapter(path), made()
    assert adapter.about == ABOUT
    assert (adapter.hidden, adapter.experts, adapter.rank) == (D, E, RANK)
    assert list(adapter.entries) == [0, 2]
    for layer, entry in expected.entries.items():
        for found, wanted in zip(adapter.entries[layer], entry, strict=True):
            same_bits(found, wanted)


def test_the_layout_is_the_one_that_is_told(path: Path) -> None:
    raw = path.read_bytes()
    assert raw[:8] == b"HFADPT\0\0"
    assert struct.unpack_from("<5I", raw, 8) == (3, 2, D, E, RANK)
    about = canonical(dataclasses.asdict(ABOUT))
    assert raw[28:].startswith(struct.pack("<I", len(about)) + about)
    at = 32 + len(about)
    entry = made().entries[0]
    assert struct.unpack_from("<I", raw, at) == (0,)
    a = np.frombuffer(raw, "<f2", RANK * D, at + 4).reshape(RANK, D)
    same_bits(a.astype(np.float32), entry.a)
    b = np.frombuffer(raw, "<f2", E * RANK, at + 4 + 2 * RANK * D).reshape(E, RANK)
    same_bits(b.astype(np.float32), entry.b)
    assert len(raw) == at + 2 * (4 + 2 * RANK * (D + E) + 4 * E) + 16


def version_1(entries: dict[int, Entry]) -> bytes:
    raw = struct.pack("<8s5I", b"HFADPT\0\0", 1, len(entries), D, E, RANK)
    for layer, (a, b, _) in entries.items():
        raw += struct.pack("<I", layer)
        raw += a.astype("<f2").tobytes() + b.astype("<f2").tobytes()
    return raw


def test_version_1_is_read_and_names_no_model(path: Path) -> None:
    entries = made().entries
    path.write_bytes(version_1(entries))
    adapter = read_adapter(path)
    assert adapter.about is None
    same_bits(adapter.entries[2].a, entries[2].a)
    same_bits(adapter.entries[2].b, entries[2].b)
    assert not adapter.entries[2].offset.any()
    check_refused(AdapterError, lambda: path.write_bytes(adapter.encode()), path=path)


def test_a_published_entry_has_the_published_size() -> None:
    adapter = Adapter({2: zeros(4096, 256, 128)}, None)
    assert 4 + sum(2 * part.size for part in adapter.entries[2][:2]) == 1_114_116


def check_close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_prediction_and_lower_ranks() -> None:
    adapter = made()
    x = np.random.default_rng(1).standard_normal((4, D)).astype(np.float32)
    a, b, offset = adapter.entries[2]
    check_close(adapter.predict(2, x), x @ (b @ a).T + offset)
    low = adapter.truncated(2)
    assert low.rank == 2
    check_close(low.predict(2, x), x @ (b[:, :2] @ a[:2]).T + offset)
    for rank in (0, RANK + 1):
        says = ["1 to 3", str(rank)]
        check_refused(AdapterError, partial(adapter.truncated, rank), says=says)


@pytest.mark.parametrize("rank", [1, 2, RANK])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_both_ways_to_predict_agree(rank: int, tokens: int) -> None:
    a, b, offset = made().truncated(rank).entries[0]
    x = np.random.default_rng(2).standard_normal((tokens, D)).astype(np.float32)
    found = (predict.fast(x, a.T, b.T, offset), predict.reference(x, a.T, b.T, offset))
    assert found[0].shape == (tokens, E)
    # each sums at most D + rank products, in another order
    bound = (D + rank) * np.finfo(np.float32).eps * (np.abs(x) @ np.abs(b @ a).T + 9)
    assert (np.abs(found[0] - found[1]) <= bound).all()


def test_a_file_cut_short_anywhere_is_one_error(path: Path) -> None:
    for raw in (path.read_bytes(), version_1(made().entries)):
        for length in range(len(raw)):
            path.write_bytes(raw[:length])
            check_refused(AdapterError, lambda: read_adapter(path), path=path)
        path.write_bytes(raw + b"\0")
        check_refused(AdapterError, lambda: read_adapter(path), path=path, says=["follow the end"])


@pytest.mark.parametrize("place", range(4))
def test_forged_counts_are_refused_before_anything_is_allocated(path: Path, place: int) -> None:
    raw = bytearray(path.read_bytes())
    struct.pack_into("<I", raw, 12 + 4 * place, 0xFFFFFFFF)
    path.write_bytes(raw)
    tracemalloc.start()
    try:
        check_refused(AdapterError, lambda: read_adapter(path), path=path, says=["cut short"])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_any_other_byte_is_noticed(path: Path) -> None:
    raw = path.read_bytes()
    for at in range(len(raw)):
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 0x41]) + raw[at + 1 :])
        check_refused(AdapterError, lambda: read_adapter(path), path=path)


def forged(change: Callable[[bytearray], object]) -> Callable[[bytes], bytes]:
    """Changes a file and seals it again."""

    def apply(raw: bytes) -> bytes:
        body = bytearray(raw[:-16])
        change(body)
        return sealed(bytes(body))

    return apply


def entries_at(raw: bytearray) -> int:
    return 32 + int(struct.unpack_from("<I", raw, 28)[0])


WRONG: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "magic": (lambda raw: b"GGUF" + raw[4:], "not an expert predictor"),
    "empty": (lambda raw: b"", "not an expert predictor"),
    "version": (forged(lambda b: struct.pack_into("<I", b, 8, 4)), "expected 1 to 3, found 4"),
    "zero rank": (forged(lambda b: struct.pack_into("<I", b, 24, 0)), "a count of zero"),
    "no entries": (forged(lambda b: struct.pack_into("<I", b, 12, 0)), "a count of zero"),
    "description": (forged(lambda b: b.__setitem__(32, 0)), "description cannot be read"),
    "length": (forged(lambda b: struct.pack_into("<I", b, 28, 1 << 30)), "out of bounds"),
    "layers": (
        forged(lambda b: struct.pack_into("<I", b, entries_at(b), 2)),
        "source layers do not rise",
    ),
    "infinite": (
        forged(lambda b: struct.pack_into("<e", b, entries_at(b) + 4, float("inf"))),
        "not finite",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_said(path: Path, what: str) -> None:
    change, says = WRONG[what]
    path.write_bytes(change(path.read_bytes()))
    check_refused(AdapterError, lambda: read_adapter(path), path=path, says=[says])


def test_a_predictor_for_another_state_is_refused(path: Path) -> None:
    path.write_bytes(made(about=dataclasses.replace(ABOUT, state="block-input")).encode())
    check_refused(AdapterError, lambda: read_adapter(path), path=path, says=["another state"])


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return parse_config(config_of(DATA / "ds4-tiny"))


def fits(d: int = 256, e: int = 16, about: About | None = ABOUT) -> Adapter:
    return Adapter({0: zeros(d, e, 2)}, about, "m.adapter")


OTHER = Identity("0" * 32, "s" * 64)  # another packing of the checkpoint


def test_a_predictor_fits_every_artifact_of_its_checkpoint(config: ModelConfig) -> None:
    ours = dataclasses.replace(ABOUT, source=OTHER.source)
    assert fits(about=ours).check_model(config, OTHER) == []
    assert fits().check_model(config, Identity(ABOUT.artifact, "")) == []
    assert fits().check_model(config, Identity(ABOUT.artifact, OTHER.source)) == []
    strange = dataclasses.replace(ABOUT, source="t" * 64)
    check_refused(
        AdapterError,
        lambda: fits(about=strange).check_model(config, OTHER),
        path="m.adapter",
        says=["another model, of the same hidden size and expert count", "s" * 64, "t" * 64],
    )
    for other in (fits(d=128, about=ours), fits(e=32, about=ours)):
        check_refused(
            AdapterError,
            partial(other.check_model, config, OTHER),  # sizes tell more than digests
            path="m.adapter",
            says=["another model", "hidden size 256, 16 experts"],
        )


def test_earlier_versions_are_taken_with_a_warning(config: ModelConfig, path: Path) -> None:
    (note,) = fits(about=None).check_model(config, OTHER)
    assert "version 1 does not say" in note
    (note,) = fits().check_model(config, OTHER)
    assert "another artifact, and names no checkpoint" in note
    raw = made().encode()
    assert struct.unpack_from("<I", raw, 8) == (3,)
    about = {k: v for k, v in dataclasses.asdict(ABOUT).items() if k != "source"}
    text = canonical(about)
    (length,) = struct.unpack_from("<I", raw, 28)
    body = raw[:8] + struct.pack("<I", 2) + raw[12:28]
    body += struct.pack("<I", len(text)) + text + raw[32 + length : -16]
    path.write_bytes(body + xxhash.xxh3_128(body).digest())
    assert read_adapter(path).about == ABOUT
    path.write_bytes(
        (raw := raw[:8] + struct.pack("<I", 2) + raw[12:-16]) + xxhash.xxh3_128(raw).digest()
    )
    check_refused(AdapterError, lambda: read_adapter(path), says=["description cannot be read"])
