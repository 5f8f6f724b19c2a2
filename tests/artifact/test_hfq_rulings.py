"""The reader's rulings: each attack is refused by its own class, and its legal twin opens."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
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
from tests.artifact.rulings import EMPTY, LEGAL, RULINGS, WHOLE, Ruling
from tests.checks import check_refused

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
    "written-file": "test_opened.py::test_a_write_is_an_error",
    "not-a-regular-file": "test_hfq.py::test_folder_and_fifo_are_refused_without_waiting",
    "other-model": "../test_verdicts.py::test_every_command_refuses_a_fault",
    "strange-tensor": "../test_verdicts.py::test_every_command_refuses_a_fault",
    "missing-tensor": "../test_verdicts.py::test_every_command_refuses_a_fault",
    "route-out-of-range": "../test_verdicts.py::test_every_command_refuses_a_fault",
    "ids-and-numbers": "../test_verdicts.py::test_every_command_refuses_a_fault",
    "metadata-kind": "../test_verdicts.py::test_every_command_refuses_a_fault",
    "own-digests": "test_hfq.py::test_every_flipped_bit_of_header_metadata_and_index_is_refused",
}


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
