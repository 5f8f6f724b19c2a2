"""Fitting codebooks: golden books, the histogram rule by rule, repairs, both paths."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4q.artifact.errors import PayloadSizeError
from ds4q.artifact.formats import codec_for, hfp4g32
from ds4q.artifact.numeric import bf16_to_f32
from ds4q.artifact.types import ROCMFP2_MIX, ROCMFP3_MIX
from ds4q.quantize import books
from ds4q.quantize.books import BookFit, add_values, lloyd, to_bf16
from ds4q.quantize.errors import JobError, SourceValueError
from tests.checks import Array, check_parity, check_refused, same_bits
from tests.quantize.exact.sources import importance_of, mixed_codes

VECTORS = np.load(Path(__file__).parents[1] / "data" / "golden" / "rocmfpx.npz")
KINDS = {8: ROCMFP3_MIX, 4: ROCMFP2_MIX}
BINS = 4097


def empty() -> Array:
    return np.zeros((2, BINS))


def words(*values: float) -> list[int]:
    return [int(w) for w in np.array(values, np.float32).view(np.uint32) >> 16]


@pytest.mark.parametrize("levels", [8, 4])
def test_golden_books(levels: int) -> None:
    """Fitted to 4,096 values, of which ``mixenc_x`` has the first 512."""
    rng = np.random.default_rng(7)
    x = (rng.standard_normal(4096) * 0.03).astype(np.float32)
    x[::37] *= 3
    same_bits(x[:512], VECTORS["mixenc_x"])
    histograms = empty()
    assert add_values(x[None], np.ones(4096, np.float32), histograms) == -1
    fitted = [to_bf16(lloyd(histogram, levels)) for histogram in histograms]
    golden = VECTORS[f"mixenc{KINDS[levels].id}_book"].tolist()
    assert [word for found, _ in fitted for word in found] == golden
    assert [repairs for _, repairs in fitted] == [0, 0]


def test_values_go_to_bins_by_population() -> None:
    """One half where most values are small, one where all are alike, one of zeros."""
    x = np.zeros((1, 64), np.float32)
    x[0, :16] = [4, -4, 1, -0.5, *[0.0] * 12]
    x[0, 16:32] = [0.5, -0.25] * 8
    x[0, 48:] = -0.0
    importance = np.arange(64, dtype=np.float32)
    histograms = empty()
    assert add_values(x, importance, histograms) == -1
    first, second = ({int(b): h[b] for b in np.flatnonzero(h)} for h in histograms)
    # Root mean square 1.03 of 4 is below 0.52; a half of zeros counts 16, whatever its importance.
    assert first == {0: 1, 2048 - 256: 3, 2048 + 512: 2, 2048: sum(range(4, 16)) + 32}
    assert second == {4096: sum(range(16, 32, 2)), 1024: sum(range(17, 32, 2))}


def test_the_border_between_populations() -> None:
    """The root mean square of a half over its largest value: below 0.52, or not."""
    k = 16
    for others, population in ((0.4708, 0), (0.4710, 1)):
        x = np.full((1, k), others, np.float32)
        x[0, 5] = 1
        histograms = empty()
        add_values(x, np.ones(k, np.float32), histograms)
        assert histograms[population].sum() == k, f"{np.sqrt((x * x).mean())}"
        assert not histograms[1 - population].any()


@given(st.integers(0, 2**32 - 1), st.booleans())
def test_codes_and_values_give_the_same_histograms(seed: int, weighted: bool) -> None:
    rng = np.random.default_rng(seed)
    k = 32 * int(rng.integers(1, 5))
    rows = int(rng.integers(1, 6))
    codes = mixed_codes(rng, rows, k)
    scales = rng.integers(0, 253, (rows, k // 32), dtype=np.uint8)
    importance = importance_of(rng, k, gaps=True) if weighted else np.ones(k, np.float32)
    result, _ = check_parity(books._add, (codes, scales, importance, rng.random((2, BINS))))
    assert result == -1


def test_every_pair_of_codes_has_the_bin_of_its_ratio() -> None:
    codes = np.zeros((8 * 16, 32), np.uint8)
    for at in range(len(codes)):
        m, code = divmod(at, 16)
        codes[at] = min(code & 7, m) | code & 8
        codes[at, 3] = m
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)
    for e in (0, 120, 252):
        scales = np.full((len(codes), 1), e, np.uint8)
        check_parity(books._add, (packed, scales, np.ones(32, np.float32), empty()))


@pytest.mark.parametrize(
    ("e", "code", "finite"),
    [
        (252, 7, True),
        (253, 5, True),
        (253, 6, False),
        (254, 3, True),
        (254, 4, False),
        (255, 0, False),
    ],
)
def test_a_weight_that_is_not_finite_is_named(e: int, code: int, finite: bool) -> None:
    codes, scales = np.full((3, 32), 0x21, np.uint8), np.full((3, 2), 120, np.uint8)
    codes[1, 24:], scales[1, 1] = code << 4, e
    if code == 0:
        codes[1, 16:24] = 0
    fit = BookFit(4)
    if finite:
        fit.add(codes, scales, None)
        return
    first = 48 if code else 32
    check_refused(
        SourceValueError,
        lambda: fit.add(codes, scales, None),
        says=["not finite", f"row 1, from column {first} on"],
    )


def test_what_does_not_agree_is_refused() -> None:
    codes, scales, fit = np.zeros((2, 32), np.uint8), np.zeros((2, 2), np.uint8), BookFit(4)
    check_refused(PayloadSizeError, lambda: fit.add(codes[:, :31], scales, None))
    check_refused(PayloadSizeError, lambda: fit.add(codes[:1], scales, None))
    check_refused(PayloadSizeError, lambda: fit.add(codes, scales, np.ones(63, np.float32)))
    for bad in (-1, np.nan, np.inf):
        weights = np.ones(64, np.float32)
        weights[5] = bad
        call = functools.partial(fit.add, codes, scales, weights)
        check_refused(SourceValueError, call, says=["importance"])
    fit.add(codes, scales, None)


def test_nothing_to_fit_is_refused() -> None:
    check_refused(JobError, BookFit(8).fit, says=["no weights"])


@pytest.mark.parametrize("levels", [8, 4])
def test_importance_of_zeros_is_as_none(levels: int) -> None:
    """Of gate alone too: what up weighs stays."""
    rng = np.random.default_rng(levels)
    codes, scales = mixed_codes(rng, 12, 256), rng.integers(112, 126, (12, 8), dtype=np.uint8)
    some = importance_of(rng, 256, gaps=True)
    for up in (some, np.zeros(256, np.float32)):
        silent, plain = BookFit(levels), BookFit(levels)
        silent.add(codes, scales, np.full(256, -0.0, np.float32))
        plain.add(codes, scales, None)
        silent.add(codes[::-1], scales[::-1], up)
        plain.add(codes[::-1], scales[::-1], up if up.any() else None)
        assert silent.fit() == plain.fit()


@pytest.mark.parametrize("levels", [8, 4])
def test_books_of_codes_are_those_of_their_values(levels: int) -> None:
    """Gate, then up, in several runs of rows; the table row is one that the codec takes."""
    rng = np.random.default_rng(levels)
    fit, histograms = BookFit(levels), empty()
    importance = importance_of(rng, 256, gaps=False)
    for _ in range(2):
        codes, scales = mixed_codes(rng, 12, 256), rng.integers(112, 126, (12, 8), dtype=np.uint8)
        for run in (slice(0, 7), slice(7, 12)):
            fit.add(codes[run], scales[run], importance)
        add_values(hfp4g32.source_values(codes, scales), importance, histograms)
    fitted = fit.fit()
    expected = [to_bf16(lloyd(histogram, levels)) for histogram in histograms]
    assert fitted.row.words.tolist() == [found for found, _ in expected]
    assert fitted.repairs == sum(repairs for _, repairs in expected)
    assert fitted.row.mode == 1
    assert fit.fit() == fitted
    codec_for(KINDS[levels].id, fitted.row)


@pytest.mark.parametrize("levels", [8, 4])
def test_an_expert_of_zeros_has_books_that_hold_it(levels: int) -> None:
    fit = BookFit(levels)
    fit.add(np.full((2, 64), 0x80, np.uint8), np.full((2, 4), 120, np.uint8), None)
    fitted = fit.fit()
    assert fitted.row.words.tolist() == [[0, *range(0x80, 0x80 + levels - 1)]] * 2
    assert fitted.repairs == 2 * (levels - 1)
    codec = codec_for(KINDS[levels].id, fitted.row)
    zeros = np.zeros((1, 128), np.float32)
    assert not codec.decode(codec.encode(zeros), (1, 128)).any()


def test_an_empty_population_takes_the_book_of_both() -> None:
    fit = BookFit(4)
    codes = np.full((4, 64), 0x2A, np.uint8)  # all of one magnitude: population 1
    fit.add(codes, np.full((4, 4), 120, np.uint8), None)
    first, second = fit.fit().row.words
    assert first.tolist() == second.tolist()


def test_lloyd_by_hand() -> None:
    """Six bins, two levels: centres begin at the quartiles and settle on the means."""
    histogram = np.zeros(BINS)
    histogram[[0, 1024, 2048, 3072, 3584, 4096]] = [1, 1, 1, 1, 2, 2]
    # Coordinates -1, -.5, 0, .5, .75, 1: the low quartile is -.5, the high one .75; then the
    # border wanders from .125 (0 below) to .125 again: means -.5 and (.5 + 1.5 + 2) / 5.
    assert lloyd(histogram, 2).tolist() == [-0.5, np.float32(0.8)]


def test_a_bin_on_the_border_goes_to_the_lower_centre() -> None:
    histogram = np.zeros(BINS)
    histogram[[0, 2048, 4096]] = 1
    assert lloyd(histogram, 2).tolist() == [-0.5, 1]


def test_a_centre_without_bins_stays() -> None:
    histogram = np.zeros(BINS)
    histogram[[0, 4096]] = [100, 1]
    # All begin in the heavy bin. The last one takes the other, and those between get nothing.
    assert lloyd(histogram, 4).tolist() == [-1, -1, -1, 1]


def test_levels_are_rounded_to_even_and_moved_apart() -> None:
    halfway = np.array([0x3F008000, 0x3F018000, 0x3F400000, 0x3F7FFFFF], np.uint32)
    assert to_bf16(halfway.view(np.float32)) == ([0x3F00, 0x3F02, 0x3F40, 0x3F80], 0)
    same = np.array([-0.5, -0.5, -0.5, 0.25], np.float32)
    assert to_bf16(same) == ([0xBF00, 0xBEFF, 0xBEFE, *words(0.25)], 2)
    zeros = np.array([-0.0, 0, 0, 1], np.float32)
    assert to_bf16(zeros) == ([0x8000, 0x0080, 0x0081, *words(1)], 2)
    # The last two collide at 1: the top is moved up, set back, and the others step down.
    ones = np.array([0.25, 1, 1, 1], np.float32)
    assert to_bf16(ones) == ([*words(0.25), 0x3F7E, 0x3F7F, 0x3F80], 3)
    values = bf16_to_f32(np.array([0x3F7E, 0x3F7F], np.uint16)).tolist()
    assert values == [0.9921875, 0.99609375]


def test_levels_beyond_minus_one_are_an_error() -> None:
    check_refused(JobError, lambda: to_bf16(np.array([-1.5, 0, 0.5, 1], np.float32)))
