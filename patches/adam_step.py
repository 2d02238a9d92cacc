"""Carry the step count of torch's Adam through a distributed checkpoint.

Upstream: megatron-core 0.16.1 to 0.19.2, ``optimizer/distrib_optimizer.py``, without Transformer Engine and Apex (with
them Adam counts steps per parameter group). Four defects of ``DistributedOptimizer`` affect a resumed run:
``state_dict`` fails on an optimizer that has not stepped yet; ``_set_main_param_and_optimizer_states`` reads a
``step`` from the checkpoint that the ``fully_reshardable`` format stores elsewhere, ``KeyError: 'step'``; and
``load_state_dict`` gives all parameters the same ``step`` tensor, which torch then increments once for each of
them, so that Adam's bias correction is silently wrong from the next step on. And ``state_dict`` fails on a rank whose
optimizer has no parameter at all, such as the experts' on a pipeline stage of dense layers: ``AssertionError``.
Delete when: all four are corrected in the oldest supported megatron-core.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_gspo.patches.mark import replace


def _with_started_adam(original: Any) -> Any:
    def state_dict(self: Any) -> Any:
        if isinstance(self.optimizer, torch.optim.Adam):
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    _start(self.optimizer.state[parameter], parameter)
            if not self.optimizer.state:
                return _state_of_nothing(self.optimizer)
        return original(self)

    return state_dict


def _state_of_nothing(optimizer: torch.optim.Adam) -> dict[str, Any]:
    """The state dict of an optimizer without parameters; nothing depends on its step count."""
    groups = optimizer.state_dict()["param_groups"]
    kept = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    return {"optimizer": {"param_groups": [{**group, "step": 0.0} for group in kept]}}


def _start(state: dict[str, Any], parameter: torch.Tensor) -> None:
    """Fill an empty state with what Adam starts from."""
    if "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32)
    for name in ("exp_avg", "exp_avg_sq"):
        if name not in state:
            state[name] = torch.zeros_like(parameter)


def _with_own_step(original: Any) -> Any:
    def set_main_param_and_optimizer_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        if isinstance(state.get("step"), torch.Tensor) and "step" not in tensors:
            state["step"] = state["step"].clone()
            tensors = {**tensors, "step": state["step"]}
        original(self, model_param, tensors)

    return set_main_param_and_optimizer_states


def apply() -> None:
    """Patch ``DistributedOptimizer``; changes nothing for an optimizer that keeps no step per parameter."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    replace(DistributedOptimizer, "state_dict", _with_started_adam)
    replace(DistributedOptimizer, "_set_main_param_and_optimizer_states", _with_own_step)
