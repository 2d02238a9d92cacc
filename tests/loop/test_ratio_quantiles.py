"""Histograms of several parts and ranks."""

from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from megatron_gspo.algorithms import RatioHistogram
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.loop.ratio_quantiles import quantiles_over_ranks
from tests.support.distributed import run_distributed


def histograms(*parts: list[float]) -> dict[str, RatioHistogram]:
    histogram = RatioHistogram()
    for log_ratios in parts:
        histogram.add(torch.tensor(log_ratios, dtype=torch.float64))
    return {"ratio_token": histogram}


def test_parts_add_up():
    quantiles = quantiles_over_ranks(histograms([0.0, 0.5], [], [-1.0]), TrainingBatch.of([]))
    assert quantiles == quantiles_over_ranks(histograms([0.0, 0.5, -1.0]), TrainingBatch.of([]))
    np.testing.assert_allclose(
        [quantiles["ratio_token/min"], quantiles["ratio_token/max"]], np.exp([-1.0, 0.5])
    )
    assert quantiles["ratio_token/p50"] == 1.0


def of_rank(rank: int, world: int) -> dict[str, float]:
    batch = replace(TrainingBatch.of([]), group=dist.group.WORLD)
    return quantiles_over_ranks(histograms([[0.0, 0.5], [-1.0]][rank]), batch)


def test_ranks_have_the_quantiles_of_all():
    expected = quantiles_over_ranks(histograms([0.0, 0.5, -1.0]), TrainingBatch.of([]))
    assert run_distributed(of_rank, 2) == [expected, expected]
