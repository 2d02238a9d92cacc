"""Group-relative advantages: one number per response, from the rewards of its group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from megatron_gspo.objectives.objective import AdvantageBaseline, AdvantageStd


@dataclass(frozen=True)
class Groups:
    """Statistics of rewards by group. `index` [N]: group of each response, 0..g-1. `count`, `mean`,
    `varied` [g]: number of rewards, their mean, whether they differ (bool)."""

    index: Tensor
    count: Tensor
    mean: Tensor
    varied: Tensor


def group_rewards(rewards: Tensor, group_ids: Tensor) -> Groups:
    """Group float64 `rewards` [N] by `group_ids` [N]: any integers, in any order."""
    ids, index = torch.unique(group_ids, return_inverse=True)
    zeros = rewards.new_zeros(ids.numel())
    count = zeros.index_add(0, index, torch.ones_like(rewards))
    mean = zeros.index_add(0, index, rewards) / count
    # Equal rewards are detected by comparison, not by a std of 0: the mean of three 0.1 is not 0.1
    # in floating point, and dividing that rounding error by itself would give advantages of +-1.
    highest = zeros.scatter_reduce(0, index, rewards, "amax", include_self=False)
    lowest = zeros.scatter_reduce(0, index, rewards, "amin", include_self=False)
    return Groups(index, count, mean, highest > lowest)


def as_rewards(rewards: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """`rewards` as float64 [N], `group_ids` as integers [N] on the same device; else ValueError."""
    values = torch.as_tensor(rewards, dtype=torch.float64).detach()
    ids = torch.as_tensor(group_ids, device=values.device)
    if values.dim() != 1 or values.shape != ids.shape:
        raise ValueError(
            f"rewards {tuple(values.shape)} and group_ids {tuple(ids.shape)}: both must be [N], one"
            " per response"
        )
    if ids.is_floating_point():
        raise ValueError(f"group_ids is {ids.dtype}: must be integers")
    return values, ids


def group_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    std: AdvantageStd = "sample",
    baseline: AdvantageBaseline = "mean",
) -> Tensor:
    """`A_i = (r_i - baseline) / std(r)` within each group (GRPO, arXiv:2402.03300; GSPO,
    arXiv:2507.18071).

    Args:
        rewards: [N] finite, any real dtype.
        group_ids: [N] integers; responses to the same prompt share one. Any values, any order.
        std: divide by the `sample` (n - 1) or `population` (n) standard deviation, or by nothing
            (`none`).
        baseline: the group's `mean`, or the mean of the others (`leave_one_out`, RLOO).

    Returns:
        [N] float32 on the device of `rewards`, computed in float64. A group whose rewards are all
        equal gets 0, a group of one response too. No epsilon is added to the std.

    Raises:
        ValueError: unknown option, shapes that differ, a reward that is not finite.
    """
    if std not in get_args(AdvantageStd):
        raise ValueError(f"std = {std!r}: must be one of {', '.join(get_args(AdvantageStd))}")
    if baseline not in get_args(AdvantageBaseline):
        raise ValueError(
            f"baseline = {baseline!r}: must be one of {', '.join(get_args(AdvantageBaseline))}"
        )
    values, ids = as_rewards(rewards, group_ids)
    if values.numel() == 0:
        return values.float()
    if not bool(torch.isfinite(values).all()):
        raise ValueError(
            "rewards contain NaN or infinity: drop those responses first (torch.isfinite)"
        )

    groups = group_rewards(values, ids)
    deviation = values - groups.mean[groups.index]
    advantages = deviation
    if baseline == "leave_one_out":  # r_i - mean of the others = n / (n - 1) * (r_i - mean of all)
        advantages = deviation * (groups.count / (groups.count - 1).clamp_min(1))[groups.index]
    if std != "none":
        squares = torch.zeros_like(groups.mean).index_add(0, groups.index, deviation.square())
        freedom = groups.count - 1 if std == "sample" else groups.count
        deviations = (squares / freedom.clamp_min(1)).sqrt()
        divisors = torch.where(groups.varied, deviations, torch.ones_like(deviations))
        advantages = advantages / divisors[groups.index]
    varied = groups.varied[groups.index]
    return torch.where(varied, advantages, torch.zeros_like(advantages)).float()
