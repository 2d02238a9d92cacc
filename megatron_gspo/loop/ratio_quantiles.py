"""Quantiles of importance ratios whose tokens are on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from megatron_gspo.algorithms import RatioHistogram, quantiles_of
from megatron_gspo.data.training_batch import TrainingBatch


def quantiles_over_ranks(
    histograms: Mapping[str, RatioHistogram], batch: TrainingBatch
) -> dict[str, float]:
    """``<name>/<quantile>`` of the histograms, by name, of all holders of the batch.

    A collective of its replicas. One call with all histograms of a step takes the time of one.
    """
    if not histograms:
        return {}

    def over(reduce: Callable[[np.ndarray], np.ndarray]) -> Callable[[Tensor], Tensor]:
        return lambda x: torch.from_numpy(reduce(x.numpy()))

    quantiles = quantiles_of(list(histograms.values()), over(batch.summed), over(batch.largest))
    return {
        f"{name}/{quantile}": value
        for name, of_histogram in zip(histograms, quantiles, strict=True)
        for quantile, value in of_histogram.items()
    }
