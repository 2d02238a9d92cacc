"""Intervals, paired tests and bands over a few seeds or many prompts, by scipy.stats. Reports state
the methods.

Typically five seeds: Student's t for intervals and tests, the exact sign-flip permutation test in
addition, and Holm's correction where several variants are compared with one baseline. Prompts: the
bootstrap.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

CONFIDENCE = 0.95
_FEWEST = 3  # seeds that a band's interval needs
_RESAMPLES = 10_000  # of the bootstrap
_RESAMPLED_AT_ONCE = 4_000_000  # values
_EXACT_FLIPS = 2**16  # sign patterns that are enumerated; of more, so many are drawn at random


@dataclass(frozen=True)
class Interval:
    """A mean with its interval; low and high are None where one value gives no spread."""

    mean: float
    low: float | None
    high: float | None
    count: int


@dataclass(frozen=True)
class Difference:
    """Mean of the paired differences (variant less baseline), its t-interval, and the tests that it
    is 0.

    p_t: paired t-test, two-sided. p_flip: exact sign-flip permutation test; with n pairs it can't
    go below 2 / 2^n. p_holm: p_t after Holm's correction within the family; None before `holm` was
    applied or without a p_t.
    """

    mean: float
    low: float | None
    high: float | None
    count: int
    p_t: float | None
    p_flip: float | None
    p_holm: float | None = None

    @property
    def significant(self) -> bool:
        return self.p_holm is not None and self.p_holm < 1 - CONFIDENCE


def interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Mean and t-interval of independent values. Raises ValueError without values."""
    if not len(values):
        raise ValueError("no values: an interval needs at least one")
    array = np.asarray(values, dtype=np.float64)
    mean, count = float(array.mean()), len(array)
    if count < 2:
        return Interval(mean, None, None, count)
    low, high = (float(edge) for edge in _t_test(array).confidence_interval(confidence))
    return Interval(mean, low, high, count)


def interval_text(
    values: Interval | Difference | None, scale: float = 100.0, digits: int = 1, sign: str = ""
) -> str:
    """`61.2 [58.0, 64.4]`; without an interval the mean alone.

    sign: `+` shows that of positive means too.
    """
    if values is None:
        return "-"
    text = f"{scale * values.mean:{sign}.{digits}f}"
    if values.low is None or values.high is None:
        return text
    return f"{text} [{scale * values.low:{sign}.{digits}f}, {scale * values.high:{sign}.{digits}f}]"


def bootstrap_interval(values: ArrayLike, confidence: float = CONFIDENCE) -> Interval:
    """Mean of independent values and its percentile bootstrap interval (Efron & Tibshirani 1993,
    chapter 13), from 10,000 resamples of a fixed seed. Raises ValueError without values."""
    from scipy import stats  # of the extra "plot"

    array = np.asarray(values, dtype=np.float64)
    if not len(array):
        raise ValueError("no values: an interval needs at least one")
    mean, count = float(array.mean()), len(array)
    if count < 2:
        return Interval(mean, None, None, count)
    result = stats.bootstrap(
        (array,),
        np.mean,
        method="percentile",
        n_resamples=_RESAMPLES,
        rng=0,
        confidence_level=confidence,
        batch=max(_RESAMPLED_AT_ONCE // count, 1),
    )
    low, high = result.confidence_interval
    return Interval(mean, float(low), float(high), count)


def paired_difference(
    variant: Mapping[int, float], baseline: Mapping[int, float]
) -> Difference | None:
    """Of the seeds that both have, variant less baseline; None where they share none."""
    seeds = sorted(variant.keys() & baseline.keys())
    if not seeds:
        return None
    differences = [variant[seed] - baseline[seed] for seed in seeds]
    spread = interval(differences)
    return Difference(
        mean=spread.mean,
        low=spread.low,
        high=spread.high,
        count=spread.count,
        p_t=paired_t(differences),
        p_flip=sign_flip(differences),
    )


def paired_t(differences: Sequence[float]) -> float | None:
    """Two-sided p of the one-sample t-test; None for fewer than two values, and 1 where all are 0.

    Equal differences other than 0 have no spread and give 0.
    """
    if len(differences) < 2:
        return None
    array = np.asarray(differences, dtype=np.float64)
    if array.std(ddof=1) == 0:
        return 0.0 if array.any() else 1.0
    return float(_t_test(array).pvalue)


def _t_test(values: np.ndarray) -> Any:
    from scipy import stats  # of the extra "plot"

    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # equal values: the interval is their mean
        return stats.ttest_1samp(values, 0.0)


def sign_flip(differences: Sequence[float]) -> float | None:
    """Two-sided p of the sign-flip permutation test on the mean; exact up to 16 values, otherwise
    from random flips.

    None for fewer than two values.
    """
    if len(differences) < 2:
        return None
    from scipy import stats  # of the extra "plot"

    array = np.asarray(differences, dtype=np.float64)
    result = stats.permutation_test(
        (array,),
        np.mean,
        permutation_type="samples",
        n_resamples=_EXACT_FLIPS,
        vectorized=True,
        batch=4096,
        rng=0,
    )
    return float(result.pvalue)


def holm(values: Sequence[float | None]) -> list[float | None]:
    """Holm's step-down adjusted p values, in the order given; None (no test was possible) stays
    None.

    scipy has no Holm correction, and statsmodels would be a dependency for these lines alone.
    """
    order = sorted((value, index) for index, value in enumerate(values) if value is not None)
    adjusted: list[float | None] = [None] * len(values)
    largest = 0.0
    for rank, (value, index) in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * value))
        adjusted[index] = largest
    return adjusted


@dataclass(frozen=True)
class Band:
    """Mean over seeds at each x and the edges around it; `count` is how many seeds are there at
    each x.
    """

    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]
    count: list[int]


def band(curves: Sequence[tuple[Sequence[float], Sequence[float]]], points: int = 80) -> Band:
    """One band of several curves, each (x rising, y), on a common grid.

    Curves that share their x exactly are averaged there; else each is interpolated linearly on an
    even grid and never beyond its own first and last x, so a run that ended early drops out of the
    count. The grid ends where the first of the curves ends that reach 95 % of the longest. Below 3
    seeds a t-interval has little meaning (its factor is 12.7 with 2), so there the band is the
    range of the seeds.
    """
    chosen = [(np.asarray(x, np.float64), np.asarray(y, np.float64)) for x, y in curves if len(x)]
    if not chosen:
        return Band([], [], [], [], [])
    longest = max((x for x, _ in chosen), key=len)
    if all(np.array_equal(x, longest[: len(x)]) for x, _ in chosen):
        grid = longest
    else:
        start = max(x[0] for x, _ in chosen)
        ends = [x[-1] for x, _ in chosen]
        end = min(end for end in ends if end >= 0.95 * max(ends))
        grid = np.linspace(start, end, points)
    heights = np.array([np.interp(grid, x, y, left=np.nan, right=np.nan) for x, y in chosen])
    known = [
        (float(x), column[~np.isnan(column)]) for x, column in zip(grid, heights.T, strict=True)
    ]
    known = [(x, column) for x, column in known if len(column)]
    edges = [_edges(column) for _, column in known]
    return Band(
        [x for x, _ in known],
        [float(column.mean()) for _, column in known],
        [low for low, _ in edges],
        [high for _, high in edges],
        [len(column) for _, column in known],
    )


def _edges(values: np.ndarray) -> tuple[float, float]:
    spread = interval(values.tolist())
    if len(values) < _FEWEST or spread.low is None or spread.high is None:
        return float(values.min()), float(values.max())
    return spread.low, spread.high
