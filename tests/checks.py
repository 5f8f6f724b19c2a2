"""Owns the checks that test modules share: refusals, golden bytes, round trips, parity of paths."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pytest

from ds4q.artifact.errors import Ds4qError
from ds4q.artifact.fastpath import FastPath
from ds4q.artifact.formats import Codec

Array = npt.NDArray[Any]
E = TypeVar("E", bound=Ds4qError)
SAMPLE_BYTES = 16


def check_refused(
    kind: type[E],
    call: Callable[[], object],
    *,
    path: object = None,
    tensor: str | None = None,
    says: Iterable[str] = (),
) -> E:
    """``call`` must raise exactly ``kind``, in one line that names ``path`` and ``tensor``.

    ``says`` lists further words of the message. Returns the error.
    """
    with pytest.raises(kind) as caught:
        call()
    error = caught.value
    assert type(error) is kind, f"{type(error).__name__} in place of {kind.__name__}: {error}"
    text = str(error)
    assert text.isprintable(), f"not one clean line: {text!r}"
    if path is not None:
        assert error.path == str(path)
        assert text.startswith(f"{path}: ")
    if tensor is not None:
        assert error.tensor == tensor
        assert tensor in text
    for words in says:
        assert words in text, f"{words!r} is not in {text!r}"
    return error


def same_bits(found: Array, expected: Array, *, block_bytes: int = 1, what: str = "bytes") -> None:
    """Fail unless both arrays have one dtype, shape and the same bits.

    The message counts the differing blocks of ``block_bytes`` and shows the worst one.
    """
    assert found.dtype == expected.dtype, f"{what}: dtype {found.dtype}, not {expected.dtype}"
    assert found.shape == expected.shape, f"{what}: shape {found.shape}, not {expected.shape}"
    a = np.frombuffer(found.tobytes(), dtype=np.uint8)
    b = np.frombuffer(expected.tobytes(), dtype=np.uint8)
    differs = a != b
    if not differs.any():
        return
    pad = -len(differs) % block_bytes
    per_block = np.pad(differs, (0, pad)).reshape(-1, block_bytes).sum(axis=1)
    worst = int(np.argmax(per_block))
    start = worst * block_bytes
    start += int(np.argmax(differs[start : start + block_bytes]))
    cut = slice(start, start + SAMPLE_BYTES)
    pytest.fail(
        f"{what}: {np.count_nonzero(per_block)} of {len(per_block)} blocks differ, worst is block "
        f"{worst} ({per_block[worst]} bytes); from byte {start}: "
        f"expected {b[cut].tobytes().hex()}, found {a[cut].tobytes().hex()}"
    )


def check_golden(found: Array | bytes, expected_hex: str, *, block_bytes: int = 1) -> None:
    """``found`` must be exactly these bytes; spaces in the hex text do not count."""
    expected = np.frombuffer(bytes.fromhex(expected_hex), dtype=np.uint8)
    raw = found if isinstance(found, bytes) else found.tobytes()
    same_bits(np.frombuffer(raw, dtype=np.uint8), expected, block_bytes=block_bytes, what="golden")


def check_round_trip(codec: Codec, values: Array) -> npt.NDArray[np.uint8]:
    """Values that the type holds survive bit for bit, with the length that the table promises.

    Neither direction may change its input. Returns the payload.
    """
    before = values.copy()
    payload = codec.encode(values)
    same_bits(values, before, what="encoder's input")
    assert payload.dtype == np.uint8
    assert payload.shape == (codec.type.payload_bytes(values.shape),)
    kept = payload.copy()
    back = codec.decode(payload, values.shape)
    codec.validate(payload, values.shape)
    same_bits(payload, kept, what="decoder's input")
    assert back.shape == values.shape
    same_bits(back, values.astype(back.dtype), what="round trip")
    return payload


def check_parity(
    pair: FastPath[Any, Any], args: Sequence[Any], *, block_bytes: int = 1
) -> tuple[Any, list[Any]]:
    """The reference and the compiled side of ``pair`` agree bit for bit, results and outputs.

    Every array among ``args`` is compared after the call, so a kernel that writes into its
    arguments is covered. Returns the reference's result and arguments.
    """

    def run(side: Callable[..., Any]) -> tuple[Any, list[Any]]:
        mine = [a.copy() if isinstance(a, np.ndarray) else a for a in args]
        return side(*mine), mine

    expected, expected_args = run(pair.reference)
    found, found_args = run(pair.fast)
    name = pair.__name__
    for number, (a, b) in enumerate(zip(found_args, expected_args, strict=True)):
        if isinstance(b, np.ndarray):
            same_bits(a, b, block_bytes=block_bytes, what=f"{name}, argument {number}")
    if isinstance(expected, np.ndarray):
        same_bits(found, expected, block_bytes=block_bytes, what=f"{name}, result")
    else:
        assert found == expected, f"{name}: result {found}, not {expected}"
    return expected, expected_args
