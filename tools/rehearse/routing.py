"""Synthetic routes: which experts each token goes to."""

from __future__ import annotations

import torch
from torch import Tensor

_SEED = 24
"""Of an order in which a token's experts, of 128 or 256, are on 5.4 of 8 ranks, and the first rank
has experts of 5.4 in 8 tokens."""


def expert_ids(
    tokens: int, num_experts: int, k: int, *, expert_parallel: int = 1, imbalance: float = 1.0
) -> Tensor:
    """The ``k`` different experts of each token, int64 ``[tokens, k]``; the same on every rank.

    Every expert gets the same number of tokens, up to rounding, and a token's experts are on about
    as many ranks as those of a random choice are. With ``imbalance`` above 1 the experts of the
    first of ``expert_parallel`` ranks get that times as many in sum, at most all tokens; the others
    share the rest equally.
    """
    hot = num_experts // expert_parallel
    share = min(max(imbalance, 1.0) * k / expert_parallel, float(min(k, hot)))
    slot = torch.arange(k).expand(tokens, k)
    in_turn = torch.arange(tokens)[:, None] * k + slot
    if hot == num_experts or imbalance <= 1.0:
        return _shuffled(num_experts)[in_turn % num_experts]
    bounds = (torch.arange(tokens + 1, dtype=torch.float64) * share).floor().long()
    first = bounds[:-1, None]
    count = bounds.diff()[:, None]
    others = in_turn - first - count
    return torch.where(
        slot < count,
        _shuffled(hot)[(first + slot) % hot],
        hot + _shuffled(num_experts - hot)[others % (num_experts - hot)],
    )


def _shuffled(count: int) -> Tensor:
    """The numbers below ``count``, in the same order for all tokens: so routes have a period, and
    those of a rollout are those of the trainer.
    """
    return torch.randperm(count, generator=torch.Generator().manual_seed(_SEED))
