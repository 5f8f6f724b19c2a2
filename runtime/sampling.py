"""Owns the choice of the next token from logits. Knows no model, no text and no stop tokens."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ds4q.quantize.errors import ConfigError
from ds4q.quantize.generation import sampling
from ds4q.runtime.errors import LogitsError, SamplingError

SUM_ERROR = 1e-9  # far above what two orders of adding 129,280 numbers differ by, relatively


class Sampler:
    """Greedy at temperature 0 (the lowest id on ties), else a seeded draw from the nucleus.

    Parameters
    ----------
    temperature : logits are divided by it before the softmax; 0 is greedy
    top_p : draw from the fewest most likely tokens whose probabilities add up to at least this
    seed : of PCG64; the same seed and logits give the same tokens
    """

    def __init__(self, *, temperature: float, top_p: float, seed: int) -> None:
        if not (math.isfinite(temperature) and temperature >= 0):
            raise SamplingError("temperature", expected="0 or more", found=temperature)
        if not 0 < top_p <= 1:
            raise SamplingError("top_p", expected="more than 0, at most 1", found=top_p)
        if seed < 0:
            raise SamplingError("seed", expected="0 or more", found=seed)
        self.temperature = temperature
        self.top_p = top_p
        self.seed = seed
        self._random = np.random.Generator(np.random.PCG64(seed))

    @property
    def greedy(self) -> bool:
        """Whether it takes the largest logit and draws nothing."""
        return self.temperature == 0

    def __call__(self, logits: npt.NDArray[np.floating[Any]]) -> int:
        """The next token for ``logits`` [vocab]; raises ``LogitsError`` on NaN or infinity."""
        check_finite(logits)
        if self.greedy:
            return int(np.argmax(logits))
        return self._draw(logits.astype(np.float64))

    def _draw(self, logits: npt.NDArray[np.float64]) -> int:
        with np.errstate(over="ignore", under="ignore"):  # a tiny temperature: -inf, then exactly 0
            weights = np.exp((logits - logits.max()) / self.temperature)
        tokens = None if self.top_p == 1 else _nucleus(weights, self.top_p)
        mass = np.cumsum(weights if tokens is None else weights[tokens])
        place = np.searchsorted(mass, self._random.random() * mass[-1], side="right")
        return int(place if tokens is None else tokens[place])


def _nucleus(weights: npt.NDArray[np.float64], top_p: float) -> npt.NDArray[np.intp]:
    """The fewest places, the heaviest first, whose ``weights`` add up to ``top_p`` of all.

    The heaviest weight is 1. Sorting all of a vocabulary takes longer than a step of the model on a
    device; mostly a few hundred are enough.
    """
    enough = top_p * weights.sum()
    for least in (1e-2, 1e-4):
        places = np.flatnonzero(weights >= least)
        if weights[places].sum() > enough * (1 + SUM_ERROR):
            break
    else:
        places = np.arange(weights.size)
    places = places[np.argsort(-weights[places], kind="stable")]  # the lowest id first on ties
    return places[: np.searchsorted(np.cumsum(weights[places]), enough) + 1]


def check_finite(logits: npt.NDArray[np.floating[Any]]) -> None:
    """Raise ``LogitsError`` where one of ``logits`` [vocab] is NaN or infinite."""
    bad = np.flatnonzero(~np.isfinite(logits))
    if bad.size:
        raise LogitsError(
            expected="finite numbers",
            found=f"{logits[bad[0]]} for token {bad[0]}, {bad.size} of {logits.size} in all",
        )


def sampling_defaults(
    generation_config: Mapping[str, Any], *, given: Collection[str] = (), path: object = None
) -> dict[str, float]:
    """``quantize.generation.sampling`` of an artifact; ``SamplingError`` where that refuses.

    ``given`` are the keys that the user sets.
    """
    try:
        return sampling(generation_config, path, "generation_config.", given=given)
    except ConfigError as error:
        raise SamplingError(
            error.what,
            path=path,
            expected=error.expected,
            found=error.found,
            remedy="give another value (ds4q run: --temp, --top-p), or quantize again",
        ) from None
