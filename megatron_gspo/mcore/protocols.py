"""What this package uses of Megatron's objects, where those have no type of their own that fits every
supported version.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from megatron.core.optimizer import OptimizerConfig
from torch import Tensor

ShardOffsets = tuple[tuple[int, int, int], ...]
"""Of dimensions in front of a stored tensor's own, as that of stacked layers: dimension, position
of this part, number of parts."""


class WrappedOptimizer(Protocol):
    """One of the optimizers that Megatron chains: a torch optimizer, and what holds main weights
    and gradients for it.
    """

    optimizer: torch.optim.Optimizer | None
    """None where this rank has no parameter of it."""

    config: OptimizerConfig

    _copy_main_params_to_model_params: Callable[[], None]
    """Called after each step of ``optimizer``."""

    def prepare_grads(self) -> bool:
        """Give the main weights their gradients; whether one is not finite."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""


class MegatronOptimizer(Protocol):
    """The optimizer of a model: a chain of `WrappedOptimizer`."""

    param_groups: list[dict[str, Any]]
    """As a torch optimizer's: ``params`` and settings of its own."""

    get_grad_norm: Callable[[], float]
    """The norm of all ranks' gradients, which `step` asks for."""

    def step(self) -> tuple[bool, float, int | None]:
        """Clip and update: whether the update was made, the norm, and how many gradients are 0
        where that is counted."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the main weights."""

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss whose gradients the optimizer expects."""

    def reload_model_params(self) -> None:
        """Give the main weights the values of the model's."""
