"""Rotary positions: DeepSeek-V4-Flash's published constants, and angles that stay exact far out."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ds4q.runtime.config import Yarn, parse_config
from ds4q.runtime.model import rope
from tests.runtime.artifacts import DATA, config_of

FLASH = Yarn(factor=16, beta_fast=32, beta_slow=1, original_max_position_embeddings=65536)


@pytest.mark.parametrize(
    ("pair", "frequency"),
    [
        (0, 1.0),
        (1, 0.687656022),
        (15, 0.00363553858),
        (16, 0.002265625),
        (20, 2.96977778e-4),
        (24, 1.953125e-5),
        (25, 5.37231267e-6),
        (31, 5.68052904e-7),
    ],
)
def test_yarn_frequencies_of_flash(pair: int, frequency: float) -> None:
    found = rope.yarn_frequencies(64, 160000.0, FLASH)
    assert found.shape == (32,)
    assert found[pair] == pytest.approx(frequency, rel=1e-8)


def test_yarn_with_an_empty_ramp() -> None:
    """Both ends at pair 0: it keeps its frequency, all others are stretched in full."""
    rotations = 65536 / (2 * math.pi) * 1.0001
    found = rope.yarn_frequencies(64, 160000.0, Yarn(16, rotations, rotations, 65536))
    plain = rope.plain_frequencies(64, 160000.0)
    assert found[0] == plain[0]
    assert np.array_equal(found[1:], plain[1:] / 16)


def test_plain_frequencies() -> None:
    found = rope.plain_frequencies(64, 10000.0)
    assert found[0] == 1.0
    assert found[31] == pytest.approx(10000.0 ** (-62 / 64), rel=1e-14)


def test_layers_without_compression_have_no_yarn() -> None:
    config = parse_config(config_of(DATA / "ds4-random"))
    plain = rope.plain_frequencies(64, 10000.0)
    yarn = rope.yarn_frequencies(64, 160000.0, FLASH)
    for layer, expected in enumerate((plain, yarn, yarn, yarn, yarn, plain)):
        assert np.array_equal(rope.layer_frequencies(config, layer), expected)


def test_angles_near_a_million() -> None:
    """Against exact arithmetic; in float32 ``position * frequency`` is off by hundredths."""
    frequencies = rope.yarn_frequencies(64, 160000.0, FLASH)
    cos, sin = rope.tables(frequencies, 1_000_003, 3, step=4)
    assert cos.dtype == sin.dtype == np.float32
    for i in range(3):
        for pair in (0, 1, 16, 31):
            angle = (1_000_003 + 4 * i) * float(frequencies[pair])
            assert cos[i, pair] == pytest.approx(math.cos(angle), abs=1e-7)
            assert sin[i, pair] == pytest.approx(math.sin(angle), abs=1e-7)


def test_rotation_turns_neighbours_and_leaves_the_rest() -> None:
    x = np.arange(8, dtype=np.float32)
    cos, sin = np.array([[0, -1], [1, 0]], dtype=np.float32)  # a quarter and a half turn
    expected = [0, 1, 2, 3, -5, 4, -6, -7]
    assert rope.rotate_reference(x, cos, sin).tolist() == expected
    rope.rotate_row(x, cos, sin)
    assert x.tolist() == expected
