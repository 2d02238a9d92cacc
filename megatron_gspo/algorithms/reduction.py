"""How the values of a metric become one: those of micro-batches, of ranks and of updates."""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor


class Reduction(Enum):
    """SUM: the values are shares, which add up over micro-batches and ranks; over updates the mean
    is taken. MAX, MIN: the largest or smallest value counts everywhere."""

    SUM = "sum"
    MAX = "max"
    MIN = "min"

    def combine(self, first: Tensor, second: Tensor) -> Tensor:
        """The value of two micro-batches together."""
        if self is Reduction.MAX:
            return torch.maximum(first, second)
        if self is Reduction.MIN:
            return torch.minimum(first, second)
        return first + second


_EXTREMES = {
    "ratio_max": Reduction.MAX,
    "ratio_min": Reduction.MIN,
    "mismatch/abs_diff_max": Reduction.MAX,
}


def reduction_of(name: str) -> Reduction:
    """The reduction of a metric: SUM unless it is declared as an extreme in this module."""
    return _EXTREMES.get(name, Reduction.SUM)
