"""Quantiles of importance ratios whose tokens are on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from megatron_gspo.algorithms import RatioHistogram
from megatron_gspo.data.training_batch import TrainingBatch


def added_histograms(
    some: Mapping[str, RatioHistogram], more: Mapping[str, RatioHistogram]
) -> dict[str, RatioHistogram]:
    """Their sums by level; `some` may be empty."""
    return {level: some[level] + one if level in some else one for level, one in more.items()}


def quantiles_over_ranks(
    histograms: Mapping[str, RatioHistogram], batch: TrainingBatch
) -> dict[str, float]:
    """``ratio_<level>/<quantile>`` of the histograms of all holders of the batch.

    A collective of its replicas.
    """

    def over(reduce: Callable[[np.ndarray], np.ndarray]) -> Callable[[Tensor], Tensor]:
        return lambda x: torch.from_numpy(reduce(x.numpy()))

    return {
        f"ratio_{level}/{name}": value
        for level, one in histograms.items()
        for name, value in one.quantiles(over(batch.summed), over(batch.largest)).items()
    }
