"""A router's logits in float32, from products of bfloat16."""

from __future__ import annotations

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_gspo.parallel.autograd_context import AutogradContext


class ExactRouter(TopKRouter):
    """Megatron's router, without copies of tokens and weight in float32 where a GPU multiplies
    bfloat16 into float32.
    """

    def gating(self, input: Tensor) -> Tensor:
        is_bfloat16 = input.dtype == self.weight.dtype == torch.bfloat16
        if not (input.is_cuda and is_bfloat16 and self.config.moe_router_dtype == "fp32"):
            return super().gating(input)
        logits = router_logits(input.reshape(-1, input.shape[-1]), self.weight)
        if self.bias is not None:
            logits = logits + self.bias
        return logits.view(*input.shape[:-1], -1)


def use_exact_routers(model: torch.nn.Module) -> None:
    """Make Megatron's routers `ExactRouter`; parameters and their names stay."""
    for module in model.modules():
        if type(module) is TopKRouter:
            module.__class__ = ExactRouter


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.t()`` in float32; ``x`` [n, h], ``weight`` [experts, h], both bfloat16.

    A product of two bfloat16 numbers is exact in float32, in which the products are added up. The
    gradients are as exact: that of the logits is three bfloat16 numbers. No product has a float32
    factor, so that none is rounded to TF32.
    """
    return _RouterLogits.apply(x, weight)


class _RouterLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _float32_product(x, weight.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        terms = _bfloat16_terms(grad)
        grad_x = terms @ weight.repeat(3, 1)
        if not ctx.needs_input_grad[1]:
            return grad_x, None
        grad_weight = _float32_product(terms.t(), x).view(3, *weight.shape).sum(0)
        return grad_x, grad_weight.to(weight.dtype)


def _float32_product(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b, out_dtype=torch.float32)


def _bfloat16_terms(x: Tensor) -> Tensor:
    """Three bfloat16 numbers whose sum is ``x``, for float32 ``x`` [n, m]: the first of each, the
    second, the third, [n, 3 m].

    float32 has 24 bits, bfloat16 has 8 of the same range.
    """
    terms = x.new_empty(x.shape[0], 3, x.shape[1], dtype=torch.bfloat16)
    terms[:, 0] = x
    rest = x - terms[:, 0]
    terms[:, 1] = rest
    rest -= terms[:, 1]
    terms[:, 2] = rest
    return terms.flatten(1)
