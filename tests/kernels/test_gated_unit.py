"""The kernels of gated units against float64, over shapes that don't fill their tiles."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron_gspo.kernels.operators import scaled_gated_unit, scaled_gated_unit_backward
from tests.kernels.errors import assert_near, check_operator

Unit = tuple[float, float, float]
# limit, alpha and offset
UNITS = {"swiglu": (math.inf, 1.0, 0.0), "clamped": (0.7, 1.702, 1.0)}
# a row, fewer rows than a program takes, and more; widths below, of and above a tile
SHAPES = [(1, 4), (3, 48), (8, 256), (17, 257), (9, 768), (2, 1000)]


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exact(unit: Unit, hidden: Tensor, probs: Tensor) -> Tensor:
    limit, alpha, offset = unit
    gate, linear = hidden.chunk(2, dim=1)
    gate = torch.where(gate > limit, limit, gate)
    linear = torch.where(linear.abs() > limit, limit * linear.sign(), linear)
    return gate / (1 + (-alpha * gate).exp()) * (linear + offset) * probs[:, None]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("unit", UNITS.values(), ids=UNITS)
@pytest.mark.parametrize("rows, width", SHAPES)
def test_values_and_gradients(rows, width, unit, dtype):
    hidden = draw(rows, 2 * width, seed=0).to(dtype).requires_grad_()
    probs = draw(rows, seed=1).sigmoid().requires_grad_()
    grad = draw(rows, width, seed=2).to(dtype)
    exact_inputs = [tensor.detach().double().requires_grad_() for tensor in (hidden, probs)]
    expected = exact(unit, *exact_inputs)
    expected_gradients = torch.autograd.grad(expected, exact_inputs, grad.double())

    output = scaled_gated_unit(hidden, probs, *unit)
    gradients = torch.autograd.grad(output, (hidden, probs), grad)
    again, *_ = scaled_gated_unit_backward(grad, hidden.detach(), probs.detach(), *unit)
    assert output.dtype == dtype and gradients[0].dtype == dtype
    assert torch.equal(again, output)
    assert_near(output, expected, dtype)
    assert_near(gradients[0], expected_gradients[0], dtype)
    assert_near(gradients[1], expected_gradients[1], torch.float32)


def test_no_rows():
    hidden = torch.empty(0, 12, requires_grad=True)
    probs = torch.empty(0, requires_grad=True)
    output = scaled_gated_unit(hidden, probs, math.inf, 1.0, 0.0)
    output.sum().backward()
    assert output.shape == (0, 6) and hidden.grad.shape == (0, 12) and probs.grad.shape == (0,)


def test_what_is_not_a_number_stays_so():
    """A clamp must not make a number of it."""
    hidden = torch.ones(3, 8)
    hidden[0, 0] = math.nan
    hidden[1, 4 + 2] = math.nan
    for unit in UNITS.values():
        output = scaled_gated_unit(hidden, torch.ones(3), *unit)
        assert output.isnan().nonzero().tolist() == [[0, 0], [1, 2]]


@pytest.mark.parametrize("unit", UNITS.values(), ids=UNITS)
def test_shapes_and_gradients_of_the_operator(unit):
    hidden = draw(3, 16, seed=0).requires_grad_()
    probs = draw(3, seed=1).requires_grad_()
    check_operator(scaled_gated_unit, (hidden, probs, *unit))
    values = (draw(3, 8, seed=2), hidden.detach(), probs.detach())
    check_operator(scaled_gated_unit_backward, (*values, *unit))
