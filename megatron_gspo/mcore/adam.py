"""Adam in one kernel for each parameter group, which also clips and writes the model's weights.

Megatron does these three after each other: it scales the gradients, steps torch's Adam, and copies
the main weights to the model's. On a GPU the kernel moves 30 bytes for each parameter in place of
42. Parameter groups, state and their names stay torch's, so that checkpoints do not depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch import Tensor

from megatron_gspo.kernels import row_kernels_apply
from megatron_gspo.kernels.operators import adam_step
from megatron_gspo.mcore.policy_tensors import torch_optimizers, wrapped_optimizers
from megatron_gspo.mcore.protocols import MegatronOptimizer, WrappedOptimizer

_SMALL = 1e-6  # Megatron's clipping adds it to the norm


class KernelAdam(torch.optim.AdamW):
    """clip: what gradients are multiplied with. weights: id of a main weight -> the model's weight
    that is a bfloat16 copy of it.
    """

    clip: float
    weights: dict[int, Tensor]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Like torch's step, for parameters that have all made the same number of steps."""
        for group in self.param_groups:
            main: list[Tensor] = []
            grads: list[Tensor] = []
            means: list[Tensor] = []
            squares: list[Tensor] = []
            steps: list[Tensor] = []
            self._init_group(group, main, grads, means, squares, [], steps)
            if not steps:
                continue
            torch._foreach_add_(steps, 1.0)
            entries = list(zip(main, grads, means, squares, strict=True))
            copied = [entry for entry in entries if id(entry[0]) in self.weights]
            others = [entry for entry in entries if id(entry[0]) not in self.weights]
            for chosen in (copied, others):
                if chosen:
                    self._step_with(chosen, group, steps[0].item())

    def _step_with(
        self,
        entries: list[tuple[Tensor, Tensor, Tensor, Tensor]],
        group: dict[str, Any],
        step: float,
    ) -> None:
        main, grads, means, squares = zip(*entries, strict=True)
        beta1, beta2 = group["betas"]
        adam_step(
            main,
            grads,
            means,
            squares,
            [self.weights[id(parameter)] for parameter in main if id(parameter) in self.weights],
            self.clip,
            group["lr"],
            beta1,
            beta2,
            group["eps"],
            group["weight_decay"],
            step,
        )


def adam_kernel_applies(optimizer: MegatronOptimizer) -> bool:
    """Whether the kernel computes what all torch optimizers within Megatron's do."""
    steppers = list(torch_optimizers(optimizer))
    groups = [group for stepper in steppers for group in stepper.param_groups]
    return all(type(stepper) is torch.optim.AdamW for stepper in steppers) and all(
        not group["amsgrad"]
        and not group["maximize"]
        and all(row_kernels_apply(weight, "adam") for weight in group["params"])
        for group in groups
    )


def use_adam_kernel(optimizer: MegatronOptimizer, max_norm: float) -> None:
    """Let `KernelAdam` step in the place of torch's Adam within Megatron's ``optimizer``, clip to
    ``max_norm`` unless that is 0, and write the model's weights.
    """
    steppers = []
    for wrapped in wrapped_optimizers(optimizer):
        stepper = wrapped.optimizer
        assert stepper is not None
        stepper.__class__ = KernelAdam
        assert isinstance(stepper, KernelAdam)
        stepper.clip = 1.0
        stepper.weights = {id(main): weight for main, weight in _copies(wrapped)}
        wrapped.config.clip_grad = 0.0  # Megatron would clip too
        wrapped._copy_main_params_to_model_params = _nothing  # they are written
        steppers.append(stepper)
    gradient_norm = optimizer.get_grad_norm

    def noting_clip() -> float:
        norm = gradient_norm()
        for stepper in steppers:
            stepper.clip = min(1.0, max_norm / (norm + _SMALL)) if max_norm else 1.0
        return norm

    optimizer.get_grad_norm = noting_clip


def _copies(wrapped: WrappedOptimizer) -> Iterable[tuple[Tensor, Tensor]]:
    """Main weights, and the model's weights that Megatron copies them to."""
    if isinstance(wrapped, DistributedOptimizer):
        main, weights = wrapped.shard_fp32_from_float16_groups, wrapped.shard_float16_groups
    elif isinstance(wrapped, Float16OptimizerWithFloat16Params):
        main, weights = wrapped.fp32_from_float16_groups, wrapped.float16_groups
    else:
        return ()
    return zip(chain(*main), chain(*weights), strict=True)


def _nothing() -> None:
    pass
