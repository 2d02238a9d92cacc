"""Quantiles of importance ratios from histograms, which add up over micro-batches, updates and
ranks.

A bin holds an interval of the log-ratio d = log(ratio). Between 1e-8 and 0.1 nats bins grow with
|d|, as in DDSketch (Masson et al. 2019), so that d itself is known within 1 %: a clip range of 3e-4
can be read from it. Above, up to 32 nats, bins have one width. Everywhere a ratio is known within
`RELATIVE_ERROR` of itself. Minimum, maximum and counts are exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

RELATIVE_ERROR = 1e-3
QUANTILES: dict[str, float] = {"min": 0.0, "p01": 0.01, "p50": 0.5, "p99": 0.99, "max": 1.0}

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


@dataclass(frozen=True)
class RatioHistogram:
    """Log-ratios of this rank."""

    counts: Tensor
    """[bins] int64, the log-ratios in each bin."""

    extremes: Tensor
    """[2] float64, the largest of -d and of d."""

    @classmethod
    def of(cls, log_ratio: Tensor) -> RatioHistogram:
        """Of log-ratios [m], m >= 0. NaN counts as the largest."""
        d = log_ratio.detach().double().cpu()
        counts = torch.zeros(_BINS, dtype=torch.long)
        for piece in d.split(_PIECE):  # whose temporaries stay in a core's cache
            bins = _bins_of(piece.float())
            # In place: a few log-ratios do not touch all bins.
            counts.index_add_(0, bins, torch.ones_like(bins, dtype=torch.long))
        if not d.numel():
            return cls(counts, torch.full((2,), -math.inf, dtype=torch.float64))
        return cls(counts, torch.stack([-d.min(), d.max()]))

    def __add__(self, other: RatioHistogram) -> RatioHistogram:
        return RatioHistogram(
            self.counts + other.counts, torch.maximum(self.extremes, other.extremes)
        )

    def quantiles(
        self, sum_ranks: Reduce = lambda x: x, max_ranks: Reduce = lambda x: x
    ) -> dict[str, float]:
        """`QUANTILES` of the ratios of all ranks, the same on each, linearly interpolated; {} where
        there are none.

        Args:
            sum_ranks, max_ranks: add int64 tensors, and take the largest of float64 ones, over the
                ranks: three calls with 9 KB in all, first of the coarse bins and then of the bins
                in those that quantiles lie in.
        """
        counts = sum_ranks(self.counts.view(_NUM_COARSE, _FINE_IN_COARSE).sum(1))
        up_to = counts.cumsum(0)
        total = int(up_to[-1])
        largest = max_ranks(self.extremes)
        if not total:
            return {}
        below = {name: int(q * (total - 1)) for name, q in QUANTILES.items()}
        inner = [name for name in QUANTILES if name not in ("min", "max")]
        wanted = torch.tensor([min(below[name] + i, total - 1) for name in inner for i in (0, 1)])
        coarse = torch.searchsorted(up_to, wanted, right=True)
        fine = sum_ranks(self.counts.view(_NUM_COARSE, _FINE_IN_COARSE)[coarse]).cumsum(1)
        before = (up_to - counts)[coarse]
        within = torch.searchsorted(fine, (wanted - before)[:, None], right=True).squeeze(1)
        bins = coarse * _FINE_IN_COARSE + within
        smallest = -float(largest[0])
        greatest = float(largest[1])
        limits = (-math.inf, math.inf) if math.isnan(smallest) else (smallest, greatest)
        ratios = _centres(bins).clamp(*limits).exp().view(-1, 2)
        values = {"min": math.exp(min(smallest, _FINITE)), "max": math.exp(min(greatest, _FINITE))}
        for name, (a, b) in zip(inner, ratios.tolist(), strict=True):
            values[name] = a + (b - a) * (QUANTILES[name] * (total - 1) - below[name])
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
