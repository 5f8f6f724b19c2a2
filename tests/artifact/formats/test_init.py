"""The codec contract and the lookup by number."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from ds4q.artifact.errors import PayloadSizeError, TensorTypeError
from ds4q.artifact.formats import Codec, codec_for
from ds4q.artifact.types import F16, HFP4G32, Q8F16, TYPES
from tests.checks import check_refused


def test_lookup_gives_one_codec_per_number() -> None:
    numbers = [kind.id for kind in TYPES.values() if kind.codec]
    codecs = [codec_for(number) for number in numbers]
    assert [codec.type.id for codec in codecs] == numbers
    assert codec_for(21) is codec_for(21)


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
    for use in (Codec().decode_units, Codec().encode_units):
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
        "print(sorted({'numba', 'llvmlite', 'rich', 'click'} & set(sys.modules)))\n"
        "codec_for(21)\n"
        "print('numba' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\nTrue\n"
