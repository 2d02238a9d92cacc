"""Quantiles of importance ratios whose tokens are on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_gspo.algorithms import RatioHistogram
from megatron_gspo.parallel.host_exchange import max_over_ranks, sum_over_ranks


def added_histograms(
    some: Mapping[str, RatioHistogram], more: Mapping[str, RatioHistogram]
) -> dict[str, RatioHistogram]:
    """Their sums by level; `some` may be empty."""
    return {level: some[level] + one if level in some else one for level, one in more.items()}


def quantiles_over_ranks(
    histograms: Mapping[str, RatioHistogram], group: dist.ProcessGroup | None
) -> dict[str, float]:
    """``ratio_<level>/<quantile>`` of the histograms of all ranks of the group. A collective of it."""

    def over(reduce: Callable[[np.ndarray, dist.ProcessGroup | None], np.ndarray]) -> Callable[[Tensor], Tensor]:
        return lambda x: torch.from_numpy(reduce(x.numpy(), group))

    return {
        f"ratio_{level}/{name}": value
        for level, one in histograms.items()
        for name, value in one.quantiles(over(sum_over_ranks), over(max_over_ranks)).items()
    }
