"""An optimizer of one's own: AdEMAMix (arXiv:2409.03137) without its schedules, which is AdamW with
a second and slower mean of the gradients.

optimizer:
  function: examples/own_code/optimizer.py:ademamix
  options: {slow_beta: 0.9999, alpha: 5.0}
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_gspo.config import OptimizerConfig


class AdEMAMix(torch.optim.Optimizer):
    """Keeps `fast`, `slow` and `square` of each parameter's shape, and the number `step`."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """One update of every parameter, each element by its own gradients alone."""
        for group in self.param_groups:
            beta1, beta2, beta3 = group["betas"]
            for parameter in group["params"]:
                gradient = parameter.grad
                state = self.state[parameter]
                if not state:
                    state["step"] = 0
                    for name in ("fast", "slow", "square"):
                        state[name] = torch.zeros_like(parameter)
                state["step"] += 1
                state["fast"].lerp_(gradient, 1 - beta1)
                state["slow"].lerp_(gradient, 1 - beta3)
                state["square"].lerp_(gradient.square(), 1 - beta2)
                fast = state["fast"] / (1 - beta1 ** state["step"])
                size = (state["square"] / (1 - beta2 ** state["step"])).sqrt_() + group["eps"]
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(group["lr"] * (fast + group["alpha"] * state["slow"]) / size)


def ademamix(
    groups: list[dict[str, Any]],
    settings: OptimizerConfig,
    *,
    slow_beta: float = 0.9999,
    alpha: float = 5.0,
) -> AdEMAMix:
    """Of Megatron's parameter groups, whose `lr` and `weight_decay` the schedule sets; `settings`
    is the section `optimizer`.
    """
    betas = (settings.adam_beta1, settings.adam_beta2, slow_beta)
    return AdEMAMix(groups, {"betas": betas, "alpha": alpha, "eps": settings.adam_eps})
