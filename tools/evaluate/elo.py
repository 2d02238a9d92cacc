"""A rating from the problems that a model solves, by Elo's model.

A model of rating r solves a problem of rating d with probability 1 / (1 + 10^((d - r) / 400)): Elo's expected score,
and what Codeforces means by a problem's rating (solved by half of the participants of that rating). r maximises the
likelihood of what was solved; LiveCodeBench Pro (arXiv 2506.11928) rates models against problems with this likelihood
and a prior, which is left out here. The rank in a contest (CodeElo, arXiv 2501.01257) is another estimate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

CHI_SQUARE = 3.841458820694124  # 95 % quantile, one degree of freedom
SCALE = 400.0 / math.log(10.0)  # rating points per nat
_BEYOND = 8000.0  # rating points outside of the problems' ratings; there the likelihood is flat in float64


@dataclass(frozen=True)
class Rating:
    """rating: None where all problems are solved, or none. low, high: 95 % interval by the likelihood ratio; None where
    it has no end. problems: how many have a rating."""

    rating: float | None
    low: float | None
    high: float | None
    problems: int


def expected_score(rating: ArrayLike, difficulty: ArrayLike) -> np.ndarray:
    """The probability that a model of `rating` solves a problem of rating `difficulty`."""
    return 1.0 / (1.0 + np.exp((np.asarray(difficulty, np.float64) - np.asarray(rating, np.float64)) / SCALE))


def estimate_rating(solved: ArrayLike, difficulty: ArrayLike) -> Rating:
    """The maximum-likelihood rating and its likelihood-ratio interval.

    solved: [problems] share of each problem's responses that solve it, in [0, 1]; a problem counts once, however many
    responses it has. difficulty: [problems] their ratings. Raises ValueError for other values or shapes.
    """
    y, d = np.asarray(solved, np.float64), np.asarray(difficulty, np.float64)
    if y.ndim != 1 or y.shape != d.shape or not len(y):
        raise ValueError(f"solved {y.shape} and difficulty {d.shape} are not of the same problems, at least one")
    if not (np.isfinite(d).all() and (y >= 0).all() and (y <= 1).all()):
        raise ValueError("difficulty must be finite, and solved in [0, 1]")
    from scipy.optimize import brentq  # of the extra "plot"

    low, high = float(d.min()) - _BEYOND, float(d.max()) + _BEYOND

    def slope(rating: float) -> float:
        return float((y - expected_score(rating, d)).sum())

    def log_likelihood(rating: float) -> float:
        x = (d - rating) / SCALE
        return float(-(y * np.logaddexp(0.0, x) + (1.0 - y) * np.logaddexp(0.0, -x)).sum())

    best = low if not y.any() else high if (y == 1).all() else brentq(slope, low, high, xtol=1e-9)
    cut = log_likelihood(best) - CHI_SQUARE / 2

    def end(outside: float) -> float | None:
        if best == outside:
            return None
        return float(brentq(lambda rating: log_likelihood(rating) - cut, *sorted((best, outside)), xtol=1e-6))

    return Rating(None if best in (low, high) else float(best), end(low), end(high), len(y))
