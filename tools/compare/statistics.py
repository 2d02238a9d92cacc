"""Intervals, paired tests and bands over a few seeds or many prompts, by scipy.stats. Reports state
the methods.

Typically five seeds: Student's t for intervals and tests, and Holm's correction where several
variants are compared with one baseline. Prompts: the bootstrap.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from megatron_gspo.tracking.run_directory import evenly_spaced

CONFIDENCE = 0.95
_FEWEST = 3  # seeds that a band's interval needs
_RESAMPLES = 10_000  # of the bootstrap
_RESAMPLED_AT_ONCE = 4_000_000  # values


@dataclass(frozen=True)
class Interval:
    """A mean with its interval; low and high are None where one value gives no spread."""

    mean: float
    low: float | None
    high: float | None
    count: int


@dataclass(frozen=True)
class Difference:
    """Mean of the paired differences (variant less baseline), its t-interval, and the test that it
    is 0.

    p_t: paired t-test, two-sided. p_holm: p_t after Holm's correction within the family; None
    before `holm` was applied or without a p_t.
    """

    mean: float
    low: float | None
    high: float | None
    count: int
    p_t: float | None
    p_holm: float | None = None

    @property
    def significant(self) -> bool:
        return self.p_holm is not None and self.p_holm < 1 - CONFIDENCE


def interval(values: Sequence[float]) -> Interval:
    """Mean and t-interval of independent values. Raises ValueError without values."""
    if not len(values):
        raise ValueError("no values: an interval needs at least one")
    array = np.asarray(values, dtype=np.float64)
    mean = float(array.mean())
    count = len(array)
    if count < 2:
        return Interval(mean, None, None, count)
    low, high = (float(edge) for edge in _t_test(array).confidence_interval(CONFIDENCE))
    return Interval(mean, low, high, count)


def interval_text(
    values: Interval | Difference | None, sign: str = "", *, scale: float = 100.0, digits: int = 1
) -> str:
    """In percent, `61.2 [58.0, 64.4]`; without an interval the mean alone.

    sign: `+` shows that of positive means too. scale: 1 is no percent. digits: after the point.
    """
    if values is None:
        return "-"
    spec = f"{sign}.{digits}f"
    text = f"{scale * values.mean:{spec}}"
    if values.low is None or values.high is None:
        return text
    return f"{text} [{scale * values.low:{spec}}, {scale * values.high:{spec}}]"


def bootstrap_interval(values: ArrayLike) -> Interval:
    """Mean of independent values and its percentile bootstrap interval (Efron & Tibshirani 1993,
    chapter 13), from 10,000 resamples of a fixed seed. Raises ValueError without values."""
    from scipy import stats  # of the extra "plot"

    array = np.asarray(values, dtype=np.float64)
    if not len(array):
        raise ValueError("no values: an interval needs at least one")
    mean = float(array.mean())
    count = len(array)
    if count < 2:
        return Interval(mean, None, None, count)
    result = stats.bootstrap(
        (array,),
        np.mean,
        method="percentile",
        n_resamples=_RESAMPLES,
        rng=0,
        confidence_level=CONFIDENCE,
        batch=max(_RESAMPLED_AT_ONCE // count, 1),
    )
    low, high = result.confidence_interval
    return Interval(mean, float(low), float(high), count)


def paired_difference(
    variant: Mapping[int, float], baseline: Mapping[int, float]
) -> Difference | None:
    """Variant less baseline over the seeds that both have; None where they share none."""
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


def band(curves: Sequence[Mapping[float, float]], points: int = 80) -> Band:
    """One band of several curves {x: y}, at up to `points` of their x.

    A run that ended early drops out of the count. Below 3 seeds a t-interval has little meaning
    (its factor is 12.7 with 2), so there the band is the range of the seeds.
    """
    x = evenly_spaced(sorted({x for curve in curves for x in curve}), points)
    heights = [[curve[each] for curve in curves if each in curve] for each in x]
    edges = [_edges(values) for values in heights]
    return Band(
        x,
        [sum(values) / len(values) for values in heights],
        [low for low, _ in edges],
        [high for _, high in edges],
        [len(values) for values in heights],
    )


def _edges(values: Sequence[float]) -> tuple[float, float]:
    spread = interval(values)
    if len(values) < _FEWEST or spread.low is None or spread.high is None:
        return min(values), max(values)
    return spread.low, spread.high
