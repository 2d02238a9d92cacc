"""The kernels before attention, against float64, over sizes that don't fill their tiles."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from megatron_gspo.kernels.operators import rotated_heads
from megatron_gspo.mcore.operators import rotate
from tests.kernels.errors import assert_near, check_operator

EPS = 1e-6


@dataclass(frozen=True)
class Heads:
    """queries: of each group. rotated: of the dimensions of a head, ``size``."""

    tokens: int
    groups: int
    queries: int
    size: int
    rotated: int

    @property
    def width(self) -> int:
        return self.groups * (self.queries + 2) * self.size


CASES = {
    "one head of a token": Heads(1, 1, 1, 4, 4),
    "several groups": Heads(5, 2, 3, 16, 16),
    "no power of two": Heads(3, 2, 1, 24, 24),
    "half of a head is rotated": Heads(4, 1, 2, 16, 8),
    "a part is rotated, no power of two": Heads(3, 2, 2, 24, 6),
    "heads of 128": Heads(2, 1, 8, 128, 128),
}


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def composite(
    mixed: Tensor, weights: list[Tensor] | None, cos: Tensor, sin: Tensor, case: Heads
) -> list[Tensor]:
    """Query, key and value by plain torch, in the dtype of ``mixed``."""
    by_group = mixed.unflatten(1, (case.groups, case.queries + 2, case.size))
    query = by_group[:, :, :-2].flatten(1, 2)
    key = by_group[:, :, -2]
    results = []
    for i, head in enumerate((query, key)):
        if weights is not None:
            head = torch.nn.functional.rms_norm(head, (case.size,), weights[i], EPS)
        turned = rotate(head[..., : case.rotated], cos, sin)
        results.append(torch.cat((turned, head[..., case.rotated :]), dim=-1))
    return [*results, by_group[:, :, -1]]


def inputs(case: Heads, dtype: torch.dtype) -> tuple[Tensor, list[Tensor], Tensor, Tensor]:
    """``mixed``, both weights, cosines and sines as of positions."""
    mixed = draw(case.tokens, case.width, seed=0).to(dtype)
    weights = [(1 + 0.3 * draw(case.size, seed=seed)).to(dtype) for seed in (1, 2)]
    angles = 3 * draw(case.tokens, 1, case.rotated // 2, seed=3)
    cos = torch.cat((angles.cos(), angles.cos()), -1).to(dtype)
    sin = torch.cat((-angles.sin(), angles.sin()), -1).to(dtype)
    return mixed, weights, cos, sin


@pytest.mark.parametrize("with_norms", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_values_and_gradients(case, dtype, with_norms):
    mixed, weights, cos, sin = inputs(case, dtype)
    leaves = [mixed, *weights] if with_norms else [mixed]
    exact_leaves = [leaf.double().requires_grad_() for leaf in leaves]
    exact = composite(
        exact_leaves[0],
        exact_leaves[1:] if with_norms else None,
        cos.double(),
        sin.double(),
        case,
    )
    grads = [draw(*value.shape, seed=4 + i).to(dtype) for i, value in enumerate(exact)]
    exact_gradients = torch.autograd.grad(exact, exact_leaves, [grad.double() for grad in grads])

    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    given = leaves[1:] if with_norms else [None, None]
    outputs = rotated_heads(leaves[0], *given, cos, sin, case.groups, case.size, EPS)
    gradients = torch.autograd.grad(outputs, leaves, grads)
    for output, expected in zip(outputs, exact, strict=True):
        assert output.is_contiguous() and output.dtype == dtype
        assert_near(output, expected, dtype)
    for gradient, expected in zip(gradients, exact_gradients, strict=True):
        assert_near(gradient, expected, dtype)


def test_no_tokens():
    case = Heads(0, 2, 2, 16, 16)
    mixed, weights, cos, sin = inputs(case, torch.float32)
    leaves = [leaf.requires_grad_() for leaf in (mixed, *weights)]
    outputs = rotated_heads(*leaves, cos, sin, case.groups, case.size, EPS)
    sum(output.sum() for output in outputs).backward()
    assert outputs[0].shape == (0, 4, 16) and not weights[0].grad.any()


def test_more_heads_than_programs(monkeypatch):
    """Each program then has several tiles."""
    from megatron_gspo.kernels import rotated_heads as kernel

    monkeypatch.setattr(kernel, "PROGRAMS", 2)
    test_values_and_gradients(CASES["several groups"], torch.float32, True)


def test_shapes_and_gradients_of_the_operator():
    case = CASES["several groups"]
    mixed, weights, cos, sin = inputs(case, torch.float32)
    leaves = [leaf.requires_grad_() for leaf in (mixed, *weights)]
    check_operator(rotated_heads, (*leaves, cos, sin, case.groups, case.size, EPS))
