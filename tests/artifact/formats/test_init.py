"""The codec contract and the lookup by number."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from ds4q.artifact.errors import CodingError, PayloadSizeError, TensorTypeError
from ds4q.artifact.formats import Codec, Coding, MixRow, RowCodec, codec_for
from ds4q.artifact.types import F16, HFP4G32, Q8F16, TYPES
from tests.checks import check_refused

VARIANTS: dict[int, list[str]] = {102: ["zero", "neg32"], 107: ["dual", "affine", "s40", "sign"]}


def test_lookup_gives_one_codec_per_number() -> None:
    kinds = [kind for kind in TYPES.values() if kind.codec]
    # A coding that a type does not ask for is not looked at.
    for kind in kinds:
        codings: list[Coding] = [*VARIANTS.get(kind.id, [])]
        for coding in codings or [MixRow(0, b"") if kind.coding else "nonsense"]:
            assert codec_for(kind.id, coding).type is kind
    assert codec_for(21) is codec_for(21)
    assert codec_for(107, "dual") is codec_for(107, "dual") is not codec_for(107, "s40")


@pytest.mark.parametrize("number", [102, 107])
@pytest.mark.parametrize("coding", [None, "", MixRow(0, b"")])
def test_a_variant_is_never_guessed(number: int, coding: Coding | None) -> None:
    check_refused(
        CodingError,
        lambda: codec_for(number, coding, path="p", tensor="t"),
        path="p",
        tensor="t",
        says=["variant-missing", TYPES[number].name],
    )


@pytest.mark.parametrize("number", [102, 107])
@pytest.mark.parametrize("word", ["Dual", "ZERO", "fp2s", "0", "default"])
def test_a_variant_is_one_of_the_known_words(number: int, word: str) -> None:
    check_refused(
        CodingError,
        lambda: codec_for(number, word, path="p", tensor="t"),
        path="p",
        tensor="t",
        says=["variant-unknown", " or ".join(VARIANTS[number]), f"found {word}"],
    )


@pytest.mark.parametrize("number", [105, 106])
@pytest.mark.parametrize("coding", [None, "", "dual"])
def test_a_mixed_tensor_needs_its_row(number: int, coding: Coding | None) -> None:
    check_refused(
        CodingError,
        lambda: codec_for(number, coding, path="p", tensor="t"),
        path="p",
        tensor="t",
        says=["mix-unregistered", TYPES[number].name],
    )


def test_a_bad_row_is_told_with_file_and_tensor() -> None:
    check_refused(
        CodingError,
        lambda: codec_for(105, MixRow(7, b""), path="p", tensor="t"),
        path="p",
        tensor="t",
        says=["mix-table-format", "found 7"],
    )


def test_words_of_a_table_row() -> None:
    row = MixRow(1, bytes.fromhex("60bf80be803e603f 80bfc0bec03e803f"))
    assert row.words.tolist() == [
        [0xBF60, 0xBE80, 0x3E80, 0x3F60],
        [0xBF80, 0xBEC0, 0x3EC0, 0x3F80],
    ]


def test_lookup_names_file_tensor_and_number() -> None:
    check_refused(
        TensorTypeError,
        lambda: codec_for(40, path="p", tensor="t"),
        path="p",
        tensor="t",
        says=["40", "TQ2G128"],
    )


@pytest.mark.parametrize(
    ("codec", "shape", "unit"),
    [
        (codec_for(F16.id), (3, 5), (1, 2)),
        (codec_for(Q8F16.id), (3, 64), (32, 34)),
        (codec_for(HFP4G32.id), (3, 64), (64, 50)),
        (codec_for(HFP4G32.id), (64,), (64, 50)),
        (codec_for(100), (3, 64), (32, 18)),
        (codec_for(107, "affine"), (3, 128), (32, 10)),
        (codec_for(106, MixRow(0, b"")), (3, 128), (32, 10)),
    ],
)
def test_unit_is_a_row_or_a_block(
    codec: Codec, shape: tuple[int, ...], unit: tuple[int, int]
) -> None:
    assert codec.unit(shape) == unit
    payload = np.zeros(codec.type.payload_bytes(shape), dtype=np.uint8)
    assert codec.units(payload, shape).shape == (len(payload) // unit[1], unit[1])


def test_payload_must_have_the_length_of_its_shape() -> None:
    payload = np.zeros(101, dtype=np.uint8)
    error = check_refused(PayloadSizeError, lambda: codec_for(HFP4G32.id).units(payload, (2, 64)))
    assert (error.expected, error.found) == (100, 101)


def test_abstract_codec_does_nothing() -> None:
    empty = np.zeros((1, 1), dtype=np.uint8)
    for use in (Codec().decode_units, Codec().encode_units, RowCodec().encode_rows):
        with pytest.raises(NotImplementedError, match="Codec is abstract"):
            use(empty)


def test_numba_waits_for_the_first_payload() -> None:
    """What ``ds4q --help`` and ``ds4q inspect`` import must start quickly."""
    program = (
        "import sys\n"
        "import ds4q.artifact.check, ds4q.artifact.hfq, ds4q.artifact.hfq2\n"
        "import ds4q.artifact.receipt, ds4q.artifact.types\n"
        "from ds4q.artifact.formats import codec_for\n"
        "codec_for(1)\n"
        "codec_for(120)\n"
        "print(sorted({'numba', 'llvmlite', 'rich', 'click'} & set(sys.modules)))\n"
        "codec_for(21)\n"
        "print('numba' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\nTrue\n"
