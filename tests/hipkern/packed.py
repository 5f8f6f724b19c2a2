"""Owns what the tests of packed kernels share: payloads of every type, and buffers on a device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from ds4q.artifact.formats import Coding, MixRow, codec_for
from ds4q.artifact.formats._fwht import rotate
from ds4q.artifact.formats.hfp4g32 import row_header
from ds4q.artifact.formats.mq2lloyd import stored_values
from ds4q.artifact.types import TYPES
from ds4q.hipkern import matrix
from ds4q.hipkern.driver import Device
from ds4q.hipkern.kernels import Kernels

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]

BOOKS3 = np.array(
    [[0xBF80, 0xBF20, 0xBEC0, 0xBE00, 0x3E00, 0x3EC0, 0x3F20, 0x3F80],
     [0xBF81, 0xBF00, 0xBE83, 0x8080, 0x0080, 0x3E85, 0x3F07, 0x3F80]], dtype="<u2"
).tobytes()  # fmt: skip
BOOKS2 = np.array(
    [[0xBF60, 0xBE80, 0x3E80, 0x3F60], [0xBF80, 0xBEC1, 0x3EC3, 0x3F80]], dtype="<u2"
).tobytes()


class Form(NamedTuple):
    """A type under a coding, and what a block's bytes must be for a CPU codec to accept them."""

    type_id: int
    coding: Coding | None = None
    mirrored: bool = False  # bit 7 of a scale byte chooses

    @property
    def decoder(self) -> int:
        return matrix.decoder_of(self.type_id, self.coding)


FORMS = {
    "F16": Form(1),
    "F32": Form(2),
    "BF16": Form(16),
    "Q8F16": Form(3),
    "MQ2G256Lloyd": Form(19),
    "HFP4G32": Form(21),
    "ROCmFP4": Form(100),
    "ROCmFP4Fast": Form(101),
    "ROCmFP6-zero": Form(102, "zero"),
    "ROCmFP6-neg32": Form(102, "neg32"),
    "ROCmFP8": Form(103),
    "ROCmFP3": Form(104),
    "ROCmFP3Mix-0": Form(105, MixRow(0, b"")),
    "ROCmFP3Mix-1": Form(105, MixRow(1, BOOKS3), True),
    "ROCmFP2Mix-0": Form(106, MixRow(0, b"")),
    "ROCmFP2Mix-1": Form(106, MixRow(1, BOOKS2), True),
    "ROCmFP2-dual": Form(107, "dual"),
    "ROCmFP2-s40": Form(107, "s40"),
    "ROCmFP2-sign": Form(107, "sign", True),
    "ROCmFP2-affine": Form(107, "affine"),
}
WIDE = (1, 2, 16)
ONE_EACH = [  # a form for each decoder
    "F16", "F32", "BF16", "Q8F16", "MQ2G256Lloyd", "HFP4G32", "ROCmFP4", "ROCmFP4Fast",
    "ROCmFP6-zero", "ROCmFP6-neg32", "ROCmFP8", "ROCmFP3Mix-1", "ROCmFP2Mix-1", "ROCmFP2-affine",
]  # fmt: skip


def columns(form: Form, cols: int) -> int:
    """``cols``, or the next number of columns that the type can have."""
    unit = max(32, TYPES[form.type_id].row_multiple)
    return -(-cols // unit) * unit


def payload(form: Form, rows: int, cols: int, rng: np.random.Generator, edges: bool = False) -> U8:
    """Random bytes of a valid matrix. Without ``edges`` its weights are of one magnitude."""
    kind = TYPES[form.type_id]
    if form.type_id in WIDE:
        values = rng.standard_normal(rows * cols).astype(np.float32)
        return codec_for(form.type_id).encode(values)
    data = rng.integers(0, 256, (rows, kind.row_bytes(cols)), dtype=np.uint8)
    if form.type_id == 19:
        groups = data.reshape(rows, -1, kind.block_bytes)
        scale = 2.0 ** rng.uniform(*((-14, 13) if edges else (-1, 1)), (*groups.shape[:2], 1))
        levels = np.sort(rng.standard_normal((*groups.shape[:2], 4)) * scale).astype("<f2")
        groups[:, :, :8] = levels.view(np.uint8)
        return data.reshape(-1)
    blocks = data[:, kind.row_header_bytes :].reshape(rows, -1, kind.block_bytes)
    shape = blocks.shape[:2]
    if form.type_id == 21:
        data[:, :16] = row_header(cols)
        data[:, :2] = rng.uniform(0.5, 2, rows).astype("<f2").view(np.uint8).reshape(rows, 2)
        low, high = (0, 255) if edges else (118, 130)
        blocks[:, :, 0] = rng.integers(low, high, shape)
    elif form.type_id == 3:
        exponent = (-24, 15) if edges else (-9, -5)
        scales = 2.0 ** rng.uniform(*exponent, shape)
        blocks[:, :, :2] = scales.astype("<f2")[..., None].view(np.uint8)
    else:
        per_block = 1 if form.type_id in (101, 103) else 2
        low, high = (0, 256) if edges else (0x30, 0x48)
        bytes_ = rng.integers(low, high, (*shape, per_block))
        if form.mirrored and not edges:
            bytes_ |= rng.integers(0, 2, bytes_.shape) << 7
        blocks[:, :, -per_block:] = bytes_
    return data.reshape(-1)


def values_of(form: Form, data: U8, rows: int, cols: int) -> F32:
    """What the CPU codec says, f32 (rows, cols)."""
    values: F32 = codec_for(form.type_id, form.coding).decode(data, (rows, cols))
    return values


def multiplied(form: Form, data: U8, rows: int, cols: int) -> F32:
    """What products take, f32 (rows, cols): as ``values_of``, but rotated as they are stored."""
    if form.decoder in matrix.ROTATED:
        return stored_values(data.reshape(-1, TYPES[form.type_id].block_bytes)).reshape(rows, cols)
    return values_of(form, data, rows, cols)


def turned(form: Form, x: F32) -> F32:
    """Activations as products take them."""
    return rotate(x) if form.decoder in matrix.ROTATED else x


class Rig:
    """A device with what a test puts on it; everything is freed at the end."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.kernels = Kernels(device)
        self.stream = device.stream()

    def put(self, array: npt.NDArray[Any], spare_bytes: int = 0) -> int:
        """Address of a copy on the device, with ``spare_bytes`` behind it."""
        raw = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        buffer = self.device.alloc(max(raw.nbytes + spare_bytes, 16))
        if raw.nbytes:
            self.stream.upload(buffer.address, raw)
        self.stream.synchronize()
        return buffer.address

    def room(self, shape: tuple[int, ...], dtype: Any = np.float32) -> int:
        """Address of a new array; its bytes are not set."""
        return self.device.alloc(max(int(np.prod(shape)) * np.dtype(dtype).itemsize, 16)).address

    def get(self, address: int, shape: tuple[int, ...], dtype: Any = np.float32) -> Any:
        """What lies at ``address``, once all launches are done."""
        out = np.empty(shape, dtype=dtype)
        self.stream.download(out, address)
        self.stream.synchronize()
        return out

    def run(
        self, file: str, kernel: str, grid: tuple[int, int, int], *arguments: Any, **defines: int
    ) -> None:
        """Launch ``kernel``."""
        self.kernels.launch(self.stream, file, kernel, grid, *arguments, defines=defines)

    def books(self, form: Form) -> int:
        """Address of the form's books, or 0."""
        books = matrix.books_of(form.type_id, form.coding)
        return 0 if books is None else self.put(np.frombuffer(books, np.uint8))

    def matrix(self, form: Form, data: U8, rows: int, cols: int, first: int = 0) -> bytes:
        """``ds4q_matrix`` of a payload on the device, ``first`` bytes after a boundary."""
        shifted = np.concatenate([np.zeros(first, np.uint8), data])
        row_bytes = matrix.row_bytes_of(form.type_id, cols)
        at = self.put(shifted, 16) + first
        return matrix.pack_matrix(at, self.books(form), form.decoder, rows, cols, row_bytes)

    def table(self, structs: Sequence[bytes]) -> int:
        """Address of structs, one after the other."""
        return self.put(np.frombuffer(b"".join(structs), np.uint8))


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    """The simulated device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS4Q_HIP", "sim")
        with Device.open() as device:
            yield Rig(device)


def bound(steps: int, magnitude: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Error of a sum that takes no more than ``steps`` roundings on any path.

    gamma_n = n u / (1 - n u), times the sum of |w x|, plus what subnormal results may lose.
    """
    u = 2.0**-24
    return steps * u / (1 - steps * u) * magnitude + steps * 2.0**-149


def dot_steps(form: Form, cols: int) -> int:
    """Roundings between a product and the row's result, see ``ds4q_dot.h``."""
    lanes, butterfly, factor = 32, 5, 1
    if form.type_id in WIDE:
        return -(-cols // (8 * lanes)) * 8 + butterfly + factor
    blocks = -(-cols // (128 * lanes)) * 4 * 2  # totals, with halves
    return 32 + blocks + butterfly + factor
