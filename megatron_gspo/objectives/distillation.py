"""The objective of on-policy distillation as a typed value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Distillation:
    """The divergence and its weight in the loss."""

    coef: float = 1.0
    """Weight of the divergence."""

    forward_weight: float = 0.0
    """Share of the forward KL: 0 is the reverse KL, 1 the forward KL."""
