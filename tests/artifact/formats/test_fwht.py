"""The rotation of MQ types: hipfire's signs, exact values, orthonormality, equal paths."""

from __future__ import annotations

import numpy as np
import pytest

from ds4q.artifact.formats import _fwht
from tests.checks import check_parity, same_bits

# All signs of both seeds, least significant bit first, 1 = plus.
SIGNS = {
    42: "6f431f7edba4cc7df732616531ea6134acf88f3f38308757889d933fa3258e40",
    1042: "61b35e61a484ab8e3bc0812461c61c51b819d43a93ecf3be71423aeee9af0f39",
}


@pytest.mark.parametrize("seed", SIGNS)
def test_signs_are_those_of_the_format(seed: int) -> None:
    found = _fwht.signs(seed)
    assert found.dtype == np.float32
    assert np.packbits(found > 0, bitorder="little").tobytes().hex() == SIGNS[seed]
    assert np.abs(found).tolist() == [1] * 256
    same_bits(found, _fwht.BEFORE if seed == 42 else _fwht.AFTER)


def test_a_ramp_by_hand() -> None:
    ramp = (np.arange(256) - 128).astype(np.float32)
    found = _fwht.rotate(ramp)
    assert found[:8].tolist() == [-136.25, 69.75, -15.25, -110.75, -25.25, 86.75, -4.25, 107.75]
    assert (ramp**2).sum() == (found**2).sum() == 1_398_144
    assert (_fwht.unrotate(found) == ramp).all()


def test_the_matrix_is_the_signed_hadamard_matrix_and_orthonormal() -> None:
    found = _fwht.rotate(np.eye(256, dtype=np.float32))  # row i: what e_i becomes
    number = np.arange(256)
    parity = np.array([[bin(i & j).count("1") % 2 for j in number] for i in number])
    hadamard = np.where(parity, -1.0, 1.0)
    want = _fwht.BEFORE[:, None] * hadamard * _fwht.AFTER / 16
    assert (found == want).all()
    assert (found.astype(np.float64) @ found.T.astype(np.float64) == np.eye(256)).all()
    same_bits(_fwht.unrotate(np.eye(256, dtype=np.float32)), np.ascontiguousarray(found.T))


def test_products_survive_the_rotation() -> None:
    rng = np.random.default_rng(1)
    w, x = rng.standard_normal((2, 3, 512)).astype(np.float32)
    found = (_fwht.rotate(w).astype(np.float64) * _fwht.rotate(x)).sum(axis=1)
    want = (w.astype(np.float64) * x).sum(axis=1)
    assert np.abs(found - want).max() < 1e-5
    assert np.abs((_fwht.rotate(w).astype(np.float64) * x).sum(axis=1) - want).min() > 1


def test_both_paths_give_the_same_bits() -> None:
    values = np.random.default_rng(2).standard_normal((33, 256)).astype(np.float32)
    values[0] *= np.float32(2.0**-130)
    values[1, ::3] = -0.0
    check_parity(_fwht.transform, [values, _fwht.BEFORE, _fwht.AFTER])
    check_parity(_fwht.transform, [values, _fwht.AFTER, _fwht.BEFORE])
    check_parity(_fwht.transform, [values[:0], _fwht.BEFORE, _fwht.AFTER])


def test_what_is_rotated_is_left_alone() -> None:
    values = np.random.default_rng(3).standard_normal((2, 256)).astype(np.float32)
    kept = values.copy()
    _fwht.rotate(values)
    _fwht.unrotate(values)
    same_bits(values, kept)
