"""Generalised advantage estimation (Schulman et al. 2015, arXiv:1506.02438)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_BLOCK = 64  # terms that one matrix product sums


def gae_advantages(
    rewards: Tensor,
    values: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    lengths: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of trajectories, each of which ends after its last step.

    `delta_t = r_t + gamma V_(t+1) - V_t`, with `V_n = 0`; `A_t = sum_k (gamma lam)^k delta_(t+k)`.
    The returns, `A_t + V_t`, are what the value model is trained on.

    Args:
        rewards: [n], of each step (a token or a turn).
        values: [n], the value before each step, from the model that sampled it.
        gamma: discount of later rewards.
        lam: 0 is the one-step estimate, 1 the discounted sum of rewards less the value.
        lengths: steps of the trajectories, which are end to end; None: one of n steps.

    Returns:
        ([n], [n]) float64.

    Raises:
        ValueError: the two are not of one shape [n], or the lengths do not add up to n.
    """
    if rewards.shape != values.shape or rewards.dim() != 1:
        raise ValueError(
            f"rewards {tuple(rewards.shape)} and values {tuple(values.shape)}: both must be [n]"
        )
    counts = torch.tensor([len(values)] if lengths is None else lengths, dtype=torch.long)
    counts = counts[counts > 0]
    if int(counts.sum()) != len(values):
        raise ValueError(f"lengths add up to {int(counts.sum())}; there are {len(values)} steps")
    values = values.double()
    following = torch.cat([values[1:], values.new_zeros(min(1, len(values)))])
    following[counts.cumsum(0) - 1] = 0.0
    advantages = discounted_sums(rewards.double() + gamma * following - values, gamma * lam, counts)
    return advantages, advantages + values


def discounted_sums(terms: Tensor, discount: float, counts: Tensor) -> Tensor:
    """`y_t = terms_t + discount * y_(t+1)` of [n] terms, up to the end of its trajectory, by
    products of 64 x 64 matrices; [n], on the CPU. counts: steps of each trajectory, at least 1."""
    blocks_of = -(-counts // _BLOCK)  # each begins a block
    shifts = (blocks_of * _BLOCK).cumsum(0) - blocks_of * _BLOCK - (counts.cumsum(0) - counts)
    positions = torch.arange(len(terms)) + shifts.repeat_interleave(counts)
    blocks = terms.new_zeros(int(blocks_of.sum()) * _BLOCK)
    blocks[positions] = terms
    step = torch.arange(_BLOCK)  # within a block
    powers = torch.as_tensor(discount, dtype=terms.dtype) ** (step - step[:, None]).clamp_min(0)
    sums = blocks.view(-1, _BLOCK) @ powers.triu().T
    begins = sums[:, 0].tolist()
    last = set((blocks_of.cumsum(0) - 1).tolist())
    # `after` is the sum that begins after each block.
    after = [0.0] * len(begins)
    whole = discount**_BLOCK
    for i in reversed(range(len(begins))):
        if i not in last:
            after[i] = begins[i + 1] + whole * after[i + 1]
    carried = terms.new_tensor(after)
    powers_to_end = torch.as_tensor(discount, dtype=terms.dtype) ** (_BLOCK - step)
    return (sums + carried[:, None] * powers_to_end).view(-1)[positions]
