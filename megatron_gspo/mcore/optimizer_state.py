"""What a torch optimizer keeps between steps, under its own names.

By parameter: tensors of the parameter's shape, as Adam's moments, and numbers that are alike for
all parameters, as a step count. Transformer Engine's optimizers keep the step count in the
parameter groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias, TypeGuard

import torch
from torch import Tensor
from torch.optim import Optimizer

STEP = "step"

Number: TypeAlias = Tensor | float
"""A number, or a tensor of one without dimensions."""


def state_tensors(state: Mapping[str, object]) -> dict[str, Tensor]:
    """The tensors in the state of one parameter, without its numbers."""
    return {name: value for name, value in state.items() if torch.is_tensor(value) and value.dim()}


def has_stepped(optimizer: Optimizer) -> bool:
    """Whether any parameter has a state."""
    return any(optimizer.state.values())


def state_numbers(optimizers: Iterable[Optimizer]) -> dict[str, float]:
    """The numbers in the state, by name; none before the first step."""
    numbers: dict[str, float] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if STEP in group:
                numbers[STEP] = _number(group[STEP])
        state: Mapping[str, object] = next(filter(None, optimizer.state.values()), {})
        numbers |= {name: _number(value) for name, value in state.items() if is_number(value)}
    return numbers


def set_state_numbers(optimizers: Iterable[Optimizer], numbers: Mapping[str, float]) -> None:
    """Give the numbers that the state has these values, on every parameter."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if STEP in group:
                group[STEP] = _with_number(group[STEP], numbers[STEP])
        for state in optimizer.state.values():
            for name, value in state.items():
                if is_number(value):
                    state[name] = _with_number(value, numbers[name])


def is_number(value: object) -> TypeGuard[Number]:
    """Whether a value is a number, or a tensor of one without dimensions."""
    return value.dim() == 0 if torch.is_tensor(value) else isinstance(value, (int, float))


def _number(value: Number) -> float:
    return float(value.item()) if isinstance(value, Tensor) else value


def _with_number(value: Number, number: float) -> Number:
    """The number in the form of ``value``: in the same tensor, or of the same type."""
    return value.fill_(number) if isinstance(value, Tensor) else type(value)(number)
