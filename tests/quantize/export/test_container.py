"""The GGUF container: worked bytes, alignment, limits."""

from __future__ import annotations

import struct

import pytest

from ds4q.quantize.export import container
from ds4q.quantize.export.container import GgmlType, GgufTensor
from ds4q.quantize.export.plan import ExportError
from tests.checks import check_refused

F32 = GgmlType(0, "F32", 1, 4)
MXFP4 = GgmlType(39, "MXFP4", 32, 17)


def test_the_worked_file() -> None:
    keys = {"a": container.u32(7), "b": container.text("xy")}
    tensors = [GgufTensor("t", F32, (3,)), GgufTensor("m", MXFP4, (2, 5, 64))]
    front, starts, nbytes = container.layout(keys, tensors)
    expected = (
        b"GGUF" + struct.pack("<IQQ", 3, 2, 3)
        + struct.pack("<Q", 17) + b"general.alignment" + struct.pack("<II", 4, 32)
        + struct.pack("<Q", 1) + b"a" + struct.pack("<II", 4, 7)
        + struct.pack("<Q", 1) + b"b" + struct.pack("<IQ", 8, 2) + b"xy"
        + struct.pack("<Q", 1) + b"t" + struct.pack("<IQIQ", 1, 3, 0, 0)
        + struct.pack("<Q", 1) + b"m" + struct.pack("<I3QIQ", 3, 64, 5, 2, 39, 32)
    )  # fmt: skip
    assert front == expected + bytes(-len(expected) % 32)
    assert starts == [len(front), len(front) + 32]
    assert nbytes == len(front) + 32 + 2 * 5 * 2 * 17 + -(2 * 5 * 2 * 17) % 32


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (container.boolean(True), "07000000 01"),
        (container.f32(1.5), "06000000 0000c03f"),
        (container.text("\u00e9"), "08000000 0200000000000000 c3a9"),
        (container.u8_array(b"\1\2"), "09000000 00000000 0200000000000000 0102"),
        (container.u32_array([1]), "09000000 04000000 0100000000000000 01000000"),
        (container.i32_array([-1]), "09000000 05000000 0100000000000000 ffffffff"),
        (container.f32_array([1.0]), "09000000 06000000 0100000000000000 0000803f"),
        (container.text_array([]), "09000000 08000000 0000000000000000"),
        (container.text_array(["a"]), "09000000 08000000 0100000000000000 0100000000000000 61"),
    ],
)
def test_values(value: bytes, expected: str) -> None:
    assert value == bytes.fromhex(expected)


def test_a_table_that_no_reader_takes_is_refused() -> None:
    for data in (b"", bytes(container.MAX_ARRAY_BYTES + 1)):
        with pytest.raises(ExportError, match="decode tables are too long"):
            container.u8_array(data)
    container.u8_array(bytes(container.MAX_ARRAY_BYTES))


def test_names_must_be_short_and_differ() -> None:
    longest = GgufTensor("x" * 63, F32, (1,))
    container.layout({}, [longest])
    for tensors in ([GgufTensor("x" * 64, F32, (1,))], [longest, longest]):
        check_refused(
            ExportError,
            lambda tensors=tensors: container.layout({}, tensors),  # type: ignore[misc]
            tensor=tensors[0].name,
            says=["twice or too long"],
        )
