"""Generalised advantage estimation (Schulman et al. 2015, arXiv:1506.02438)."""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 64  # terms that one matrix product sums


def gae_advantages(rewards: Tensor, values: Tensor, *, gamma: float = 1.0, lam: float = 1.0) -> tuple[Tensor, Tensor]:
    """Advantages and returns of one trajectory that ends after its last step.

    `delta_t = r_t + gamma V_(t+1) - V_t`, with `V_n = 0`; `A_t = sum_k (gamma lam)^k delta_(t+k)`. The returns,
    `A_t + V_t`, are what the value model is trained on.

    Args:
        rewards: [n], of each step (a token or a turn).
        values: [n], the value before each step, from the model that sampled it.
        gamma: discount of later rewards.
        lam: 0 is the one-step estimate, 1 the discounted sum of rewards less the value.

    Returns:
        ([n], [n]) float64.

    Raises:
        ValueError: the two are not of one shape [n].
    """
    if rewards.shape != values.shape or rewards.dim() != 1:
        raise ValueError(f"rewards {tuple(rewards.shape)} and values {tuple(values.shape)}: both must be [n]")
    values = values.double()
    following = torch.cat([values[1:], values.new_zeros(min(1, len(values)))])
    advantages = discounted_sums(rewards.double() + gamma * following - values, gamma * lam)
    return advantages, advantages + values


def discounted_sums(terms: Tensor, discount: float) -> Tensor:
    """`y_t = terms_t + discount * y_(t+1)` of [n] terms, by products of 64 x 64 matrices; [n]."""
    count = len(terms)
    blocks = torch.cat([terms, terms.new_zeros(-count % _BLOCK)]).view(-1, _BLOCK)
    place = torch.arange(_BLOCK, device=terms.device)
    powers = torch.as_tensor(discount, dtype=terms.dtype) ** (place - place[:, None]).clamp_min(0)
    sums = blocks @ powers.triu().T
    after, whole = [0.0], discount**_BLOCK  # the sum that begins after each block, from the last one on
    for first in reversed(sums[1:, 0].tolist()):
        after.append(first + whole * after[-1])
    carried = terms.new_tensor(after[::-1])
    powers_to_end = torch.as_tensor(discount, dtype=terms.dtype) ** (_BLOCK - place)
    return (sums + carried[:, None] * powers_to_end).view(-1)[:count]
