"""A surrogate of one's own: tapered off-policy REINFORCE (arXiv:2503.14286), by token.

algorithm:
  name: tapered
  importance_sampling_level: token
  loss_agg_mode: token-mean
  surrogate: examples/own_code/surrogate.py:tapered
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_gspo.algorithms import Clip, Objective, TokenTerms


def tapered(
    objective: Objective, terms: TokenTerms, *, largest: float = 1.0
) -> tuple[Tensor, Clip]:
    """`sg[w] * A * log_probs` with w = 1 where A > 0, else min(ratio, largest): what is to be
    maximised, [T].
    """
    negative = terms.advantages < 0
    weight = torch.where(negative, terms.ratio.detach().clamp(max=largest), 1.0)
    truncated = negative & (terms.ratio > largest)
    value = weight * terms.advantages * terms.log_probs
    return value, Clip(lower=torch.zeros_like(truncated), cut=truncated)
