"""The reader's rulings: each attack is refused by its own class, and its legal twin opens.

The names are those of the rulings in ``artifact/FORMAT.md``; ``test_format.py`` holds the two
lists equal.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from ds4q.artifact import hfq
from ds4q.artifact.errors import (
    ArtifactError,
    ChangedError,
    DuplicateTensorError,
    HeaderError,
    IndexFieldError,
    MagicError,
    MetadataError,
    PayloadBoundsError,
    PayloadSizeError,
    TensorTypeError,
    TruncatedError,
    UnknownTensorError,
    VersionError,
)
from ds4q.artifact.formats import codec_for
from ds4q.artifact.hfq import Reader
from ds4q.artifact.types import check_entry
from tests.artifact.build import TWO, File, Tensor
from tests.checks import check_refused

NAN_IN_METADATA = b'{"x":NaN}'
DEEP = 256
LAST = TWO[-1]


def nested(levels: int) -> bytes:
    return b'{"x":' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}"


def use(reader: Reader) -> None:
    """What decode and verify do with every entry before they touch its payload."""
    for entry in reader.tensors.values():
        codec_for(entry.type_id, path=reader.path, tensor=entry.name)
        check_entry(
            entry.type_id,
            entry.shape,
            entry.group_size,
            entry.nbytes,
            path=reader.path,
            tensor=entry.name,
        )
        reader.read(entry.name)


@dataclass(frozen=True)
class Ruling:
    """``attack`` must raise ``error`` (at open, or where ``late`` when it is used).

    ``twin`` differs in as little as possible and must open, with ``warns`` as its only warnings.
    """

    name: str
    attack: File | bytes
    error: type[ArtifactError]
    twin: File | bytes
    says: tuple[str, ...] = ()
    tensor: str | None = None
    late: bool = False
    warns: tuple[str, ...] = ()
    variants: tuple[File | bytes, ...] = ()  # further forms of the attack


LEGAL = File()
WHOLE = LEGAL.data()
EMPTY = File(tensors=[])

RULINGS = [
    Ruling(
        "short-file",
        EMPTY.data()[:31],
        TruncatedError,
        EMPTY,
        ("at least 32 bytes", "31"),
        variants=(b"", b"HFQM"),
    ),
    Ruling("wrong-magic", LEGAL.but(magic=b"HFQN"), MagicError, LEGAL, ("HFQN",)),
    Ruling(
        "unfinished-magic",
        LEGAL.but(magic=b"HFQ!", version=2),
        MagicError,
        LEGAL.but(version=2),
        ("unfinished version-2 file",),
    ),
    Ruling(
        "unknown-version",
        LEGAL.but(version=3),
        VersionError,
        LEGAL.but(version=2),
        ("expected 1 or 2, found 3",),
        variants=(LEGAL.but(version=0), LEGAL.but(version=2**32 - 1)),
    ),
    Ruling(
        "metadata-offset-in-header",
        LEGAL.but(metadata_offset=31),
        HeaderError,
        LEGAL.but(metadata_offset=40, gap=bytes(8)),
        ("metadata_offset", "31"),
        warns=("metadata_offset is 40, not 32",),
        variants=(LEGAL.but(metadata_offset=0),),
    ),
    Ruling(
        "metadata-offset-behind-data-offset",
        LEGAL.but(metadata_offset=4096),
        HeaderError,
        LEGAL,
        ("metadata_offset", "4096"),
        variants=(LEGAL.but(metadata_offset=2**64 - 1),),
    ),
    Ruling(
        "data-offset-behind-file",
        EMPTY.but(data_offset=4097, padding=bytes(4047)),
        TruncatedError,
        EMPTY.but(data_offset=4096, padding=bytes(4047)),
        ("4097",),
        variants=(LEGAL.but(data_offset=2**64 - 1, padding=b""),),
    ),
    Ruling(
        "metadata-begins-elsewhere",
        LEGAL.but(metadata=b' {"config":{}}'),
        MetadataError,
        LEGAL.but(metadata=b'{ "config":{}}'),
        ("must begin with '{'",),
        variants=(
            LEGAL.but(metadata=b'\xef\xbb\xbf{"config":{}}'),
            LEGAL.but(metadata=b'[{"config":{}}]'),
            LEGAL.but(metadata=b""),
        ),
    ),
    Ruling(
        "metadata-never-closes",
        LEGAL.but(metadata=b'{"config":{}'),
        MetadataError,
        LEGAL.but(metadata=b'{"config":"}\\"}"}'),
        ("never closes",),
        variants=(LEGAL.but(metadata=b'{"config":"}'),),
    ),
    Ruling(
        "metadata-not-json",
        LEGAL.but(metadata=b"{'config':{}}"),
        MetadataError,
        LEGAL,
        ("not JSON",),
        variants=(LEGAL.but(metadata=b"{[}]}"),),
    ),
    Ruling(
        "duplicate-metadata-key",
        LEGAL.but(metadata=b'{"config":{},"config":{}}'),
        MetadataError,
        LEGAL.but(metadata=b'{"config":{},"Config":{"config":{}}}'),
        ("'config'",),
    ),
    Ruling(
        "metadata-nan",
        LEGAL.but(metadata=NAN_IN_METADATA),
        MetadataError,
        LEGAL.but(metadata=b'{"x":"NaN"}'),
        ("NaN",),
        variants=(LEGAL.but(metadata=b'{"x":-Infinity}'), LEGAL.but(metadata=b'{"x":1e999}')),
    ),
    Ruling(
        "metadata-lone-surrogate",
        LEGAL.but(metadata=b'{"x":"\\ud83d"}'),
        MetadataError,
        LEGAL.but(metadata=b'{"x":"\\ud83d\\ude00"}'),
        ("surrogate",),
    ),
    Ruling(
        "metadata-nested-deeply",
        LEGAL.but(metadata=nested(DEEP + 1)),
        MetadataError,
        LEGAL.but(metadata=nested(DEEP)),
        ("more than 256 levels",),
        variants=(LEGAL.but(metadata=nested(100_000)),),
    ),
    Ruling(
        "metadata-not-utf8",
        LEGAL.but(metadata=b'{"x":"\xc3"}'),
        MetadataError,
        LEGAL.but(metadata=b'{"x":"\xc3\xbc"}'),
        ("not UTF-8", "byte 6"),
    ),
    Ruling(
        "name-not-utf8",
        File([Tensor(b"a\xff")]),
        IndexFieldError,
        File([Tensor(b"a\xc3\xbf")]),
        ("index entry 0 is not UTF-8",),
        variants=(File([Tensor(b"\xed\xa0\x80")]),),
    ),
    Ruling(
        "index-count-differs",
        LEGAL.but(index_count=1),
        IndexFieldError,
        LEGAL,
        ("expected 2, found 1",),
        variants=(LEGAL.but(count=3), LEGAL.but(index_count=2**32 - 1)),
    ),
    Ruling(
        "count-without-room",
        LEGAL.but(count=10**6, index_count=10**6),
        IndexFieldError,
        LEGAL,
        ("more tensors than the index has room for", "1000000"),
        variants=(LEGAL.but(version=2, count=10**6, index_count=10**6),),
    ),
    Ruling(
        "index-runs-into-payload",
        LEGAL.but(data_offset=100, padding=b""),
        IndexFieldError,
        LEGAL.but(data_offset=32 + 13 + 4 + 28 + 32, padding=b""),
        ("entry 1 runs past data_offset",),
        variants=(
            LEGAL.but(data_offset=32 + 13 + 2, padding=b""),
            File([Tensor(name_length=65535)]),
            LEGAL.but(version=2, data_offset=32 + 13 + 4 + 28 + 32, padding=b""),
        ),
    ),
    Ruling(
        "payload-past-end",
        WHOLE[:-1],
        TruncatedError,
        WHOLE,
        ("past the end of the file", f"{len(WHOLE)} bytes", f"{len(WHOLE) - 1}"),
        tensor=str(LAST.name),
        variants=(File([Tensor("b.weight", nbytes=2**64 - 1)]),),
    ),
    Ruling(
        "v2-offset-before-payload",
        File([Tensor(offset=127)], version=2),
        PayloadBoundsError,
        File([Tensor(offset=128)], version=2),
        ("offset of at least 4096", "4064"),
        tensor="a.weight",
        variants=(File([Tensor(offset=0)], version=2),),
    ),
    Ruling(
        "v2-offset-past-end",
        File([Tensor(offset=129)], version=2),
        TruncatedError,
        File([Tensor(offset=129)], version=2, tail=bytes(32)),
        ("past the end",),
        tensor="a.weight",
        variants=(File([Tensor(offset=2**64 - 1)], version=2),),
    ),
    Ruling(
        "v2-overlap",
        File([Tensor("a"), Tensor("b", payload=bytes(8), offset=128)], version=2),
        PayloadBoundsError,
        File([Tensor("a", offset=129), Tensor("b", payload=bytes(8), offset=128)], version=2),
        ("overlaps that of a",),
        tensor="b",
    ),
    Ruling(
        "duplicate-tensor",
        File([Tensor("a"), Tensor("b"), Tensor("a", 2, (2,))]),
        DuplicateTensorError,
        File([Tensor("a"), Tensor("b"), Tensor("A", 2, (2,))]),
        ("entries 0 and 2",),
        tensor="a",
    ),
    Ruling(
        "empty-name",
        File([Tensor("")]),
        IndexFieldError,
        File([Tensor(" ")]),
        ("entry 0 is empty",),
    ),
    Ruling(
        "control-characters-in-name",
        File([Tensor("a\0b")]),
        IndexFieldError,
        File([Tensor("a\u00a0ü b")]),
        ("control characters",),
        variants=(File([Tensor("a\n")]), File([Tensor("\x7f")]), File([Tensor("\x9b")])),
    ),
    Ruling(
        "zero-dim",
        File([Tensor(shape=(4, 0), payload=b"")]),
        IndexFieldError,
        File([Tensor(shape=(4, 1))]),
        ("a dim is 0", "[4, 0]"),
        tensor="a.weight",
    ),
    Ruling(
        "length-differs-from-formula",
        File([Tensor(nbytes=6, payload=bytes(6))]),
        PayloadSizeError,
        File([Tensor()]),
        ("expected 8 bytes, found 6 bytes",),
        tensor="a.weight",
        late=True,
        variants=(
            File([Tensor("a.weight", 21, (2, 64), 32, bytes(99))]),
            File([Tensor("a.weight", 21, (2, 48), 32, bytes(99))]),
        ),
    ),
    Ruling(
        "group-size-differs",
        File([Tensor("a.weight", 21, (2, 64), 256, bytes(100))]),
        IndexFieldError,
        File([Tensor("a.weight", 21, (2, 64), 32, bytes(100))]),
        ("wrong group size for HFP4G32", "expected 32, found 256"),
        tensor="a.weight",
        late=True,
    ),
    Ruling(
        "unknown-type",
        File([Tensor(type_id=99)]),
        TensorTypeError,
        File([Tensor(type_id=16)]),
        ("unknown tensor type 99",),
        tensor="a.weight",
        late=True,
        variants=(File([Tensor(type_id=13, shape=(256,), group_size=256, payload=bytes(136))]),),
    ),
    Ruling(
        "reserved-type",
        File([Tensor(type_id=23)]),
        TensorTypeError,
        File([Tensor(type_id=22, shape=(2,))]),
        ("reserved tensor type 23",),
        tensor="a.weight",
        variants=tuple(File([Tensor(type_id=n)]) for n in (25, 26, 27, 43)),
    ),
    Ruling(
        "lost-own-digests",
        LEGAL.but(metadata=b'{"hipfire_quant_recipe":"ds4q-fp4"}'),
        MetadataError,
        LEGAL.but(metadata=b'{"hipfire_quant_recipe":"mq2lloyd"}'),
        ("lost its 'ds4q' object",),
        variants=(LEGAL.but(metadata=b'{"ds4q":{}}'), LEGAL.but(metadata=b'{"ds4q":1}')),
    ),
]

# Rulings that need more than one file's bytes; each has a test of its own below or elsewhere.
ELSEWHERE = {
    "metadata-too-long": "test_metadata.py::test_metadata_longer_than_the_limit",
    "front-too-long": "test_hfq_rulings.py::test_front_longer_than_the_limit",
    "v2-inside-another-file": "test_hfq_rulings.py::test_version_2_at_an_offset",
    "v2-tail-misplaced": "test_hfq2.py::test_tail_outside_its_place",
    "v2-tail-hash": "test_hfq2.py::test_tail_that_its_hash_denies",
    "v2-quantization-hash": "test_hfq2.py::test_changed_payload_byte",
    "metadata-offset-not-32": "test_hfq_rulings.py::test_unusual_but_legal",
    "data-offset-unaligned": "test_hfq_rulings.py::test_unusual_but_legal",
    "bytes-after-payload": "test_hfq_rulings.py::test_unusual_but_legal",
    "embedded-container": "test_hfq.py::test_second_container_behind_the_first",
    "zero-tensors": "test_hfq_rulings.py::test_unusual_but_legal",
    "scalar": "test_hfq_rulings.py::test_unusual_but_legal",
    "mislabelled-architecture": "test_hfq_rulings.py::test_qwen_metadata_with_another_arch_id",
    "name-lookup": "test_hfq_rulings.py::test_no_prefix_is_guessed",
    "short-read": "test_hfq_rulings.py::test_read_of_a_file_that_shrank",
    "changed-file": "test_hfq_rulings.py::test_file_that_changed",
    "not-a-regular-file": "test_hfq.py::test_folder_and_fifo_are_refused_without_waiting",
    "own-digests": "test_hfq.py::test_every_flipped_bit_of_header_metadata_and_index_is_refused",
}


def put(folder: Path, what: File | bytes) -> Path:
    path = folder / "x.hfq"
    path.write_bytes(what if isinstance(what, bytes) else what.data())
    return path


def opened(path: Path, late: bool) -> Callable[[], None]:
    def run() -> None:
        with Reader(path) as reader:
            if late:
                use(reader)

    return run


@pytest.mark.parametrize("ruling", RULINGS, ids=lambda ruling: ruling.name)
def test_attack_is_refused(ruling: Ruling, tmp_path: Path) -> None:
    path = put(tmp_path, ruling.attack)
    check_refused(
        ruling.error,
        opened(path, ruling.late),
        path=path,
        tensor=ruling.tensor,
        says=ruling.says,
    )


@pytest.mark.parametrize(
    ("ruling", "attack"),
    [
        pytest.param(ruling, attack, id=f"{ruling.name}-{number}")
        for ruling in RULINGS
        for number, attack in enumerate(ruling.variants)
    ],
)
def test_variant_of_the_attack_is_refused(
    ruling: Ruling, attack: File | bytes, tmp_path: Path
) -> None:
    path = put(tmp_path, attack)
    with pytest.raises(ArtifactError) as caught:
        opened(path, ruling.late)()
    assert str(caught.value).startswith(f"{path}: ")
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("ruling", RULINGS, ids=lambda ruling: ruling.name)
def test_legal_twin_opens(ruling: Ruling, tmp_path: Path) -> None:
    path = put(tmp_path, ruling.twin)
    with Reader(path) as reader:
        assert tuple(reader.warnings) == ruling.warns
        for name in reader.tensors:
            reader.read(name)
        if ruling.late:
            use(reader)


def test_late_rulings_open_for_inspection(tmp_path: Path) -> None:
    late = [ruling for ruling in RULINGS if ruling.late]
    assert len(late) == 3
    for ruling in late:
        with Reader(put(tmp_path, ruling.attack)) as reader:
            assert list(reader.tensors) == ["a.weight"]


# ------------------------------------------------------------------ with more than one file


def test_front_longer_than_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = EMPTY.but(data_offset=8192, padding=bytes(8192 - 49)).write(tmp_path)
    monkeypatch.setattr(hfq, "MAX_FRONT_BYTES", 8160)
    Reader(path).close()
    monkeypatch.setattr(hfq, "MAX_FRONT_BYTES", 8159)
    check_refused(HeaderError, lambda: Reader(path), path=path, says=["at most 8159 bytes"])


def test_version_2_at_an_offset(tmp_path: Path) -> None:
    one, two = tmp_path / "v1", tmp_path / "v2"
    one.write_bytes(b"#" * 64 + File(version=1).data())
    two.write_bytes(b"#" * 64 + File(version=2).data())
    Reader(one, base=64).close()
    check_refused(VersionError, lambda: Reader(two, base=64), path=two, says=["inside another"])


@pytest.mark.parametrize(
    ("file", "warnings", "strict"),
    [
        (LEGAL, [], []),
        (LEGAL.but(metadata_offset=40, gap=b"\xff" * 8), ["metadata_offset is 40, not 32"], []),
        (
            LEGAL.but(data_offset=200, padding=bytes(91)),
            [],
            ["data_offset 200 is not 4096-aligned"],
        ),
        (LEGAL.but(tail=b"xyz"), ["3 bytes follow the last payload"], []),
        (LEGAL.but(tail=b"HFQ"), ["3 bytes follow the last payload"], []),
        (
            LEGAL.but(tail=WHOLE),
            [f"another HFQ container begins at byte 4128 ({len(WHOLE)} bytes)"],
            [],
        ),
        (EMPTY, [], []),
        (File([Tensor(shape=(), payload=b"\0\0")]), [], []),
        (File(TWO, version=2, tail=b"x"), ["1 bytes follow the last payload"], []),
    ],
)
def test_unusual_but_legal(
    file: File, warnings: list[str], strict: list[str], tmp_path: Path
) -> None:
    with Reader(file.write(tmp_path)) as reader:
        assert reader.warnings == warnings
        assert reader.strict_warnings == strict
        assert len(reader.tensors) == len(file.tensors)
        for tensor in file.tensors:
            assert reader.read(str(tensor.name)).tobytes() == tensor.payload


@pytest.mark.parametrize(
    ("architecture", "arch_id", "warned"),
    [
        ("qwen3_5_moe", 9, True),
        ("qwen3.6", 4, True),
        ("Qwen3.5", 0, True),
        ("qwen3_5_moe", 5, False),
        ("qwen3.6", 6, False),
        ("qwen3", 9, False),
        ("deepseek_v4", 5, False),
        (None, 9, False),
        (["qwen3.5"], 9, False),
    ],
)
def test_qwen_metadata_with_another_arch_id(
    architecture: object, arch_id: int, warned: bool, tmp_path: Path
) -> None:
    metadata = json.dumps({"architecture": architecture}).encode()
    with Reader(File(metadata=metadata, arch_id=arch_id).write(tmp_path)) as reader:
        assert len(reader.warnings) == warned
        assert all(f"arch_id is {arch_id}" in warning for warning in reader.warnings)


@pytest.mark.parametrize(
    ("stored", "asked"),
    [
        ("model.language_model.a", "model.a"),
        ("model.a", "a"),
        ("a", "model.a"),
        ("a", "model.language_model.a"),
    ],
)
def test_no_prefix_is_guessed(stored: str, asked: str, tmp_path: Path) -> None:
    with Reader(File([Tensor(stored)]).write(tmp_path)) as reader:
        reader.read(stored)
        check_refused(UnknownTensorError, lambda: reader.read(asked), tensor=asked)


def test_read_of_a_file_that_shrank(tmp_path: Path) -> None:
    path = File().write(tmp_path)
    with Reader(path) as reader:
        reader.read("b.weight")
        os.truncate(path, len(WHOLE) - 1)
        reader.read("a.weight")
        check_refused(TruncatedError, lambda: reader.read("b.weight"), path=path)


def test_file_that_changed(tmp_path: Path) -> None:
    path = File().write(tmp_path)
    with Reader(path) as reader:
        reader.check_unchanged()
        os.truncate(path, len(WHOLE) + 1)
        check_refused(ChangedError, reader.check_unchanged, path=path)


def test_every_error_class_of_the_container_is_covered() -> None:
    covered = {ruling.error for ruling in RULINGS} | {UnknownTensorError, ChangedError}
    assert covered == {
        ChangedError,
        DuplicateTensorError,
        HeaderError,
        IndexFieldError,
        MagicError,
        MetadataError,
        PayloadBoundsError,
        PayloadSizeError,
        TensorTypeError,
        TruncatedError,
        UnknownTensorError,
        VersionError,
    }


@pytest.mark.parametrize("where", ELSEWHERE.values(), ids=list(ELSEWHERE))
def test_a_ruling_held_elsewhere_has_its_test(where: str) -> None:
    file, _, function = where.partition("::")
    text = (Path(__file__).parent / file).read_text(encoding="utf-8")
    assert f"\ndef {function}(" in text
