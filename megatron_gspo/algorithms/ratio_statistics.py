"""Statistics of the importance ratios of a mini-batch, from which a clip range is chosen."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .ratio_histogram import RatioHistogram


def ratio_histograms() -> dict[str, RatioHistogram]:
    """Empty ones, for `add_ratios`. `token`: of trained tokens. `sequence`: of the length-normalised
    ratios of sequences that have one."""
    return {"token": RatioHistogram(), "sequence": RatioHistogram()}


def add_ratios(
    histograms: Mapping[str, RatioHistogram],
    log_probs: Tensor,
    old_log_probs: Tensor,
    loss_mask: Tensor,
    segment_ids: Tensor,
) -> None:
    """Add the ratios `exp(log_probs - old_log_probs)`, neither clamped nor clipped, to
    `ratio_histograms`.

    Args:
        log_probs, old_log_probs, loss_mask, segment_ids: [T], whole sequences (not a context rank's
            shard); segment ids count from 0.
    """
    trained = loss_mask.nonzero().squeeze(1)
    log_ratio = log_probs.detach()[trained].double() - old_log_probs.detach()[trained]
    ids = segment_ids[trained]
    lengths = torch.bincount(ids)
    means = (torch.bincount(ids, weights=log_ratio) / lengths)[lengths > 0]
    histograms["token"].add(log_ratio)
    histograms["sequence"].add(means)


def ratio_quantiles(
    log_probs: Tensor, old_log_probs: Tensor, loss_mask: Tensor, segment_ids: Tensor
) -> dict[str, float]:
    """Quantiles of the ratios that `add_ratios` adds: `ratio_token/{min,p01,p50,p99,max}` and
    `ratio_sequence/...`; empty where nothing is trained."""
    histograms = ratio_histograms()
    add_ratios(histograms, log_probs, old_log_probs, loss_mask, segment_ids)
    quantiles: dict[str, float] = {}
    for level, histogram in histograms.items():
        for name, value in histogram.quantiles().items():
            quantiles[f"ratio_{level}/{name}"] = value
    return quantiles


def effective_sample_size(weights: Tensor) -> float:
    """`(sum w)^2 / sum w^2 / m` of importance weights [m], in (0, 1]; NaN where m = 0."""
    w = weights.detach().double()
    return float(w.sum().square() / w.square().sum() / w.numel())
