"""Modules of a Transformers model by what they do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def modules_of(model: nn.Module, is_wanted: Callable[[nn.Module], bool], missing: str) -> list[Any]:
    """The selected modules in model order.

    Without any, ValueError in one line: what is `missing`, and the fix.
    """
    modules = [module for module in model.modules() if is_wanted(module)]
    if not modules:
        model_type = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
        raise ValueError(f"model type {model_type} has no {missing}")
    return modules
