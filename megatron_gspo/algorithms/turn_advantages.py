"""Advantages of the turns of multi-turn episodes."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_gspo.objectives.objective import AdvantageBaseline, AdvantageStd

from .advantages import as_rewards, group_advantages


def turn_returns(rewards: Tensor, episode_ids: Tensor, discount: float) -> Tensor:
    """Discounted rewards to go within each episode: `R_k = sum_{j >= k} discount^(j - k) r_j`. [M]
    float64.

    rewards: [M], the turns of an episode adjacent and in order; episode_ids: [M] integers. Raises
    ValueError for a discount outside [0, 1].
    """
    if not 0 <= discount <= 1:
        raise ValueError(
            f"discount = {discount!r}: must be 0 (own reward only) to 1 (all later rewards too)"
        )
    values, ids = as_rewards(rewards, episode_ids)
    returns = values.tolist()
    same_episode = (ids[1:] == ids[:-1]).tolist()
    for k in range(len(returns) - 2, -1, -1):
        if same_episode[k]:
            returns[k] += discount * returns[k + 1]
    return values.new_tensor(returns)


def turn_numbers(episode_ids: Tensor) -> Tensor:
    """0, 1, ... within each episode: [M] int64."""
    starts = torch.ones_like(episode_ids, dtype=torch.bool)
    starts[1:] = episode_ids[1:] != episode_ids[:-1]
    positions = torch.arange(len(episode_ids), device=episode_ids.device)
    return positions - torch.where(starts, positions, 0).cummax(0).values


def turn_advantages(
    rewards: Tensor,
    episode_ids: Tensor,
    group_ids: Tensor,
    *,
    discount: float = 1.0,
    std: AdvantageStd = "sample",
    baseline: AdvantageBaseline = "mean",
) -> Tensor:
    """Returns to go, normalised over the k-th turns of a group's episodes: `A_ik = (R_ik - mean_j
    R_jk) / std_j R_jk`.

    Normalised discounted returns as advantages: GTPO, arXiv:2511.14846. Returns are compared turn
    by turn, because a baseline may depend on the turn but not on the actions of the policy in it or
    later (Greensmith, Bartlett, Baxter, 2004): a mean over all turns would depend on their number.
    With one turn per episode this is `group_advantages`. With discount 1 the first turns get
    `group_advantages` of the episodes' summed rewards.

    Args:
        rewards: [M], one per turn; the turns of an episode adjacent and in order.
        episode_ids, group_ids: [M] integers, the episode of each turn and the prompt of that
            episode.
        discount: factor on a reward per turn before it, 0 to 1.
        std, baseline: as in `group_advantages`.

    Returns:
        [M] float32. A turn that no other episode of the group reached gets 0.

    Raises:
        ValueError: as `group_advantages`, and for a discount outside [0, 1].
    """
    returns = turn_returns(rewards, episode_ids, discount)
    pairs = torch.stack([torch.as_tensor(group_ids), turn_numbers(torch.as_tensor(episode_ids))])
    _, compared = torch.unique(pairs, dim=1, return_inverse=True)
    return group_advantages(returns, compared, std=std, baseline=baseline)
