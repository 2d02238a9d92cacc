"""Intervals and tests against tables and numbers worked by hand."""

import math

import numpy as np
import pytest

from megatron_gspo.tools.compare.statistics import (
    band,
    bootstrap_interval,
    holm,
    interval,
    paired_difference,
    paired_t,
)


@pytest.mark.parametrize(
    "freedom, quantile",
    [(1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645), (9, 2.26216), (30, 2.04227)],
)
def test_intervals_have_the_t_quantiles_of_the_printed_table(freedom, quantile):
    values = [0.0] * freedom + [1.0]
    estimate = interval(values)
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    assert (estimate.high - estimate.mean) / error == pytest.approx(quantile, abs=6e-5)
    assert (estimate.mean - estimate.low) / error == pytest.approx(quantile, abs=6e-5)


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 8, 11])
def test_p_of_the_t_test_is_the_integral_of_the_density(freedom):
    values = [1.0, 3.0] + [2.0] * (freedom - 1)
    t = 2.0 / (float(np.std(values, ddof=1)) / math.sqrt(len(values)))
    scale = math.gamma((freedom + 1) / 2) / (math.sqrt(freedom * math.pi) * math.gamma(freedom / 2))
    x = np.linspace(0.0, t, 200_001)
    density = scale * (1 + x * x / freedom) ** (-(freedom + 1) / 2)
    area = float(np.sum((density[1:] + density[:-1]) / 2 * np.diff(x)))
    assert paired_t(values) == pytest.approx(1 - 2 * area, abs=1e-8)


def test_paired_difference_uses_the_shared_seeds():
    difference = paired_difference(
        {1: 0.9, 2: 0.8, 3: 0.7, 9: 0.0}, {1: 0.5, 2: 0.6, 3: 0.4, 7: 1.0}
    )
    assert difference.count == 3
    assert difference.mean == pytest.approx(0.3)  # 0.4, 0.2, 0.3: standard deviation 0.1
    assert difference.high - difference.mean == pytest.approx(
        4.30265 * 0.1 / math.sqrt(3), abs=1e-5
    )
    # t = 0.3 / 0.057735 = 5.19615, two degrees: p = 1 - t / sqrt(2 + t^2) = 1 - sqrt(27 / 29)
    assert difference.p_t == pytest.approx(1 - math.sqrt(27 / 29), abs=1e-9)
    assert paired_difference({1: 1.0}, {2: 1.0}) is None


def test_holm_by_hand():
    # sorted 0.01, 0.02, 0.03, 0.04: times 4, 3, 2, 1 = 0.04, 0.06, 0.06, 0.04, made monotone
    assert holm([0.04, 0.01, None, 0.03, 0.02]) == pytest.approx([0.06, 0.04, None, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([None]) == [None]


def test_band_by_hand():
    curve = band([{0: 0.0, 1: 1.0}, {0: 1.0, 1: 2.0}, {0: 2.0, 1: 3.0}])
    assert curve.x == [0, 1]
    assert curve.mean == [1.0, 2.0]
    # standard deviation 1, error 1 / sqrt(3), t(2) = 4.30265
    assert curve.high[0] == pytest.approx(1 + 4.30265 / math.sqrt(3), abs=1e-4)
    assert curve.count == [3, 3]


def test_the_bootstrap_is_a_naive_one_within_its_noise():
    values = np.random.default_rng(0).choice([0.0, 0.25, 0.5, 1.0], 60)
    estimate = bootstrap_interval(values)
    rng = np.random.default_rng(1)
    means = [values[[int(i) for i in rng.integers(0, 60, 60)]].mean() for _ in range(10_000)]
    low, high = np.percentile(means, [2.5, 97.5])
    assert estimate.mean == values.mean() and estimate.count == 60
    assert (estimate.low, estimate.high) == pytest.approx((low, high), abs=0.01)
    # the normal approximation of the mean
    error = 1.96 * values.std() / np.sqrt(60)
    assert (estimate.low, estimate.high) == pytest.approx(
        (estimate.mean - error, estimate.mean + error), abs=0.01
    )
    assert bootstrap_interval(values) == estimate
