"""Intervals, paired tests and bands over a handful of seeds. Plain numpy; every method is stated in the report.

Seeds are few (five is usual), so: Student's t for intervals, the exact sign-flip permutation test beside it, and Holm's
correction where several variants are compared with one baseline.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95
_FEWEST = 3  # seeds that a band's interval needs
_MOST_FLIPS = 16  # 2^16 sign patterns are enumerated; more pairs are drawn at random


@dataclass(frozen=True)
class Interval:
    """A mean with its t-interval; low and high are None where one value gives no spread."""

    mean: float
    low: float | None
    high: float | None
    count: int


@dataclass(frozen=True)
class Difference:
    """Mean of the paired differences (variant less baseline), its t-interval, and the tests that it is 0.

    p_t: paired t-test, two-sided. p_flip: exact sign-flip permutation test; with n pairs it can't go below 2 / 2^n.
    p_holm: p_t after Holm's correction within the family; None before `holm` was applied or without a p_t.
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


def t_cdf(x: float, freedom: int) -> float:
    """Student's t distribution function for a whole number of degrees of freedom, by its finite trigonometric sum.

    Abramowitz and Stegun 26.7.3 and 26.7.4. Raises ValueError below 1 degree.
    """
    if freedom < 1:
        raise ValueError(f"freedom = {freedom}: must be 1 or more; compare at least two values")
    theta = math.atan(abs(x) / math.sqrt(freedom))
    cosine, sine = math.cos(theta), math.sin(theta)
    if freedom % 2:
        term, total = cosine, 0.0
        for k in range(1, (freedom - 1) // 2 + 1):
            total += term
            term *= cosine * cosine * 2 * k / (2 * k + 1)
        inside = 2 / math.pi * (theta + sine * total)
    else:
        term, total = 1.0, 0.0
        for k in range(1, freedom // 2 + 1):
            total += term
            term *= cosine * cosine * (2 * k - 1) / (2 * k)
        inside = sine * total
    return 0.5 + math.copysign(inside / 2, x)


@functools.cache
def t_quantile(confidence: float, freedom: int) -> float:
    """The x with probability `confidence` between -x and x, by bisection to 1e-10."""
    low, high = 0.0, 1.0
    while 2 * t_cdf(high, freedom) - 1 < confidence:
        high *= 2
    while high - low > 1e-10 * max(1.0, high):
        middle = (low + high) / 2
        if 2 * t_cdf(middle, freedom) - 1 < confidence:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Mean and t-interval of independent values. Raises ValueError without values."""
    if not len(values):
        raise ValueError("no values: an interval needs at least one")
    array = np.asarray(values, dtype=np.float64)
    mean, count = float(array.mean()), len(array)
    if count < 2:
        return Interval(mean, None, None, count)
    half = t_quantile(confidence, count - 1) * float(array.std(ddof=1)) / math.sqrt(count)
    return Interval(mean, mean - half, mean + half, count)


def paired_difference(variant: Mapping[int, float], baseline: Mapping[int, float]) -> Difference | None:
    """Of the seeds that both have, variant less baseline; None where they share none."""
    seeds = sorted(variant.keys() & baseline.keys())
    if not seeds:
        return None
    differences = [variant[seed] - baseline[seed] for seed in seeds]
    found = interval(differences)
    return Difference(found.mean, found.low, found.high, found.count, paired_t(differences), sign_flip(differences))


def paired_t(differences: Sequence[float]) -> float | None:
    """Two-sided p of the one-sample t-test; None for fewer than two values, and 1 where all are 0.

    Equal differences that aren't 0 have no spread and give 0.
    """
    if len(differences) < 2:
        return None
    array = np.asarray(differences, dtype=np.float64)
    error = float(array.std(ddof=1)) / math.sqrt(len(array))
    mean = float(array.mean())
    if error == 0:
        return 1.0 if mean == 0 else 0.0
    return 2 * (1 - t_cdf(abs(mean) / error, len(array) - 1))


def sign_flip(differences: Sequence[float], draws: int = 20_000) -> float | None:
    """Two-sided p of the sign-flip permutation test on the mean; exact up to 16 values, else from random flips.

    None for fewer than two values.
    """
    if len(differences) < 2:
        return None
    array = np.asarray(differences, dtype=np.float64)
    if len(array) <= _MOST_FLIPS:
        signs = np.array(list(itertools.product((1.0, -1.0), repeat=len(array))))
    else:
        signs = np.random.default_rng(0).choice((1.0, -1.0), size=(draws, len(array)))
        signs[0] = 1.0  # the observed one belongs to the reference set
    sums = np.abs(signs @ array)
    return float(np.mean(sums >= abs(array.sum()) * (1 - 1e-12) - 1e-15))


def holm(values: Sequence[float | None]) -> list[float | None]:
    """Holm's step-down adjusted p values, in the order given; None (no test was possible) stays None."""
    order = sorted((value, place) for place, value in enumerate(values) if value is not None)
    adjusted: list[float | None] = [None] * len(values)
    largest = 0.0
    for rank, (value, place) in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * value))
        adjusted[place] = largest
    return adjusted


@dataclass(frozen=True)
class Band:
    """Mean over seeds at each x and the edges around it; `count` is how many seeds are there at each x."""

    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]
    count: list[int]


def band(curves: Sequence[tuple[Sequence[float], Sequence[float]]], points: int = 80) -> Band:
    """One band of several curves, each (x rising, y), on a common grid.

    Curves that share their x exactly are averaged there; else each is interpolated linearly on an even grid and never
    beyond its own first and last x, so a run that ended early drops out of the count. The grid ends where the first of
    the curves ends that reach 95 % of the longest. Below 3 seeds a t-interval says next to nothing (its factor is 12.7
    with 2), so there the band is the range of the seeds.
    """
    chosen = [(np.asarray(x, np.float64), np.asarray(y, np.float64)) for x, y in curves if len(x)]
    if not chosen:
        return Band([], [], [], [], [])
    longest = max((x for x, _ in chosen), key=len)
    if all(np.array_equal(x, longest[: len(x)]) for x, _ in chosen):
        grid = longest
    else:
        start, ends = max(x[0] for x, _ in chosen), [x[-1] for x, _ in chosen]
        end = min(end for end in ends if end >= 0.95 * max(ends))
        grid = np.linspace(start, end, points)
    rows = np.array([np.interp(grid, x, y, left=np.nan, right=np.nan) for x, y in chosen])
    known = [(float(x), column[~np.isnan(column)]) for x, column in zip(grid, rows.T, strict=True)]
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
    found = interval(values)
    if len(values) < _FEWEST or found.low is None or found.high is None:
        return float(values.min()), float(values.max())
    return found.low, found.high
