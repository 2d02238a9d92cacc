"""An optimizer of the user's own (``optimizer.function``, ``critic.function``): tried with small
parameters before a run begins, and put in the place of Megatron's Adam.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.optim import Optimizer

from megatron_gspo.config import Config, OptimizerConfig, ParallelConfig
from megatron_gspo.config.training_sections import CriticConfig
from megatron_gspo.mcore.optimizer_state import (
    is_number,
    set_state_numbers,
    state_numbers,
    state_tensors,
)
from megatron_gspo.mcore.policy_tensors import wrapped_optimizers
from megatron_gspo.mcore.protocols import MegatronOptimizer
from megatron_gspo.user_code import UserCodeError, call_for_trial, load_user_function

_SCHEDULED = ("lr", "weight_decay")  # keys of the parameter groups that the schedule writes
_RESERVED = ("param", "fp32_param")  # main weights, beside the state in checkpoints


def use_user_optimizer(optimizer: MegatronOptimizer, section: OptimizerConfig) -> None:
    """Put optimizers of the section's function in the place of those within Megatron's
    ``optimizer``.

    Megatron builds its wrappers around Adam alone. They hold main weights and gradients
    themselves; of what they wrap they use ``param_groups``, ``state`` and ``step``.
    """
    for wrapped in wrapped_optimizers(optimizer):
        assert wrapped.optimizer is not None
        wrapped.optimizer = _make(section, wrapped.optimizer)


def check_user_optimizers(config: Config) -> None:
    """Try the optimizers of the config's functions.

    Raises UserCodeError where one can't be loaded, raises, or does what the layout or a resumed run
    does not reproduce.
    """
    for section in (config.optimizer, config.critic):
        if section.function is not None:
            check_user_optimizer(section, config.parallel)


def check_user_optimizer(section: OptimizerConfig, parallel: ParallelConfig) -> None:
    """Try the function of a section with a matrix and a vector. Raises UserCodeError."""
    section = replace(section, lr=0.1)
    call_for_trial(
        _key(section),
        section.function,
        "(groups, settings) of 2 parameters",
        lambda: _try(section, parallel),
    )


def _try(section: OptimizerConfig, parallel: ParallelConfig) -> None:
    values = [torch.linspace(-1, 1, 24).view(4, 6), torch.linspace(0.5, 1, 5)]
    gradients = [[(value * (step + 1)).sin() for value in values] for step in range(3)]
    trial = _Trial.of(section, values)
    for step in range(2):
        trial.step(gradients[step])
    _check_values(section, trial, values)
    _check_state(section, trial)

    resumed = _Trial.of(section, [torch.ones_like(value) for value in values])
    resumed.step([torch.zeros_like(value) for value in values])
    resumed.load(trial)
    trial.step(gradients[2])
    resumed.step(gradients[2])
    if not _are_equal(resumed.parameters, trial.parameters):
        raise _refusal(
            section,
            "a resumed optimizer takes another step: keep all that steps change in"
            " state[parameter], as tensors of its shape or as numbers",
        )

    alone = _Trial.of(section, values[:1])
    halves = _Trial.of(section, values[0].view(-1).split(12))
    for gradient, _ in gradients:
        alone.step([gradient])
        halves.step(gradient.view(-1).split(12))
    if not _are_close(alone.parameters[0], trial.parameters[0]):
        raise _refusal(
            section,
            "the update of a parameter depends on other parameters, which may be on other ranks:"
            " compute each from its own gradient",
        )
    tensor_parallel = max(
        parallel.tensor_model_parallel_size, parallel.expert_tensor_parallel_size or 1
    )
    is_divided = parallel.use_distributed_optimizer or tensor_parallel > 1
    if is_divided and not _are_close(torch.cat([*halves.parameters]), trial.parameters[0].view(-1)):
        raise _refusal(
            section,
            "the update of an element depends on other elements, and ranks hold parts of a"
            " parameter: set parallel.use_distributed_optimizer: false and tensor parallelism of 1,"
            " or compute each element from its own gradient",
        )


@dataclass(frozen=True)
class _Trial:
    """Small parameters and the user's optimizer of them, each in a group of its own."""

    parameters: list[torch.nn.Parameter]
    optimizer: Optimizer

    @classmethod
    def of(cls, section: OptimizerConfig, values: Sequence[Tensor]) -> _Trial:
        parameters = [torch.nn.Parameter(value.clone()) for value in values]
        groups = [
            {"params": [parameter], "lr": section.lr, "weight_decay": section.weight_decay}
            for parameter in parameters
        ]
        return cls(parameters, _make(section, torch.optim.SGD(groups, lr=section.lr)))

    def step(self, gradients: Sequence[Tensor]) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        self.optimizer.step()

    @torch.no_grad()
    def load(self, other: _Trial) -> None:
        """What a checkpoint keeps of another."""
        for parameter, source in zip(self.parameters, other.parameters, strict=True):
            parameter.copy_(source)
            for name, value in state_tensors(self.optimizer.state[parameter]).items():
                value.copy_(other.optimizer.state[source][name])
        set_state_numbers([self.optimizer], state_numbers([other.optimizer]))


def _check_values(section: OptimizerConfig, trial: _Trial, before: Sequence[Tensor]) -> None:
    for parameter, value in zip(trial.parameters, before, strict=True):
        if not parameter.isfinite().all():
            raise _refusal(section, "a step made NaN or infinity: correct the formula")
        if torch.equal(parameter.detach(), value):
            raise _refusal(section, "a step left a parameter as it was: update it in place")


def _check_state(section: OptimizerConfig, trial: _Trial) -> None:
    states = [trial.optimizer.state[parameter] for parameter in trial.parameters]
    for parameter, state in zip(trial.parameters, states, strict=True):
        for name, value in state.items():
            if name in _RESERVED:
                raise _refusal(section, f"{name!r} names main weights: give the state another name")
            if is_number(value):
                continue
            if not torch.is_tensor(value) or value.shape != parameter.shape:
                shown = list(value.shape) if torch.is_tensor(value) else type(value).__name__
                raise _refusal(
                    section,
                    f"state {name!r} of a parameter {list(parameter.shape)} is {shown}: keep tensors"
                    " of the parameter's shape, which checkpoints reshard, or numbers",
                )
    numbers = [{name: v for name, v in state.items() if is_number(v)} for state in states]
    if numbers[0] != numbers[1]:
        raise _refusal(
            section, f"the parameters have other numbers, {numbers[0]}: keep them as tensors"
        )


def _make(section: OptimizerConfig, replaced: Optimizer) -> Optimizer:
    """The user's optimizer of the parameter groups of another, without what those hold of that."""
    assert section.function is not None
    # torch takes leaves alone, and Megatron's parts of parameters are views of them
    leaves = [
        [parameter.detach().requires_grad_() for parameter in group["params"]]
        for group in replaced.param_groups
    ]
    groups = []
    for group, parameters in zip(replaced.param_groups, leaves, strict=True):
        kept = set(_SCHEDULED) | (group.keys() - replaced.defaults.keys())
        groups.append({name: group[name] for name in group if name in kept})
        groups[-1]["params"] = list(parameters)
    function = load_user_function(_key(section), section.function)
    optimizer = function(groups, section, **section.options)
    if not isinstance(optimizer, Optimizer):
        raise _refusal(
            section, f"returned a {type(optimizer).__name__}: return a torch.optim.Optimizer"
        )
    returned = [group["params"] for group in optimizer.param_groups]
    if [list(map(id, parameters)) for parameters in returned] != [
        list(map(id, parameters)) for parameters in leaves
    ]:
        raise _refusal(
            section, "returned an optimizer of other groups: give it all, in their order"
        )
    for ours, theirs in zip(optimizer.param_groups, replaced.param_groups, strict=True):
        for leaf, parameter in zip(ours["params"], theirs["params"], strict=True):
            if leaf in optimizer.state:
                optimizer.state[parameter] = optimizer.state.pop(leaf)
        ours["params"] = theirs["params"]
    return optimizer


def _are_equal(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def _are_close(ours: Tensor, theirs: Tensor) -> bool:
    return torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def _key(section: OptimizerConfig) -> str:
    return f"{'critic' if isinstance(section, CriticConfig) else 'optimizer'}.function"


def _refusal(section: OptimizerConfig, problem: str) -> UserCodeError:
    return UserCodeError(f"{_key(section)} = {section.function!r}: {problem}")
