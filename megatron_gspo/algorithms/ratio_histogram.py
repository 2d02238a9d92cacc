"""Quantiles of importance ratios from histograms, which add up over micro-batches, updates and
ranks.

A bin holds an interval of the log-ratio d = log(ratio). Between 1e-8 and 0.1 nats bins grow with
|d|, as in DDSketch (Masson et al. 2019), so that d itself is known within 1 %: a clip range of 3e-4
can be read from it. Above, up to 32 nats, bins have one width. Everywhere a ratio is known within
`RELATIVE_ERROR` of itself. Minimum, maximum and counts are exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

RELATIVE_ERROR = 1e-3
QUANTILES: dict[str, float] = {"min": 0.0, "p01": 0.01, "p50": 0.5, "p99": 0.99, "max": 1.0}
_INNER = [name for name in QUANTILES if name not in ("min", "max")]

_SMALLEST = 1e-8  # nats; smaller log-ratios count as 0
_LARGEST = 32.0  # nats; larger log-ratios count as this
_OF_THE_LOG = 0.0099  # relative half-width of the growing bins
_GROWTH = math.log((1 + _OF_THE_LOG) / (1 - _OF_THE_LOG))
_HALF = 0.99 * math.log1p(RELATIVE_ERROR)  # half-width of the equal bins, nats
_BORDER = _HALF / _OF_THE_LOG
_GROWING = math.ceil(math.log(_BORDER / _SMALLEST) / _GROWTH)
_EQUAL = math.ceil((_LARGEST - _BORDER) / (2 * _HALF))
_ONE_SIGN = _GROWING + _EQUAL  # bins of positive log-ratios; as many are negative, and one is 0
_FINE_IN_COARSE = 128  # bins in a coarse one, of which the ranks exchange the sums
_NUM_COARSE = 2 * _ONE_SIGN // _FINE_IN_COARSE + 1
_BINS = _NUM_COARSE * _FINE_IN_COARSE
_PIECE = 1 << 16  # log-ratios
_FINITE = 700.0  # nats; the largest ratio that is reported is exp of this

Reduce: TypeAlias = Callable[[Tensor], Tensor]
"""Combines a tensor over ranks."""


class RatioHistogram:
    """Log-ratios of this rank, to which more can be added. They are counted many at a time: to
    count few costs as much."""

    def __init__(self) -> None:
        self._counts = torch.zeros(_BINS, dtype=torch.long)
        self._extremes = torch.full((2,), -math.inf, dtype=torch.float64)
        self._waiting: list[Tensor] = []
        self._num_waiting = 0

    @property
    def counts(self) -> Tensor:
        """[bins] int64, the log-ratios in each bin."""
        _count_waiting([self])
        return self._counts

    @property
    def extremes(self) -> Tensor:
        """[2] float64, the largest of -d and of d."""
        _count_waiting([self])
        return self._extremes

    def add(self, log_ratio: Tensor) -> None:
        """Add log-ratios [m], m >= 0. NaN counts as the largest."""
        self._waiting.append(log_ratio.detach().double().cpu())
        self._num_waiting += log_ratio.numel()
        if self._num_waiting >= _PIECE:
            _count_waiting([self])

    def quantiles(self) -> dict[str, float]:
        """`QUANTILES` of this rank's ratios, linearly interpolated; {} where there are none."""
        [quantiles] = quantiles_of([self])
        return quantiles


def _count_waiting(histograms: Sequence[RatioHistogram]) -> None:
    """Count what waits in the histograms, all at once."""
    histograms = [histogram for histogram in histograms if histogram._num_waiting]
    if not histograms:
        return
    d = torch.cat([values for histogram in histograms for values in histogram._waiting])
    # Pieces whose temporaries stay in a core's cache.
    bins = torch.cat([_bins_of(piece.float()) for piece in d.split(_PIECE)])
    ones = torch.ones_like(bins, dtype=torch.long)
    sizes = [histogram._num_waiting for histogram in histograms]
    for histogram, values, places in zip(
        histograms, d.split(sizes), bins.split(sizes), strict=True
    ):
        # In place: a few log-ratios do not touch all bins.
        histogram._counts.index_add_(0, places, ones[: len(places)])
        smallest, largest = torch.aminmax(values)
        extremes = torch.stack([-smallest, largest])
        torch.maximum(histogram._extremes, extremes, out=histogram._extremes)
        histogram._waiting = []
        histogram._num_waiting = 0


def quantiles_of(
    histograms: Sequence[RatioHistogram],
    sum_ranks: Reduce = lambda x: x,
    max_ranks: Reduce = lambda x: x,
) -> list[dict[str, float]]:
    """`RatioHistogram.quantiles` of each, over the ratios of all ranks, the same on each rank.

    Args:
        sum_ranks, max_ranks: add int64 tensors, and take the largest of float64 ones, over the
            ranks: three calls for all histograms, with 9 KB for each, first of the coarse bins and
            then of the bins in those that quantiles lie in.
    """
    _count_waiting(histograms)
    by_coarse = [histogram.counts.view(_NUM_COARSE, _FINE_IN_COARSE) for histogram in histograms]
    counts = sum_ranks(torch.stack([bins.sum(1) for bins in by_coarse]))
    extremes = max_ranks(torch.stack([histogram.extremes for histogram in histograms]))
    up_to = counts.cumsum(1)
    totals = up_to[:, -1].tolist()
    # [histograms, 6]: the neighbours of each inner quantile among the sorted log-ratios.
    wanted = torch.tensor([_neighbours(total) for total in totals])
    # Where there are none, any bin will do.
    coarse = torch.searchsorted(up_to, wanted, right=True).clamp_(max=_NUM_COARSE - 1)
    fine_counts = [bins[chosen] for bins, chosen in zip(by_coarse, coarse, strict=True)]
    fine = sum_ranks(torch.stack(fine_counts)).cumsum(2)
    before = (up_to - counts).gather(1, coarse)
    within = torch.searchsorted(fine, (wanted - before)[:, :, None], right=True).squeeze(2)
    centres = _centres(coarse * _FINE_IN_COARSE + within)
    return [
        _interpolated(total, neighbours, smallest=-minus_smallest, largest=largest)
        for total, neighbours, (minus_smallest, largest) in zip(
            totals, centres, extremes.tolist(), strict=True
        )
    ]


def _rank_below(q: float, total: int) -> int:
    """The index of the ratio at or below a quantile, among the sorted ones."""
    return int(q * (total - 1))


def _neighbours(total: int) -> list[int]:
    """The indices of the ratios around each inner quantile, among the sorted ones."""
    if not total:
        return [0] * 2 * len(_INNER)
    below = [_rank_below(QUANTILES[name], total) for name in _INNER]
    return [min(rank + i, total - 1) for rank in below for i in (0, 1)]


def _interpolated(
    total: int, centres: Tensor, *, smallest: float, largest: float
) -> dict[str, float]:
    """The quantiles between neighbours [6], log-ratios."""
    if not total:
        return {}
    limits = (-math.inf, math.inf) if math.isnan(smallest) else (smallest, largest)
    ratios = centres.clamp(*limits).exp().view(-1, 2).tolist()
    values = {"min": math.exp(min(smallest, _FINITE)), "max": math.exp(min(largest, _FINITE))}
    for name, (a, b) in zip(_INNER, ratios, strict=True):
        q = QUANTILES[name]
        values[name] = a + (b - a) * (q * (total - 1) - _rank_below(q, total))
    return {name: values[name] for name in QUANTILES}


def _bins_of(d: Tensor) -> Tensor:
    """The bin of each log-ratio, ascending with it; int32. Of float32: its rounding is in what
    `_HALF` and `_OF_THE_LOG` leave of the error."""
    d = d.nan_to_num(nan=_LARGEST)  # a NaN may have a sign
    size = d.abs().clamp_(max=_LARGEST)
    # without a choice by masks, which costs as much as all the rest: 0 below `_SMALLEST`, and all
    # growing bins above the border
    growing = size.div(_SMALLEST).log_().div_(_GROWTH).floor_().clamp_(-1, _GROWING - 1).add_(1)
    equal = size.sub_(_BORDER).div_(2 * _HALF).floor_().add_(1).clamp_(min=0)
    return growing.add_(equal).copysign_(d).add_(_ONE_SIGN).int()


def _centres(bins: Tensor) -> Tensor:
    """The log-ratio that stands for each bin, float64: within half a bin of any other."""
    step = bins - _ONE_SIGN
    index = step.abs().double() - 1
    # Bin (a, a * growth): a (1 + alpha).
    growing = _SMALLEST * (index * _GROWTH).exp() * (1 + _OF_THE_LOG)
    equal = _BORDER + (index - _GROWING + 0.5) * 2 * _HALF
    size = torch.where(index < _GROWING, growing, equal)
    return torch.where(step == 0, 0.0, size.copysign(step))
