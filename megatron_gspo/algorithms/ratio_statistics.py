"""Statistics of the importance ratios of a mini-batch, from which a clip range is chosen.

Quantiles of parts do not sum to quantiles of the whole, so these functions take all tokens at once (gathered on the
CPU, for example). They may synchronise the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .segments import segment_sums

QUANTILES: dict[str, float] = {"min": 0.0, "p01": 0.01, "p50": 0.5, "p99": 0.99, "max": 1.0}


def quantiles(values: Tensor) -> dict[str, float]:
    """QUANTILES of `values` [m], linearly interpolated; {} where m = 0."""
    if values.numel() == 0:
        return {}
    # torch.quantile is limited to 2^24 elements
    ordered = values.detach().double().sort().values
    found = {}
    for name, q in QUANTILES.items():
        position = q * (ordered.numel() - 1)
        below = int(position)
        above = min(below + 1, ordered.numel() - 1)
        found[name] = float(torch.lerp(ordered[below], ordered[above], position - below))
    return found


def ratio_quantiles(
    log_probs: Tensor, old_log_probs: Tensor, loss_mask: Tensor, segment_ids: Tensor
) -> dict[str, float]:
    """Quantiles of the token ratios `exp(log_probs - old_log_probs)` and of the length-normalised sequence ratios.

    Args:
        log_probs, old_log_probs, loss_mask, segment_ids: [T], whole sequences (not a context rank's shard).

    Returns:
        `ratio_token/{min,p01,p50,p99,max}` over trained tokens and `ratio_sequence/...` over sequences that
        have one; empty where nothing is trained. Neither clamped nor clipped.
    """
    mask = loss_mask != 0
    log_ratio = (log_probs.detach().double() - old_log_probs.detach().double())[mask]
    ids, index = segment_ids[mask].unique(return_inverse=True)
    lengths = segment_sums(torch.ones_like(log_ratio), index, ids.numel())
    means = segment_sums(log_ratio, index, ids.numel()) / lengths
    by_level = {"token": log_ratio.exp(), "sequence": means.exp()}
    return {f"ratio_{level}/{q}": v for level, ratio in by_level.items() for q, v in quantiles(ratio).items()}


def effective_sample_size(weights: Tensor) -> float:
    """`(sum w)^2 / sum w^2 / m` of importance weights [m], in (0, 1]; NaN where m = 0."""
    w = weights.detach().double()
    return float(w.sum().square() / w.square().sum() / w.numel())
