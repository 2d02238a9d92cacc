"""How near a kernel's results must be to float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Of one rounding to the dtype, relative to the value. The interpreter cuts off what bfloat16 lacks,
# where a GPU rounds to the nearest.
ROUNDING = {torch.bfloat16: 2.0**-7, torch.float32: 2.0**-23}
# Of sums and functions in float32, relative to the largest value.
FLOAT32 = 4e-6


def check_operator(operator: Any, arguments: tuple[object, ...]) -> None:
    """Its schema, and its shapes for fake tensors, are those of its results. No compiler is
    started.
    """
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(operator, arguments, test_utils=checks)


def assert_near(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Within one rounding of each value to ``dtype``, and float32's error of the largest."""
    assert actual.shape == expected.shape
    actual = actual.detach()
    expected = expected.detach()
    largest = float(expected.abs().max())
    allowed = ROUNDING[dtype] * expected.abs() + FLOAT32 * largest
    assert bool(((actual.double() - expected).abs() <= allowed).all())
