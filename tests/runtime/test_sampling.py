"""Choosing tokens: greedy, the nucleus, seeds, and numbers that must be refused."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4q.runtime.errors import LogitsError, SamplingError
from ds4q.runtime.sampling import Sampler, _nucleus, sampling_defaults
from tests.checks import check_refused

LOGITS = st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=40)


def sampler(temperature: float = 1.0, top_p: float = 1.0, seed: int = 0) -> Sampler:
    return Sampler(temperature=temperature, top_p=top_p, seed=seed)


def f32(values: list[float]) -> npt.NDArray[np.float32]:
    return np.array(values, dtype=np.float32)


def of_probabilities(*values: float) -> npt.NDArray[np.float32]:
    return f32([math.log(value) for value in values])


def draws(logits: npt.NDArray[np.float32], n: int, **options: Any) -> list[int]:
    draw = sampler(**options)
    return [draw(logits) for _ in range(n)]


@given(values=LOGITS)
def test_greedy_takes_the_lowest_id_of_the_largest(values: list[float]) -> None:
    assert sampler(temperature=0)(f32(values)) == values.index(max(values))


def test_greedy_ties() -> None:
    assert sampler(temperature=0)(f32([1, 3, 3, 2, 3])) == 1
    assert sampler(temperature=0)(f32([0.0, -0.0])) == 0


def test_greedy_needs_no_randomness() -> None:
    assert draws(f32([0, 1]), 5, temperature=0) == [1] * 5


def test_same_seed_same_tokens() -> None:
    logits = f32([0.0] * 50)
    first = draws(logits, 50, seed=7)
    assert draws(logits, 50, seed=7) == first
    assert draws(logits, 50, seed=8) != first


def test_draws_are_those_of_pcg64() -> None:
    """Equal probabilities of four tokens: the draw is the quarter that the number falls into."""
    numbers = np.random.Generator(np.random.PCG64(3)).random(64)
    assert draws(f32([5, 5, 5, 5]), 64, seed=3) == [int(4 * number) for number in numbers]


def test_frequencies_are_the_probabilities() -> None:
    found = draws(of_probabilities(0.5, 0.3, 0.2), 4000, seed=1)
    counts = np.bincount(found, minlength=3) / 4000
    np.testing.assert_allclose(counts, [0.5, 0.3, 0.2], atol=0.03)  # 4 standard errors


def test_temperature_sharpens() -> None:
    """At 1/2 the weights are squared: 0.25 : 0.09 : 0.04."""
    found = draws(of_probabilities(0.5, 0.3, 0.2), 4000, temperature=0.5, seed=1)
    counts = np.bincount(found, minlength=3) / 4000
    np.testing.assert_allclose(counts, np.array([25, 9, 4]) / 38, atol=0.03)


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [
        (0.05, {1}),
        (0.39, {1}),
        (0.41, {1, 3}),
        (0.69, {1, 3}),
        (0.75, {0, 1, 3}),
        (1, {0, 1, 2, 3}),
    ],
)
def test_nucleus_is_the_fewest_that_reach_top_p(top_p: float, kept: set[int]) -> None:
    logits = of_probabilities(0.2, 0.4, 0.1, 0.3)
    assert set(draws(logits, 300, top_p=top_p)) == kept


@pytest.mark.parametrize("spread", [0.0, 0.5, 3.0, 12.0])
@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.95, 0.9999, np.nextafter(1, 0)])
def test_nucleus_is_that_of_a_sort_of_all(spread: float, top_p: float) -> None:
    """Flat and peaked, with many equals: however few of the weights are looked at."""
    random = np.random.default_rng(5)
    weights = np.exp(spread * np.round(random.standard_normal(5000), 2))
    weights /= weights.max()
    order = np.argsort(-weights, kind="stable")
    count = np.searchsorted(np.cumsum(weights[order]), top_p * weights.sum()) + 1
    assert _nucleus(weights, top_p).tolist() == order[:count].tolist()


def test_nucleus_takes_the_lowest_ids_of_equals_and_no_more_than_reach_it() -> None:
    assert set(draws(f32([0] * 64), 1000, top_p=0.5)) == {*range(32)}
    even = math.e / (1024 * math.e + 1024)  # the probability of each even id
    found = set(draws(f32([1, 0] * 1024), 4000, top_p=255.5 * even))
    assert found == {*range(0, 512, 2)}  # an unstable sort shows from about 2,000 logits on


@pytest.mark.parametrize(("number", "token"), [(0.0, 1), (0.5, 3), (np.nextafter(1, 0), 3)])
def test_draw_at_a_boundary_is_never_impossible(
    number: float, token: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = sampler()
    monkeypatch.setattr(draw, "_random", SimpleNamespace(random=lambda: number))
    assert draw(f32([-3e38, 0, -3e38, 0, -3e38])) == token


@given(values=LOGITS, top_p=st.floats(0, 1, exclude_min=True), seed=st.integers(0, 2**63 - 1))
def test_drawn_token_is_never_impossible(values: list[float], top_p: float, seed: int) -> None:
    logits = f32([*values, -3e38])  # its probability underflows to 0
    assert 0 <= sampler(top_p=top_p, seed=seed)(logits) < len(values)


@pytest.mark.parametrize("temperature", [1e-300, 5e-324, 1e-3, 1e300])
def test_extreme_temperatures(temperature: float) -> None:
    found = set(draws(f32([1, 3, 2]), 50, temperature=temperature))
    assert found == ({0, 1, 2} if temperature > 1 else {1})


def test_extreme_logits() -> None:
    assert sampler()(f32([-3.4e38, 3.4e38])) == 1


def test_logits_are_not_modified() -> None:
    logits = f32([1, 2, 3])
    draws(logits, 3, temperature=0.5, top_p=0.9)
    assert logits.tolist() == [1, 2, 3]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("temperature", [0, 1])
def test_logits_that_are_not_finite_are_refused(bad: float, temperature: float) -> None:
    with pytest.raises(LogitsError, match=r"for token 2, 2 of 4 in all"):
        sampler(temperature=temperature)(f32([0, 1, bad, float("nan")]))


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_p": float("nan")},
        {"seed": -1},
    ],
    ids=str,
)
def test_bad_parameters(options: dict[str, Any]) -> None:
    with pytest.raises(SamplingError, match=next(iter(options))):
        sampler(**options)


def test_defaults_come_from_the_generation_config() -> None:
    assert sampling_defaults({}) == {"temperature": 1.0, "top_p": 1.0}
    assert sampling_defaults({"temperature": 0.6, "top_p": None}) == {
        "temperature": 0.6,
        "top_p": 1.0,
    }
    assert sampling_defaults({"temperature": 0})["temperature"] == 0


@pytest.mark.parametrize("value", ["1", True, [1], 0, -1, 1.5, 10**400, float("nan")])
def test_defaults_that_no_sampler_takes_are_refused(value: Any) -> None:
    check_refused(
        SamplingError,
        lambda: sampling_defaults({"top_p": value}, path="m.hfq"),
        path="m.hfq",
        says=["generation_config.top_p", "above 0, at most 1", "--top-p"],
    )
    assert sampling_defaults({"top_p": value}, given=["top_p"])["top_p"] == 1


@pytest.mark.parametrize("value", ["x", False, -0.5, 10**400, float("inf"), float("nan")])
def test_nor_is_a_temperature(value: Any) -> None:
    with pytest.raises(SamplingError, match=r"generation_config\.temperature"):
        sampling_defaults({"temperature": value})
    given = sampling_defaults({"temperature": value, "do_sample": "no"}, given=["temperature"])
    assert given == {"temperature": 1, "top_p": 1}  # the user's is put over it


def test_no_sampling_is_temperature_0() -> None:
    """As transformers reads it, whatever the temperature beside it."""
    assert sampling_defaults({"do_sample": False, "temperature": 0.6})["temperature"] == 0
    assert sampling_defaults({"do_sample": True, "temperature": 0.6})["temperature"] == 0.6
    assert sampling_defaults({"do_sample": None})["temperature"] == 1
    with pytest.raises(SamplingError, match=r"generation_config\.do_sample"):
        sampling_defaults({"do_sample": "no"})
