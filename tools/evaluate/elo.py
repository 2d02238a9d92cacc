"""A rating from the problems that a model solves: the estimate of LiveCodeBench Pro (arXiv
2506.11928, appendix A3.2).

A model of rating r solves a problem of rating d with probability 1 / (1 + 10^((d - r) / 400)):
Elo's expected score, and what Codeforces means by a problem's rating (solved by half of the
participants of that rating). With a Gaussian prior the rating is the maximum of the posterior, and
its standard deviation is that of the posterior's curvature there. The paper does not give the
prior's numbers. Here they are of 717,421 rated participants of Codeforces, whose ratings CodeElo
(arXiv 2501.01257) publishes: a model is taken for one of them until its results say otherwise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

PRIOR_MEAN, PRIOR_STD = 1056.0, 446.0  # rating points
SCALE = 400.0 / math.log(10.0)  # rating points per nat
_NORMAL_QUANTILE = 1.959963984540054  # 97.5 %
_BEYOND = (
    8000.0  # rating points outside of the problems' ratings; there the prior alone has a slope
)


@dataclass(frozen=True)
class Rating:
    """rating: mode of the posterior. low, high: 95 % interval of its normal approximation.
    problems: how many have a rating."""

    rating: float
    low: float
    high: float
    problems: int


def expected_score(rating: ArrayLike, difficulty: ArrayLike) -> np.ndarray:
    """The probability that a model of `rating` solves a problem of rating `difficulty`."""
    return 1.0 / (
        1.0 + np.exp((np.asarray(difficulty, np.float64) - np.asarray(rating, np.float64)) / SCALE)
    )


def estimate_rating(solved: ArrayLike, difficulty: ArrayLike) -> Rating:
    """The maximum a posteriori rating and its interval.

    solved: [problems] share of each problem's responses that solve it, in [0, 1]; a problem counts
    once, however many responses it has. difficulty: [problems] their ratings. Raises ValueError for
    other values or shapes.
    """
    y = np.asarray(solved, np.float64)
    d = np.asarray(difficulty, np.float64)
    if y.ndim != 1 or y.shape != d.shape or not len(y):
        raise ValueError(
            f"solved {y.shape} and difficulty {d.shape} are not of the same problems, at least one"
        )
    if not (np.isfinite(d).all() and (y >= 0).all() and (y <= 1).all()):
        raise ValueError("difficulty must be finite, and solved in [0, 1]")
    from scipy.optimize import brentq  # of the extra "plot"

    def slope(rating: float) -> float:
        return (
            float((y - expected_score(rating, d)).sum()) / SCALE
            - (rating - PRIOR_MEAN) / PRIOR_STD**2
        )

    ends = min(d.min(), PRIOR_MEAN) - _BEYOND, max(d.max(), PRIOR_MEAN) + _BEYOND
    best = float(brentq(slope, *ends, xtol=1e-9))
    p = expected_score(best, d)
    curvature = float((p * (1.0 - p)).sum()) / SCALE**2 + 1.0 / PRIOR_STD**2
    half = _NORMAL_QUANTILE / math.sqrt(curvature)
    return Rating(best, best - half, best + half, len(y))
