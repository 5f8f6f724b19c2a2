"""Owns rotary positions: frequencies with YaRN, and cos/sin tables. Rotation happens in kernels.

YaRN follows Peng et al. 2023 (arXiv 2309.00071) as DeepSeek's inference code applies it: no
attention factor. Angles are formed in float64: in float32, ``position * frequency`` is off by
hundredths of a radian near position 10^6.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from ds4q.artifact.fastpath import jit
from ds4q.runtime.config import ModelConfig, Yarn

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]


def plain_frequencies(rope_dim: int, theta: float) -> F64:
    """Radians per position of each channel pair: ``theta^(-2i / rope_dim)``, [rope_dim / 2]."""
    return theta ** (-np.arange(0, rope_dim, 2, dtype=np.float64) / rope_dim)


def yarn_frequencies(rope_dim: int, theta: float, yarn: Yarn) -> F64:
    """As ``plain_frequencies``, slow pairs stretched by ``yarn.factor`` with a linear ramp."""
    plain = plain_frequencies(rope_dim, theta)

    def pair_of(rotations: float) -> float:
        # The (fractional) pair that turns this often within the original context.
        context = yarn.original_max_position_embeddings / (2 * math.pi * rotations)
        return rope_dim * math.log(context) / (2 * math.log(theta))

    low: float = max(math.floor(pair_of(yarn.beta_fast)), 0)
    high: float = min(math.ceil(pair_of(yarn.beta_slow)), rope_dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(rope_dim // 2) - low) / (high - low), 0.0, 1.0)
    return plain / yarn.factor * ramp + plain * (1.0 - ramp)


def layer_frequencies(config: ModelConfig, layer: int) -> F64:
    """The frequencies that everything in ``layer`` rotates by."""
    if config.compress_ratios[layer] == 0:
        return plain_frequencies(config.qk_rope_head_dim, config.rope_theta)
    return yarn_frequencies(
        config.qk_rope_head_dim, config.compress_rope_theta, config.rope_scaling
    )


def tables(frequencies: F64, start: int, count: int, step: int = 1) -> tuple[F32, F32]:
    """cos and sin, each f32 [count, pairs], at positions ``start, start + step, ...``."""
    return turns(frequencies, np.arange(start, start + step * count, step))


def turns(frequencies: F64, positions: npt.NDArray[np.int64]) -> tuple[F32, F32]:
    """cos and sin, each f32 [T, pairs], at ``positions`` [T]."""
    angles = positions[:, None] * frequencies  # [T, pairs], f64
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rotate_reference(x: F32, cos: F32, sin: F32) -> F32:
    """Rotate the last ``2 * pairs`` channels of ``x`` [..., D]; cos and sin [..., pairs]."""
    rotated = 2 * cos.shape[-1]
    out = x.copy()
    even, odd = x[..., -rotated::2], x[..., x.shape[-1] - rotated + 1 :: 2]
    out[..., -rotated::2] = even * cos - odd * sin
    out[..., x.shape[-1] - rotated + 1 :: 2] = even * sin + odd * cos
    return out


@jit
def rotate_row(row: F32, cos: F32, sin: F32) -> None:
    """Rotate the last ``2 * len(cos)`` channels of one row in place."""
    first = row.shape[0] - 2 * cos.shape[0]
    for i in range(cos.shape[0]):
        a, b = row[first + 2 * i], row[first + 2 * i + 1]
        row[first + 2 * i] = a * cos[i] - b * sin[i]
        row[first + 2 * i + 1] = a * sin[i] + b * cos[i]
