"""Gated units: values by hand, and gradients by autograd of the same formula, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron_gspo.mcore.gated_units import SWIGLU, ClampedGLU, GatedUnit

UNITS = [SWIGLU, ClampedGLU(limit=1.0), ClampedGLU(limit=0.5, alpha=2.0, offset=0.25)]


def formula(unit: GatedUnit, gate: Tensor, linear: Tensor) -> Tensor:
    if not isinstance(unit, ClampedGLU):
        return gate * torch.sigmoid(gate) * linear
    gate = gate.clamp(max=unit.limit)
    linear = linear.clamp(-unit.limit, unit.limit)
    return gate * torch.sigmoid(unit.alpha * gate) * (linear + unit.offset)


def test_clamped_values_by_hand():
    """The gate is clamped above only, the other half on both sides."""
    unit = ClampedGLU(limit=7.0)
    numbers = [(9.0, 9.0), (-9.0, -9.0), (2.0, 3.0)]
    gate, linear = torch.tensor(numbers, dtype=torch.float64).t()
    clamped = [(7.0, 7.0), (-9.0, -7.0), (2.0, 3.0)]
    expected = [g / (1 + math.exp(-1.702 * g)) * (x + 1) for g, x in clamped]
    assert unit.product(gate, linear).tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("unit", UNITS, ids=str)
def test_products_and_gradients(unit):
    g = torch.Generator().manual_seed(0)
    gate, linear, grad = (torch.randn(40, 3, generator=g, dtype=torch.float64) for _ in range(3))
    before = gate.clone(), linear.clone()
    inputs = gate.clone().requires_grad_(), linear.clone().requires_grad_()
    expected = formula(unit, *inputs)
    assert torch.allclose(unit.product(gate, linear), expected, atol=1e-14, rtol=0)
    out = torch.empty_like(gate), torch.empty_like(linear)
    unit.backward(grad.clone(), gate, linear, out)
    wanted = torch.autograd.grad((expected * grad).sum(), inputs)
    assert all(torch.allclose(a, b, atol=1e-14, rtol=0) for a, b in zip(out, wanted, strict=True))
    assert torch.equal(gate, before[0]) and torch.equal(linear, before[1]), (
        "read again in the backward"
    )
