"""An advantage estimator of one's own: the reward less its group's mean, over the largest deviation
in the group.

algorithm:
  name: largest_deviation
  advantage_estimator: examples/own_code/advantages.py:largest_deviation
  importance_sampling_level: sequence
  loss_agg_mode: seq-mean-token-mean
  epsilon_low: 3.0e-4
  epsilon_high: 4.0e-4
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_gspo.algorithms import Objective, ResponseTerms


def largest_deviation(
    objective: Objective, terms: ResponseTerms, *, truncated: float = 1.0
) -> Tensor:
    """`(r - mean) / max |r - mean|` within each group, [N]; that of truncated responses times
    `truncated`.
    """
    advantages = torch.zeros_like(terms.rewards)
    for group in terms.group_ids.unique():
        members = terms.group_ids == group
        deviations = terms.rewards[members] - terms.rewards[members].mean()
        largest = deviations.abs().max()
        if largest > 0:
            advantages[members] = deviations / largest
    return torch.where(terms.truncated, truncated * advantages, advantages)
