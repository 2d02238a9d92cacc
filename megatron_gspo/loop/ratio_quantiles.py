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
    """``ratio_<level>/<quantile>`` of the histograms of all holders of the batch.

    A collective of its replicas.
    """

    def over(reduce: Callable[[np.ndarray], np.ndarray]) -> Callable[[Tensor], Tensor]:
        return lambda x: torch.from_numpy(reduce(x.numpy()))

    quantiles = quantiles_of(list(histograms.values()), over(batch.summed), over(batch.largest))
    return {
        f"ratio_{level}/{name}": value
        for level, of_level in zip(histograms, quantiles, strict=True)
        for name, value in of_level.items()
    }
