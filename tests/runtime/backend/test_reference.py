"""The numpy paths, against values worked out by hand and hipfire's indexed MoE parity set."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from ds4q.artifact.types import HFP4G32, MQ2_LLOYD
from ds4q.runtime.backend import Weight, reference
from ds4q.runtime.backend.cpu import CpuBackend
from tests.checks import same_bits
from tests.runtime.backend import packs


@pytest.mark.parametrize(("kind", "rows", "cols"), packs.shapes(), ids=packs.name)
def test_decode_gives_the_exact_values(kind: packs.Kind, rows: int, cols: int) -> None:
    weight, values = packs.draw(kind, rows, cols, seed=7)
    if kind is MQ2_LLOYD:  # 256 stored values add up, each step of it rounded
        np.testing.assert_allclose(reference.decode(weight), values, rtol=0, atol=2e-6)
        return
    np.testing.assert_array_equal(reference.decode(weight), values)


def test_a_product_by_hand() -> None:
    """Row bytes of two codes, 1.0 and 2.0 under scale 2^1: values 2 and 4."""
    row = np.zeros(33, dtype=np.uint8)
    row[1], row[4], row[16], row[17] = 0x3C, 1, 0x80, 0x42
    x = np.zeros((1, 32), dtype=np.float32)
    x[0, :2] = 3, 5
    assert reference.multiply(Weight(HFP4G32.id, 1, 32, row), x)[0, 0] == 3 * 2 + 5 * 4


def test_a_row_does_not_depend_on_the_other_tokens() -> None:
    weight, _ = packs.draw(HFP4G32, 9, 96, seed=8)
    x = packs.activations(5, 96)
    alone = np.concatenate([reference.multiply(weight, x[t : t + 1]) for t in range(5)])
    same_bits(reference.multiply(weight, x), alone)


PARITY_SHA256 = "4b966cb2bfecfc92c3c8d8f47b6d4fc4d1dab4d0bb0490814a16bc8a440d9818"


def parity_blob(expert: int) -> Weight:
    """hipfire's generator: 8 rows of 256 columns, bytes from a 64-bit xorshift per row."""
    blob = bytearray()
    row_scale = np.float16(np.float32(0.75) + np.float32(0.1) * np.float32(expert))
    for row in range(8):
        state = (131 * expert + 17 * row + 1) | 1

        def draw(modulus: int) -> int:
            nonlocal state
            state ^= state << 13 & (1 << 64) - 1
            state ^= state >> 7
            state ^= state << 17 & (1 << 64) - 1
            return state % modulus

        blob += row_scale.tobytes() + bytes([0, 0, 8, 0]) + bytes(10)
        for _ in range(8):
            blob.append(110 + draw(30))
            for _ in range(16):
                low = draw(16)
                blob.append(low | draw(16) << 4)
    return Weight(HFP4G32.id, 8, 256, np.frombuffer(bytes(blob), dtype=np.uint8))


@pytest.mark.parametrize("path", ["fast", "reference"])
def test_the_published_parity_values(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts 3 and 1 with weights 0.6 and 0.4: gate rows of 3, and rows of the weighted downs."""
    monkeypatch.setenv("DS4Q_REFERENCE", "1" if path == "reference" else "0")
    backend = CpuBackend(1)
    blob = parity_blob(3)
    assert hashlib.sha256(blob.data.tobytes()).hexdigest() == PARITY_SHA256
    x = np.array([[(i % 13 - 6) * 0.125 for i in range(256)]], dtype=np.float32)
    gate = backend.linear(blob, x)[0, :4]
    np.testing.assert_allclose(
        gate, [-25126.77532, -23.27110341, 1820.679749, 7326.013375], rtol=1e-5
    )
    x = np.array([(i % 7 - 3) * 0.25 for i in range(512)], dtype=np.float32).reshape(2, 256)
    parts = [backend.linear(parity_blob(e), x[i : i + 1])[0, :3] for i, e in ((0, 3), (1, 1))]
    down = parts[0].astype(np.float64) * 0.6 + parts[1].astype(np.float64) * 0.4
    np.testing.assert_allclose(down, [1775.191678, -84.92773758, -9243.194259], rtol=1e-5)
