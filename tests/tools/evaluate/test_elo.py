"""Ratings against published numbers, closed forms and a naive search."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megatron_gspo.tools.evaluate.elo import PRIOR_MEAN, PRIOR_STD, estimate_rating, expected_score


@pytest.mark.parametrize(
    ("lead", "published"),  # Elo's expected scores as federations print them, to two places
    [
        (0, 0.50),
        (50, 0.57),
        (100, 0.64),
        (200, 0.76),
        (300, 0.85),
        (400, 0.91),
        (-100, 0.36),
        (-400, 0.09),
    ],
)
def test_expected_scores_are_the_published_ones(lead, published):
    assert round(float(expected_score(1500 + lead, 1500)), 2) == published
    assert float(expected_score(1500 + 400, 1500)) == pytest.approx(10 / 11, abs=1e-15)


def naive_log_posterior(rating: float, outcome: list[float], difficulty: list[float]) -> float:
    """L(r) of arXiv 2506.11928, appendix A3.2."""
    total = -((rating - PRIOR_MEAN) ** 2) / (2 * PRIOR_STD**2)
    for y, d in zip(outcome, difficulty, strict=True):
        p = 1.0 / (1.0 + 10.0 ** ((d - rating) / 400.0))
        total += y * math.log(p) + (1.0 - y) * math.log(1.0 - p)
    return total


def published_interval(
    rating: float, outcome: list[float], difficulty: list[float]
) -> tuple[float, float]:
    """By the paper's second difference with a step of 0.1."""
    below, at, above = (
        naive_log_posterior(rating + step, outcome, difficulty) for step in (-0.1, 0.0, 0.1)
    )
    std = math.sqrt(-(0.1**2) / (above - 2 * at + below))
    return rating - 1.96 * std, rating + 1.96 * std


@pytest.mark.parametrize("kind", ["shares", "one", "all", "none"])
def test_the_published_formula_by_a_search_over_all_ratings(kind):
    rng = np.random.default_rng(0)
    difficulty = rng.integers(8, 30, 40) * 100.0
    outcome = (rng.random((40, 4)) < expected_score(1650, difficulty)[:, None]).mean(axis=1)
    if kind != "shares":
        difficulty = difficulty[:1] if kind == "one" else difficulty
        outcome = np.full(len(difficulty), float(kind != "none"))
    estimate = estimate_rating(outcome, difficulty)
    grid = np.arange(-1000, 4500, 0.5)
    p = 1.0 / (1.0 + 10.0 ** ((difficulty[:, None] - grid) / 400.0))
    likelihood = outcome[:, None] * np.log(p) + (1.0 - outcome[:, None]) * np.log(1.0 - p)
    curve = likelihood.sum(axis=0) - (grid - PRIOR_MEAN) ** 2 / (2 * PRIOR_STD**2)
    assert estimate.rating == pytest.approx(grid[curve.argmax()], abs=0.5)
    interval = published_interval(estimate.rating, outcome.tolist(), difficulty.tolist())
    assert (estimate.low, estimate.high) == pytest.approx(interval, rel=1e-3)
    assert estimate.problems == len(difficulty)


@pytest.mark.parametrize(
    ("solved", "difficulty"),
    [([], []), ([1.0], [1000.0, 1200.0]), ([1.5], [1000.0]), ([1.0], [math.nan])],
)
def test_other_values_are_refused(solved, difficulty):
    with pytest.raises(ValueError):
        estimate_rating(solved, difficulty)
