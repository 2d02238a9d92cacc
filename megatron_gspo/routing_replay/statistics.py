"""Statistics of the routers of a mixture of experts: how far two choices differ, entropy and
load.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class RoutingStats:
    """Statistics of one pass over all its trained tokens and all ranks; float64 arrays by MoE
    layer.
    """

    flip_rate: np.ndarray | None
    """``[layers]`` fraction of chosen experts that differ from the given routes."""

    flipped_tokens: float
    """Fraction of tokens that differ in at least one layer."""

    compared: float
    """Number of compared tokens."""

    entropy: np.ndarray | None
    """``[layers]``, in nats."""

    load: np.ndarray | None
    """``[layers, experts]`` fractions that sum to 1. None where it wasn't measured, NaN where there
    was no token."""


def expert_overlap(chosen: Tensor, other: Tensor) -> Tensor:
    """``|S ∩ S'|`` for each row of two choices: int64 ``[...]`` from expert ids ``[..., k]`` of any
    integer type.

    The order within a row doesn't matter; the experts of a row are distinct. The *flip rate* is ``1
    - overlap / k`` averaged over tokens.
    """
    return (chosen[..., :, None] == other[..., None, :]).sum((-1, -2))


def router_entropy(probabilities: Tensor) -> Tensor:
    """Entropy in nats of each token's distribution over the experts: float32 ``[T]`` from ``[T,
    experts]``.

    Rows are normalised first, so that the independent scores of a sigmoid router are taken as
    weights.
    """
    p = probabilities.float()
    p = p / p.sum(-1, keepdim=True)
    return torch.special.entr(p).sum(-1)


def expert_load(chosen: Tensor, weight: Tensor, num_experts: int) -> Tensor:
    """The weight that each expert got: float32 ``[layers, experts]`` from ids ``[layers, T,
    k]`` and weight ``[T]``.
    """
    layers = len(chosen)
    first = num_experts * torch.arange(layers, device=chosen.device)
    flat = chosen.long() + first[:, None, None]
    load = torch.zeros(layers * num_experts, device=chosen.device)
    load.index_add_(0, flat.view(-1), weight.float()[:, None].expand(chosen.shape).reshape(-1))
    return load.view(layers, num_experts)
