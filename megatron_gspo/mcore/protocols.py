"""What this package uses of Megatron's objects, where those have no type of their own that fits every
supported version.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch


class WrappedOptimizer(Protocol):
    """One of the optimizers that Megatron chains: a torch optimizer, and what holds main weights
    and gradients for it.
    """

    optimizer: torch.optim.Optimizer | None
    """None where this rank has no parameter of it."""

    def prepare_grads(self) -> bool:
        """Give the main weights their gradients; whether one is not finite."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""


class MegatronOptimizer(Protocol):
    """The optimizer of a model: a chain of `WrappedOptimizer`."""

    param_groups: list[dict[str, Any]]
