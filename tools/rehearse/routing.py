"""Synthetic routes: which experts each token goes to."""

from __future__ import annotations

import torch
from torch import Tensor


def expert_ids(
    tokens: int, num_experts: int, k: int, *, expert_parallel: int = 1, imbalance: float = 1.0
) -> Tensor:
    """The ``k`` different experts of each token, int64 ``[tokens, k]``.

    Every expert gets the same number of tokens, up to rounding. With ``imbalance`` above 1 the
    experts of the first of ``expert_parallel`` ranks get that times as many in sum, at most all
    tokens; the others share the rest equally.
    """
    hot = num_experts // expert_parallel
    share = min(max(imbalance, 1.0) * k / expert_parallel, float(min(k, hot)))
    if hot == num_experts or imbalance <= 1.0:
        return (torch.arange(tokens)[:, None] * k + torch.arange(k)) % num_experts
    bounds = (torch.arange(tokens + 1, dtype=torch.float64) * share).floor().long()
    first = bounds[:-1, None]
    count = bounds.diff()[:, None]
    slot = torch.arange(k).expand(tokens, k)
    others = torch.arange(tokens)[:, None] * k - first
    return torch.where(
        slot < count, (first + slot) % hot, hot + (others + slot - count) % (num_experts - hot)
    )
