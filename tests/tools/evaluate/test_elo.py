"""Ratings against worked numbers, closed forms and a naive search."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megatron_gspo.tools.evaluate.elo import CHI_SQUARE, estimate_rating, expected_score


@pytest.mark.parametrize(
    ("lead", "published"),  # Elo's expected scores as federations print them, to two places
    [(0, 0.50), (50, 0.57), (100, 0.64), (200, 0.76), (300, 0.85), (400, 0.91), (-100, 0.36), (-400, 0.09)],
)
def test_expected_scores_are_the_published_ones(lead, published):
    assert round(float(expected_score(1500 + lead, 1500)), 2) == published
    assert float(expected_score(1500 + 400, 1500)) == pytest.approx(10 / 11, abs=1e-15)


@pytest.mark.parametrize(("solved", "problems"), [(5, 10), (10, 11), (1, 11), (3, 4)])
def test_problems_of_one_rating_have_a_closed_form(solved, problems):
    outcome = [1.0] * solved + [0.0] * (problems - solved)
    found = estimate_rating(outcome, [1700.0] * problems)
    odds = solved / (problems - solved)
    assert found.rating == pytest.approx(1700 + 400 * math.log10(odds), abs=1e-6)
    assert found.problems == problems


def naive_log_likelihood(rating: float, outcome: list[float], difficulty: list[float]) -> float:
    total = 0.0
    for y, d in zip(outcome, difficulty, strict=True):
        p = 1.0 / (1.0 + 10.0 ** ((d - rating) / 400.0))
        total += y * math.log(p) + (1.0 - y) * math.log(1.0 - p)
    return total


def test_mixed_problems_against_a_search_over_all_ratings():
    rng = np.random.default_rng(0)
    difficulty = rng.integers(8, 30, 40) * 100.0
    outcome = (rng.random((40, 4)) < expected_score(1650, difficulty)[:, None]).mean(axis=1)
    found = estimate_rating(outcome, difficulty)
    grid = np.arange(0, 4000, 0.5)
    curve = np.array([naive_log_likelihood(r, outcome.tolist(), difficulty.tolist()) for r in grid])
    assert found.rating == pytest.approx(grid[curve.argmax()], abs=0.5)
    inside = grid[curve >= curve.max() - CHI_SQUARE / 2]
    assert (found.low, found.high) == pytest.approx((inside[0], inside[-1]), abs=0.5)


def test_the_interval_covers_the_true_rating_as_often_as_it_says():
    rng = np.random.default_rng(1)
    difficulty = rng.integers(8, 30, 60) * 100.0
    p = expected_score(1800, difficulty)
    found = [estimate_rating(rng.random(60) < p, difficulty) for _ in range(400)]
    covered = np.mean([f.low <= 1800 <= f.high for f in found])
    assert 0.92 <= covered <= 0.98  # 0.95, and three standard errors of 400 trials


def test_all_or_nothing_has_one_end():
    every = estimate_rating([1.0] * 3, [1000.0, 1200.0, 1400.0])
    assert every.rating is None and every.high is None
    # the likelihood of three solved problems falls to exp(-CHI_SQUARE / 2)
    assert naive_log_likelihood(every.low, [1.0] * 3, [1000.0, 1200.0, 1400.0]) == pytest.approx(-CHI_SQUARE / 2)
    none = estimate_rating([0.0] * 3, [1000.0, 1200.0, 1400.0])
    assert none.rating is None and none.low is None and none.high == pytest.approx(2400 - every.low, abs=1e-5)


@pytest.mark.parametrize(
    ("solved", "difficulty"), [([], []), ([1.0], [1000.0, 1200.0]), ([1.5], [1000.0]), ([1.0], [math.nan])]
)
def test_other_values_are_refused(solved, difficulty):
    with pytest.raises(ValueError):
        estimate_rating(solved, difficulty)
