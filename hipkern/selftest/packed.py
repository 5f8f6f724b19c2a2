"""Owns the self-test's cases of kernels that read packed weights, for every decoder.

Decoding sees every type in each of its codings, with every scale there is; products see every
decoder, rows whose last tile is short, more tokens than a tile takes, and experts that are absent.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ds4q.artifact.formats import Coding, MixRow
from ds4q.artifact.types import (
    BF16,
    F16,
    F32,
    HFP4G32,
    MQ2_LLOYD,
    Q8F16,
    ROCMFP2,
    ROCMFP2_MIX,
    ROCMFP3,
    ROCMFP3_MIX,
    ROCMFP4,
    ROCMFP4_FAST,
    ROCMFP6,
    ROCMFP8,
    TensorType,
)
from ds4q.hipkern import matrix
from ds4q.hipkern.selftest.inputs import U8, Inputs
from ds4q.hipkern.selftest.rig import Case, Rig

ANY = 0  # a build that looks each matrix's decoder up
# Shapes that blocks stream, and rows of a block: two steps of a group at least, and rows left over.
STREAMED = (100, 1024, 96), (50, 2048, 48), (26, 8192, 24)
LONG = 133  # blocks of a row: a group of lanes comes round, and ends within a lane's tile


def _books(*words: int) -> MixRow:
    return MixRow(1, struct.pack(f"<{len(words)}H", *words))


# bf16 levels, ascending; the second book has what careless kernels lose: the ends of the range,
# subnormals, and a difference of one bit.
_EIGHT = _books(
    *(0xC080, 0xC000, 0xBF80, 0xBE80, 0x0000, 0x3F00, 0x3FC0, 0x4080),
    *(0xFF7F, 0xBF80, 0x8080, 0x8001, 0x0001, 0x0080, 0x3F81, 0x7F7F),
)
_FOUR = _books(0xBFC0, 0xBE00, 0x3F00, 0x3FA0, 0xFF7F, 0x8001, 0x0081, 0x7F7F)
_MILD_EIGHT = _books(
    *(0xC080, 0xC000, 0xBF80, 0xBE80, 0x0000, 0x3F00, 0x3FC0, 0x4080),
    *(0xC040, 0xBFC0, 0xBF00, 0xBD80, 0x3D80, 0x3F40, 0x3F81, 0x4040),
)
_MILD_FOUR = _books(0xBFC0, 0xBE00, 0x3F00, 0x3FA0, 0xBF81, 0xBF80, 0x3F00, 0x4000)


@dataclass(frozen=True, slots=True)
class Format:
    """A type in one of its codings."""

    label: str
    kind: TensorType
    coding: Coding | None = None

    @property
    def decoder(self) -> int:
        """Number of the decoder."""
        return matrix.decoder_of(self.kind.id, self.coding)


FORMATS = (
    Format("F16", F16),
    Format("F32", F32),
    Format("Q8F16", Q8F16),
    Format("BF16", BF16),
    Format("MQ2G256Lloyd", MQ2_LLOYD),
    Format("HFP4G32", HFP4G32),
    Format("ROCmFP4", ROCMFP4),
    Format("ROCmFP4Fast", ROCMFP4_FAST),
    Format("ROCmFP6 zero", ROCMFP6, "zero"),
    Format("ROCmFP6 neg32", ROCMFP6, "neg32"),
    Format("ROCmFP8", ROCMFP8),
    Format("ROCmFP3", ROCMFP3),
    Format("ROCmFP3Mix fixed", ROCMFP3_MIX, MixRow(0, b"")),
    Format("ROCmFP3Mix books", ROCMFP3_MIX, _EIGHT),
    Format("ROCmFP2Mix fixed", ROCMFP2_MIX, MixRow(0, b"")),
    Format("ROCmFP2Mix books", ROCMFP2_MIX, _FOUR),
    Format("ROCmFP2 dual", ROCMFP2, "dual"),
    Format("ROCmFP2 affine", ROCMFP2, "affine"),
    Format("ROCmFP2 s40", ROCMFP2, "s40"),
    Format("ROCmFP2 sign", ROCMFP2, "sign"),
)
"""Every type of floats, in every coding."""

MULTIPLIED = (
    *(form for form in FORMATS if matrix.books_of(form.kind.id, form.coding) is None),
    Format("ROCmFP3Mix", ROCMFP3_MIX, _MILD_EIGHT),
    Format("ROCmFP2Mix", ROCMFP2_MIX, _MILD_FOUR),
)
"""One format for every decoder: types that share one differ in their books alone."""


def _matrix(rig: Rig, form: Format, rows: int, cols: int) -> bytes:
    """The struct of a matrix with scales near 1."""
    packed = rig.inputs.packed(form.kind, rows, cols, wide=False, coding=form.coding)
    books = matrix.books_of(form.kind.id, form.coding)
    place = 0 if books is None else rig.put(books)
    row_bytes = matrix.row_bytes_of(form.kind.id, cols)
    return matrix.pack_matrix(rig.put(packed), place, form.decoder, rows, cols, row_bytes)


def _cols(form: Format, blocks: int) -> int:
    """Columns of about so many blocks of 32: an odd number of them, where the type allows it."""
    multiple = form.kind.row_multiple or 32
    return -(-32 * blocks // multiple) * multiple


def decode_inputs(inputs: Inputs, form: Format) -> tuple[U8, int, int]:
    """Packed rows with every scale there is, and their number and length."""
    rows, cols = 41, _cols(form, 7)
    return inputs.packed(form.kind, rows, cols, wide=True, coding=form.coding), rows, cols


def _decode(form: Format, kernel: str, value_bytes: int) -> Case:
    def body(rig: Rig) -> None:
        packed, rows, cols = decode_inputs(rig.inputs, form)
        books = matrix.books_of(form.kind.id, form.coding)
        rig.launch(
            matrix.decode_grid(rows, cols),
            rig.put(packed),
            0 if books is None else rig.put(books),
            rig.output(value_bytes * rows * cols),
            rows,
            cols,
            matrix.row_bytes_of(form.kind.id, cols),
        )

    return Case("decode.hip", kernel, body, form.label, {"DS4Q_DECODER": form.decoder})


def _embed(form: Format) -> Case:
    def body(rig: Rig) -> None:
        rows, cols, streams = 9, _cols(form, 5), 3
        ids = np.array([8, 0, 3, 8], dtype=np.int32)
        made = rig.output(4 * len(ids) * streams * cols)
        described = rig.put(_matrix(rig, form, rows, cols))
        rig.launch(matrix.embed_grid(cols, len(ids)), described, rig.put(ids), made, streams)

    return Case("decode.hip", "embed", body, form.label, {"DS4Q_DECODER": form.decoder})


def _linear(form: Format, tokens: int) -> Case:
    kernel = matrix.linear_kernel(tokens)

    def body(rig: Rig) -> None:
        blocks, jobs = 0, b""
        shapes = (13, _cols(form, 37), 0), (9, _cols(form, 3), 0), (2, _cols(form, LONG), 0)
        for rows, cols, share in shapes if tokens > 1 else (*shapes, *STREAMED):
            x = rig.put(rig.inputs.values(tokens, cols + 32))
            y = rig.output(4 * tokens * (rows + 3))
            described = _matrix(rig, form, rows, cols)
            jobs += matrix.pack_job(described, x, y, cols + 32, rows + 3, blocks, share)
            blocks += -(-rows // (share or matrix.linear_rows(form.decoder, rows, cols)))
        count = len(jobs) // matrix.JOB_BYTES
        rig.launch((blocks, 1, 1), rig.put(jobs), count, tokens)

    return Case("linear.hip", kernel, body, form.label, {"DS4Q_DECODER": form.decoder})


EXPERTS, CHOSEN = 5, 3
_LIMIT = 10.0


def _experts(rig: Rig, forms: Sequence[Format], rows: int, cols: int) -> tuple[int, int]:
    """Three matrices [rows, cols] for an expert of each format, and for a shared one.

    Each kernel reads some of the three and looks at their own sizes.
    """
    made = [b"".join(_matrix(rig, form, rows, cols) for _ in range(3)) for form in forms]
    return rig.put(b"".join(made)), rig.put(made[-1])


def _ids(experts: int) -> npt.NDArray[np.int32]:
    """Experts [tokens, CHOSEN]: all of them, one twice, some absent, and a token without any."""
    every = [*range(experts), *[-1] * (-experts % CHOSEN)]
    rows = [[2, 1, 2], [0, -1, experts - 1], [-1] * CHOSEN]
    return np.array([*rows, *np.reshape(every, (-1, CHOSEN)).tolist()], dtype=np.int32)


def _moe(label: str, decoder: int, forms: Sequence[Format]) -> list[Case]:
    """The two kernels, with an expert of each format and the shared one of the last."""
    shapes = (20, max(_cols(form, LONG) for form in forms)), (32, 2048), (52, 4096)
    ids = _ids(len(forms))
    tokens = len(ids)
    defines = {"DS4Q_GATE": decoder, "DS4Q_DOWN": decoder, "DS4Q_SHARED_EXPERT": decoder}

    def gate_up(rig: Rig) -> None:
        for rows, cols in shapes:
            routed, shared = _experts(rig, forms, rows, cols)
            x = rotated = rig.put(rig.inputs.values(tokens, cols, scale=2.0**-5))
            if any(form.decoder in matrix.ROTATED for form in forms):
                rotated = rig.put(rig.inputs.values(tokens, cols, scale=2.0**-5))
            for hers in (shared, 0):
                made = rig.output(4 * tokens * (CHOSEN + 1) * rows)
                arguments = routed, hers, rig.put(ids), x, rotated, made, _LIMIT, CHOSEN, tokens
                rig.launch(matrix.gate_up_grid(rows, CHOSEN, tokens), *arguments)

    def down(rig: Rig) -> None:
        for rows, cols in shapes:
            routed, shared = _experts(rig, forms, rows, cols)
            weights = rig.put(rig.inputs.values(tokens, CHOSEN))
            hidden = rig.put(rig.inputs.values(tokens, CHOSEN + 1, cols, scale=4.0))
            for hers in (shared, 0):
                made = rig.output(4 * tokens * (CHOSEN + 1) * rows)
                arguments = routed, hers, rig.put(ids), weights, hidden, made, CHOSEN, tokens
                rig.launch(matrix.down_grid(rows, CHOSEN, tokens), *arguments)

    return [
        Case("moe.hip", "moe_gate_up", gate_up, label, defines),
        Case("moe.hip", "moe_down", down, label, defines),
    ]


def _moe_bands() -> list[Case]:
    """The two kernels by launches that share the experts: what each leaves alone stays."""
    form, (rows, cols) = MULTIPLIED[0], (32, 2048)
    ids = _ids(EXPERTS)
    tokens, defines = len(ids), {"DS4Q_GATE": ANY, "DS4Q_DOWN": ANY, "DS4Q_SHARED_EXPERT": ANY}

    def bands(rig: Rig) -> list[tuple[int, int]]:
        """Addresses of a band's ids, and launched slots: the shared expert's is the first's."""
        first = np.where(ids < 2, ids, -2)
        second = np.where((ids < 2) | (ids > 3), -2, ids)  # nobody has expert 4: it stays unwritten
        return [(rig.put(first), CHOSEN + 1), (rig.put(second), CHOSEN)]

    def gate_up(rig: Rig) -> None:
        routed, shared = _experts(rig, [form] * EXPERTS, rows, cols)
        x = rig.put(rig.inputs.values(tokens, cols, scale=2.0**-5))
        made = rig.output(4 * tokens * (CHOSEN + 1) * rows)
        x_blocks = matrix.gate_up_grid(rows, CHOSEN, tokens)[0]
        for at, slots in bands(rig):
            arguments = routed, shared, at, x, x, made, _LIMIT, CHOSEN, tokens
            rig.launch((x_blocks, slots, tokens), *arguments)

    def down(rig: Rig) -> None:
        routed, shared = _experts(rig, [form] * EXPERTS, rows, cols)
        weights = rig.put(rig.inputs.values(tokens, CHOSEN))
        hidden = rig.put(rig.inputs.values(tokens, CHOSEN + 1, cols, scale=4.0))
        made = rig.output(4 * tokens * (CHOSEN + 1) * rows)
        x_blocks = matrix.down_grid(rows, CHOSEN, tokens)[0]
        for at, slots in bands(rig):
            arguments = routed, shared, at, weights, hidden, made, CHOSEN, tokens
            rig.launch((x_blocks, slots, tokens), *arguments)

    return [
        Case("moe.hip", "moe_gate_up", gate_up, "bands", defines),
        Case("moe.hip", "moe_down", down, "bands", defines),
    ]


def _rotate() -> list[Case]:
    """Activations, and hidden rows of which one expert's down is of a rotated type."""
    rotated = next(form for form in MULTIPLIED if form.decoder in matrix.ROTATED)
    other = MULTIPLIED[0]

    def rows(rig: Rig) -> None:
        tokens, cols = 3, 768
        x, made = rig.put(rig.inputs.values(tokens, cols)), rig.output(4 * tokens * cols)
        rig.launch(matrix.rotate_grid(cols, tokens), x, made, cols)

    def hidden(rig: Rig) -> None:
        width, ids = 512, _ids(EXPERTS)
        forms = [rotated if e % 2 else other for e in range(EXPERTS)]
        routed, _ = _experts(rig, forms, 1, width)
        _, shared = _experts(rig, [rotated], 1, width)
        for hers in (shared, 0):
            made = rig.inout(rig.inputs.values(len(ids), CHOSEN + 1, width))
            grid = matrix.rotate_hidden_grid(width, CHOSEN, len(ids))
            rig.launch(grid, routed, hers, rig.put(ids), made, width, CHOSEN)

    return [Case("rotate.hip", "rotate", rows), Case("rotate.hip", "rotate_hidden", hidden)]


def packed_cases() -> list[Case]:
    """Every kernel that reads packed weights, with every type or decoder."""
    made = [_decode(form, "decode_f32", 4) for form in FORMATS]
    made += [_decode(form, "decode_f16", 2) for form in FORMATS]
    made += [_embed(form) for form in MULTIPLIED]
    made += [_linear(form, tokens) for tokens in (1, 9) for form in MULTIPLIED]
    for form in MULTIPLIED:
        made += _moe(form.label, form.decoder, [form] * EXPERTS)
    return [*made, *_moe("any", ANY, MULTIPLIED), *_moe_bands(), *_rotate()]
