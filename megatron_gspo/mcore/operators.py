"""The element-wise parts of a layer as autograd functions with hand-written backwards.

Op-by-op autograd of these took a sixth of a small model's training step on a CPU. Plain torch, any
device. Each equals its composite form up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_gspo.mcore.device_copies import copy_to_device
from megatron_gspo.mcore.expert_products import (
    STRIDE,
    ExpertProducts,
    GroupedProducts,
    LoopedProducts,
)
from megatron_gspo.mcore.gated_units import SWIGLU, ExpertUnit, scaled
from megatron_gspo.mcore.token_copies import TokenCopies
from megatron_gspo.parallel.autograd_context import AutogradContext
from megatron_gspo.parallel.main_gradients import main_gradients, placeholder

T = TypeVar("T")
U = TypeVar("U")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x ** 2) + eps) * weight`` over the last dimension; ``x`` [..., h], ``weight``
    [h].

    Low precision and GPUs use torch's own, which sums in float32 and is fused there.
    """
    if x.is_cuda or x.dtype not in (torch.float32, torch.float64) or weight.dtype != x.dtype:
        return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)
    return _RMSNorm.apply(x, weight, eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        # A little closer than the square of vector_norm.
        squares = torch.linalg.vecdot(x, x).unsqueeze(-1)
        inverse = squares.mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        # y_j = x_j r w_j with r = (mean(x^2) + eps)^-1/2, so dr/dx_i = -r^3 x_i / h
        x, weight, inverse = ctx.saved_tensors
        product = (grad * x).view(-1, x.shape[-1])
        grad_weight = torch.mv(product.t(), inverse.view(-1))
        along = torch.mv(product, weight).view(inverse.shape)
        factor = inverse.pow(3).mul_(along).mul_(-1.0 / x.shape[-1])
        return (grad * weight).mul_(inverse).addcmul_(x, factor), grad_weight, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotary embedding: ``x * cos + (second half, first half of x) * sin``.

    ``x`` [t, heads, d]; ``cos`` [t, 1, d]; ``sin`` [t, 1, d], its first half negated. interleaved:
    the pairs of ``x`` are neighbours; the result has their first elements in its first half.
    """
    if interleaved:
        x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return _Rotate.apply(x, cos, sin)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return (x * cos).addcmul_(_swapped(x), sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors  # a rotation's transpose turns the other way
        return (grad * cos).addcmul_(_swapped(grad), sin, value=-1.0), None, None


def _swapped(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((second, first), dim=-1)


def pad_rows(x: Tensor, source: Tensor, slot: Tensor) -> Tensor:
    """Rows of ``x`` [n, ...] laid out in padded slots, [slots, ...]: slot s holds row
    ``source[s]``.

    Row i is in slot ``slot[i]``. All other slots are padding; their gradient must be zero and is
    not read.
    """
    return _PadRows.apply(x, source, slot)


class _PadRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, source: Tensor, slot: Tensor) -> Tensor:
        ctx.save_for_backward(slot)
        # Torch selects row by row from a strided tensor.
        return x.contiguous().index_select(0, source)

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, None, None]:
        (slot,) = ctx.saved_tensors
        return grad.contiguous().index_select(0, slot), None, None


def unpad_rows(x: Tensor, slot: Tensor) -> Tensor:
    """The inverse of ``pad_rows``: row i of the result is slot ``slot[i]`` of ``x`` [slots, ...];
    slots are distinct.

    ``slot`` is int64.
    """
    return _UnpadRows.apply(x, slot)


class _UnpadContext(AutogradContext, Protocol):
    slots: int


class _UnpadRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _UnpadContext, x: Tensor, slot: Tensor) -> Tensor:
        ctx.save_for_backward(slot)
        ctx.slots = x.shape[0]
        return x.index_select(0, slot)

    @staticmethod
    @once_differentiable
    def backward(ctx: _UnpadContext, grad: Tensor) -> tuple[Tensor, None]:
        (slot,) = ctx.saved_tensors
        return grad.new_zeros(ctx.slots, *grad.shape[1:]).index_copy_(0, slot, grad), None


@dataclass(frozen=True)
class Permutation:
    """Copies of rows in another order.

    source: [copies], the row that each copy is of. The copies of row i are ``order[first[i] :
    first[i + 1]]``.
    """

    source: Tensor
    order: Tensor
    first: Tensor

    @classmethod
    def of(cls, source: Tensor, count: Tensor) -> Permutation:
        """``count`` [n]: copies of each row."""
        return cls(source, source.argsort(stable=True), count.cumsum(0) - count)

    def copy(self, x: Tensor) -> Tensor:
        """Rows [n, d] to copies [copies, d]."""
        return x.index_select(0, self.source)

    def sum(self, x: Tensor) -> Tensor:
        """Copies [copies, d] to the sums over each row's copies, [n, d]; in a fixed order,
        unlike a scatter.
        """
        return torch.nn.functional.embedding_bag(self.order, x, self.first, mode="sum")


@dataclass(frozen=True)
class LowRank(Generic[T]):
    """What is added to each expert's weight: ``b[e] @ a[e]``, with ``a`` [r, in] and ``b``
    [out, r], scaled.
    """

    a: Sequence[T]
    b: Sequence[T]


@dataclass(frozen=True)
class ExpertWeights(Generic[T]):
    """``up[e]`` [2 f, h], gate over linear, or [f, h] without a gate; ``down[e]`` [h, f]; their
    biases and adapters, or none. In place of a tensor there may be something about it.

    down_bias_share: the part of ``down_bias`` that is added here, where tensor-parallel ranks'
    outputs are summed. Each rank's gradient is that of the whole bias.
    """

    up: Sequence[T]
    down: Sequence[T]
    up_bias: Sequence[T] = ()
    down_bias: Sequence[T] = ()
    up_adapter: LowRank[T] | None = None
    down_adapter: LowRank[T] | None = None
    down_bias_share: float = 1.0

    def tensors(self) -> list[T]:
        """All of them, in one list."""
        tensors = [*self.up, *self.down, *self.up_bias, *self.down_bias]
        for adapter in (self.up_adapter, self.down_adapter):
            if adapter is not None:
                tensors += [*adapter.a, *adapter.b]
        return tensors

    def replaced(self, values: Sequence[U]) -> ExpertWeights[U]:
        """A copy with other values in the place of `tensors`."""
        remaining = iter(values)

        def as_many_as(tensors: Sequence[T]) -> list[U]:
            return list(islice(remaining, len(tensors)))

        def as_adapter(adapter: LowRank[T] | None) -> LowRank[U] | None:
            if adapter is None:
                return None
            return LowRank(a=as_many_as(adapter.a), b=as_many_as(adapter.b))

        # Keywords are evaluated in the order of `tensors`.
        return ExpertWeights(
            up=as_many_as(self.up),
            down=as_many_as(self.down),
            up_bias=as_many_as(self.up_bias),
            down_bias=as_many_as(self.down_bias),
            up_adapter=as_adapter(self.up_adapter),
            down_adapter=as_adapter(self.down_adapter),
            down_bias_share=self.down_bias_share,
        )

    def structure(self) -> ExpertWeights[None]:
        """A copy without the tensors: a graph must keep no others than those that it saves."""
        return self.replaced([None] * len(self.tensors()))


def row_widths(weights: ExpertWeights[Tensor]) -> list[int]:
    """The widths of the rows that experts multiply: of the inner state and of the adapters."""
    adapters = [each for each in (weights.up_adapter, weights.down_adapter) if each is not None]
    return [weights.down[0].shape[1], *(adapter.a[0].shape[0] for adapter in adapters)]


def gated_experts(
    x: Tensor,
    probs: Tensor,
    counts: Tensor,
    weights: ExpertWeights[Tensor],
    unit: ExpertUnit = SWIGLU,
    copies: TokenCopies | None = None,
) -> Tensor:
    """Experts over rows sorted by expert, each row's output times its routing probability;
    [n, h].

    ``x`` [n, h]; ``probs`` [n]; ``counts`` [experts]: rows of each expert. On a GPU in bfloat16 the
    host doesn't read ``counts``. copies: with them ``x`` [tokens, h] is tokens, and the rows are
    these copies. They are made again in the backward pass, so that only tokens are kept for it.
    """
    if grouped_products_apply(x, *row_widths(weights)):
        if counts.device != x.device:  # expert parallelism has them on the host
            counts = copy_to_device({"counts": counts}, x.device)["counts"]
        products: ExpertProducts = GroupedProducts.of(counts)
    else:
        products = LoopedProducts(counts.tolist())
    structure = weights.structure()
    return _GatedExperts.apply(x, probs, products, unit, copies, structure, *weights.tensors())


def grouped_products_apply(x: Tensor, *widths: int) -> bool:
    """Whether torch has a grouped kernel for rows ``x`` [n, h] and rows of ``widths``: of bfloat16
    on a GPU, in strides of 16 bytes.

    On a CPU torch's grouped product is a loop too, and the weights would be copied for nothing.
    """
    return (
        x.is_cuda
        and x.dtype == torch.bfloat16
        and x.shape[0] > 0
        and not any(width % STRIDE for width in (x.shape[1], *widths))
    )


class _ExpertsContext(AutogradContext, Protocol):
    products: ExpertProducts
    unit: ExpertUnit
    copies: TokenCopies | None
    structure: ExpertWeights[None]


class _GatedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _ExpertsContext,
        x: Tensor,
        probs: Tensor,
        products: ExpertProducts,
        unit: ExpertUnit,
        copies: TokenCopies | None,
        structure: ExpertWeights[None],
        *tensors: Tensor,
    ) -> Tensor:
        weights = structure.replaced(tensors)
        rows = x if copies is None else copies.copy(x)
        hidden = _linear(products, rows, weights.up, weights.up_adapter)
        del rows
        if weights.up_bias:
            hidden += products.repeated(weights.up_bias, len(probs))
        ctx.products = products
        ctx.unit = unit
        ctx.copies = copies
        ctx.structure = structure
        ctx.save_for_backward(x, probs, hidden, *tensors)
        product = unit.scaled_product(hidden, probs)
        out = _linear(products, product, weights.down, weights.down_adapter)
        if weights.down_bias:
            out += scaled(
                products.repeated(weights.down_bias, len(probs)), probs * weights.down_bias_share
            )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: _ExpertsContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, probs, hidden, *tensors = ctx.saved_tensors
        products = ctx.products
        grad = grad.contiguous()
        weights = ctx.structure.replaced(tensors)
        wanted = ctx.structure.replaced(ctx.needs_input_grad[-len(tensors) :])
        grad_product, grad_low = _row_gradient(products, grad, weights.down, weights.down_adapter)
        product, grad_hidden, grad_probs = ctx.unit.scaled_backward(grad_product, hidden, probs)
        del grad_product
        down = _weight_gradients(
            products, grad, grad_low, product, weights.down, weights.down_adapter, wanted.down
        )
        del product
        down_bias: Sequence[Tensor] = ()
        if weights.down_bias:
            share = weights.down_bias_share
            grad_probs += (grad * products.repeated(weights.down_bias, len(probs))).sum(1) * share
            down_bias = products.sums(scaled(grad, probs))
        grad_x, grad_low = _row_gradient(products, grad_hidden, weights.up, weights.up_adapter)
        if ctx.copies is not None:
            grad_x = ctx.copies.sum(grad_x)
            if any(wanted.up) or weights.up_adapter is not None:
                x = ctx.copies.copy(x)
        up = _weight_gradients(
            products, grad_hidden, grad_low, x, weights.up, weights.up_adapter, wanted.up
        )
        up_bias = products.sums(grad_hidden) if weights.up_bias else ()
        gradients: ExpertWeights[Tensor | None] = ExpertWeights(
            up=up.weight,
            down=down.weight,
            up_bias=up_bias,
            down_bias=down_bias,
            up_adapter=up.adapter,
            down_adapter=down.adapter,
        )
        return grad_x, grad_probs.to(probs.dtype), None, None, None, None, *gradients.tensors()


@dataclass(frozen=True)
class _LinearGradients:
    """Gradients of the weights, None where they are frozen, and of their adapters."""

    weight: Sequence[Tensor | None]
    adapter: LowRank[Tensor | None] | None


def _linear(
    products: ExpertProducts, x: Tensor, weight: Sequence[Tensor], adapter: LowRank[Tensor] | None
) -> Tensor:
    """Each expert's rows times its weight, and by way of ``adapter`` times ``b @ a`` without
    forming that.
    """
    out = products.rows_by_weights(x, weight, transpose=True)
    if adapter is not None:
        low = products.rows_by_weights(x, adapter.a, transpose=True)
        out += products.rows_by_weights(low, adapter.b, transpose=True)
    return out


def _row_gradient(
    products: ExpertProducts,
    grad: Tensor,
    weight: Sequence[Tensor],
    adapter: LowRank[Tensor] | None,
) -> tuple[Tensor, Tensor | None]:
    """The gradient of the rows of ``_linear``, and that of what they make with ``adapter.a``."""
    grad_x = products.rows_by_weights(grad, weight, transpose=False)
    if adapter is None:
        return grad_x, None
    grad_low = products.rows_by_weights(grad, adapter.b, transpose=False)
    grad_x += products.rows_by_weights(grad_low, adapter.a, transpose=False)
    return grad_x, grad_low


def _weight_gradients(
    products: ExpertProducts,
    grad: Tensor,
    grad_low: Tensor | None,
    x: Tensor,
    weight: Sequence[Tensor],
    adapter: LowRank[Tensor] | None,
    wanted: Sequence[bool],
) -> _LinearGradients:
    """The gradients of what ``_linear`` multiplies ``x`` with. grad_low: of ``_row_gradient``;
    wanted: whether the weights are trained."""
    of_weight: Sequence[Tensor | None] = [None] * len(wanted)
    if any(wanted):
        of_weight = _returned_gradients(products, grad, x, weight)
    if adapter is None or grad_low is None:
        return _LinearGradients(of_weight, None)
    low = products.rows_by_weights(x, adapter.a, transpose=True)
    of_adapter = LowRank(
        a=_returned_gradients(products, grad_low, x, adapter.a),
        b=_returned_gradients(products, grad, low, adapter.b),
    )
    return _LinearGradients(of_weight, of_adapter)


def _returned_gradients(
    products: ExpertProducts, grad: Tensor, x: Tensor, weights: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    """What autograd gets for ``weights``: their gradients, unless these are added to Megatron's
    buffers.
    """
    totals = main_gradients(weights)
    if totals is None:
        return products.weight_gradients(grad, x)
    products.add_weight_gradients(totals, grad, x)
    return [placeholder(weight) for weight in weights]
