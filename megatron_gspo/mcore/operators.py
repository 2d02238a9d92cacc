"""The element-wise parts of a layer as autograd functions with hand-written backwards.

Op-by-op autograd of these took a sixth of a small model's training step on a CPU. Plain torch, any device. Each equals
its composite form up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_gspo.mcore.device_copies import copy_to_device
from megatron_gspo.mcore.gated_units import SWIGLU, GatedUnit

_STRIDE = 8  # the grouped kernel takes bfloat16 in strides of 16 bytes


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x ** 2) + eps) * weight`` over the last dimension; ``x`` [..., h], ``weight`` [h].

    Low precision and GPUs use torch's own, which sums in float32 and is fused there.
    """
    if x.is_cuda or x.dtype not in (torch.float32, torch.float64) or weight.dtype != x.dtype:
        return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)
    return _RMSNorm.apply(x, weight, eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        squares = torch.linalg.vecdot(x, x).unsqueeze(-1)  # a little closer than the square of vector_norm
        inverse = squares.mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        # y_j = x_j r w_j with r = (mean(x^2) + eps)^-1/2, so dr/dx_i = -r^3 x_i / h
        x, weight, inverse = ctx.saved_tensors
        product = (grad * x).view(-1, x.shape[-1])
        grad_weight = torch.mv(product.t(), inverse.view(-1))
        along = torch.mv(product, weight).view(inverse.shape)
        factor = inverse.pow(3).mul_(along).mul_(-1.0 / x.shape[-1])
        return (grad * weight).mul_(inverse).addcmul_(x, factor), grad_weight, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotary embedding: ``x * cos + (second half, first half of x) * sin``.

    ``x`` [t, heads, d]; ``cos`` [t, 1, d]; ``sin`` [t, 1, d], its first half negated. interleaved: the pairs of ``x``
    are neighbours; the result has their first elements in its first half.
    """
    if interleaved:
        x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return _Rotate.apply(x, cos, sin)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return (x * cos).addcmul_(_swapped(x), sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors  # a rotation's transpose turns the other way
        return (grad * cos).addcmul_(_swapped(grad), sin, value=-1.0), None, None


def _swapped(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((second, first), dim=-1)


def pad_rows(x: Tensor, source: Tensor, slot: Tensor) -> Tensor:
    """Rows of ``x`` [n, ...] laid out in padded slots, [slots, ...]: slot s holds row ``source[s]``.

    Row i is in slot ``slot[i]``. All other slots are padding; their gradient must be zero and is not read.
    """
    return _PadRows.apply(x, source, slot)


class _PadRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, slot: Tensor) -> Tensor:
        ctx.save_for_backward(slot)
        return x.contiguous().index_select(0, source)  # torch selects row by row from a strided tensor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (slot,) = ctx.saved_tensors
        return grad.contiguous().index_select(0, slot), None, None


def unpad_rows(x: Tensor, slot: Tensor) -> Tensor:
    """The inverse of ``pad_rows``: row i of the result is slot ``slot[i]`` of ``x`` [slots, ...]; slots are distinct.

    ``slot`` is int64.
    """
    return _UnpadRows.apply(x, slot)


class _UnpadRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, slot: Tensor) -> Tensor:
        ctx.save_for_backward(slot)
        ctx.slots = x.shape[0]
        return x.index_select(0, slot)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (slot,) = ctx.saved_tensors
        return grad.new_zeros(ctx.slots, *grad.shape[1:]).index_copy_(0, slot, grad), None


@dataclass(frozen=True)
class Permutation:
    """Copies of rows in another order, as tokens sorted by expert.

    source: [copies], the row that each copy is of. The copies of row i are ``order[first[i] : first[i + 1]]``.
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
        """Copies [copies, d] to the sums over each row's copies, [n, d]; in a fixed order, unlike a scatter."""
        return torch.nn.functional.embedding_bag(self.order, x, self.first, mode="sum")


def permute(x: Tensor, permutation: Permutation) -> Tensor:
    """``permutation.copy`` with a gradient."""
    return _Permute.apply(x, permutation)


def unpermute(x: Tensor, permutation: Permutation) -> Tensor:
    """``permutation.sum`` with a gradient."""
    return _Unpermute.apply(x, permutation)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, permutation: Permutation) -> Tensor:
        ctx.permutation = permutation
        return permutation.copy(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.permutation.sum(grad.contiguous()), None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, permutation: Permutation) -> Tensor:
        ctx.permutation = permutation
        return permutation.sum(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.permutation.copy(grad), None


def masked_entries(mask: Tensor, per_row: int) -> tuple[Tensor, Tensor]:
    """Row and column of each true entry of ``mask`` [n, m], sorted by column, then row; two of [n * per_row], int64.

    ``per_row`` entries of each row are true. So their number is known on the host, which doesn't wait for the device.
    """
    by_column, size = mask.t().contiguous(), mask.shape[0] * per_row
    try:
        column, row = torch.nonzero_static(by_column, size=size).unbind(1)
    except NotImplementedError:  # on CUDA before torch 2.7
        column, row = by_column.nonzero(as_tuple=True)
    return row, column


@dataclass(frozen=True)
class ExpertWeights:
    """``up[e]`` [2 f, h], gate over linear; ``down[e]`` [h, f]; their biases [2 f] and [h], or none.

    down_bias_share: the part of ``down_bias`` that is added here, where tensor-parallel ranks' outputs are summed. Each
    rank's gradient is that of the whole bias.
    """

    up: Sequence[Tensor]
    down: Sequence[Tensor]
    up_bias: Sequence[Tensor] = ()
    down_bias: Sequence[Tensor] = ()
    down_bias_share: float = 1.0


def gated_experts(x: Tensor, probs: Tensor, counts: Tensor, weights: ExpertWeights,
                  unit: GatedUnit = SWIGLU) -> Tensor:  # fmt: skip
    """Gated experts over rows sorted by expert, each row's output times its routing probability; [n, h].

    ``x`` [n, h]; ``probs`` [n]; ``counts`` [experts]: rows of each expert. On a GPU in bfloat16 the host doesn't read
    ``counts``.
    """
    if grouped_products_apply(x, weights.down[0].shape[1]):
        if counts.device != x.device:  # expert parallelism has them on the host
            counts = copy_to_device({"counts": counts}, x.device)["counts"]
        products: ExpertProducts = GroupedProducts(counts.cumsum(0, dtype=torch.int32), counts == 0)
    else:
        products = LoopedProducts(counts.tolist())
    kind = products, unit, weights.down_bias_share
    return _GatedExperts.apply(x, probs, kind, *weights.up, *weights.down, *weights.up_bias, *weights.down_bias)


def grouped_products_apply(x: Tensor, ffn_size: int) -> bool:
    """Whether torch has a grouped kernel for rows ``x`` [n, h]: of bfloat16 on a GPU, in strides of 16 bytes.

    On a CPU torch's grouped product is a loop too, and the weights would be copied for nothing.
    """
    return (
        x.is_cuda
        and x.dtype == torch.bfloat16
        and x.shape[0] > 0
        and x.shape[1] % _STRIDE == ffn_size % _STRIDE == 0
        and hasattr(torch.nn.functional, "grouped_mm")
    )


class ExpertProducts(Protocol):
    """The matrix products of experts whose rows are next to each other."""

    def rows_by_weights(self, rows: Tensor, weights: Sequence[Tensor], *, transpose: bool) -> Tensor:
        """``rows`` [n, a] of each expert times its weight [a, b], or [b, a] with ``transpose``; [n, b]."""

    def weight_gradients(self, grad: Tensor, rows: Tensor) -> Sequence[Tensor]:
        """``grad.t() @ rows`` of each expert's rows: ``grad`` [n, b], ``rows`` [n, a], results [b, a]."""

    def rows_of(self, vectors: Sequence[Tensor], rows: int) -> Tensor:
        """Each expert's vector [a] for each of its rows, [rows, a]."""

    def sums(self, rows: Tensor) -> Sequence[Tensor]:
        """The sum of each expert's rows: ``rows`` [n, a], results [a]."""


@dataclass(frozen=True)
class LoopedProducts:
    """One product after the other, in any dtype. counts: rows of each expert, on the host."""

    counts: list[int]

    def rows_by_weights(self, rows: Tensor, weights: Sequence[Tensor], *, transpose: bool) -> Tensor:
        result = rows.new_empty(rows.shape[0], weights[0].shape[0 if transpose else 1])
        for part, weight, out in zip(rows.split(self.counts), weights, result.split(self.counts), strict=True):
            torch.mm(part, weight.t() if transpose else weight, out=out)
        return result

    def weight_gradients(self, grad: Tensor, rows: Tensor) -> Sequence[Tensor]:
        parts = zip(grad.split(self.counts), rows.split(self.counts), strict=True)
        return [g.t() @ part for g, part in parts]

    def rows_of(self, vectors: Sequence[Tensor], rows: int) -> Tensor:
        return torch.cat([vector.expand(count, -1) for vector, count in zip(vectors, self.counts, strict=True)])

    def sums(self, rows: Tensor) -> Sequence[Tensor]:
        return [part.sum(0) for part in rows.split(self.counts)]


@dataclass(frozen=True)
class GroupedProducts:
    """One kernel for all experts. offsets: [experts] int32, where each expert's rows end; empty: [experts] bool.

    The kernel needs the weights in one tensor. They are copied for each product, since Megatron's parameter buffer
    decides where they are: for 30B-A3B with EP 8 at most 96 MiB at a time.
    """

    offsets: Tensor
    empty: Tensor

    def rows_by_weights(self, rows: Tensor, weights: Sequence[Tensor], *, transpose: bool) -> Tensor:
        stacked = torch.stack(tuple(weights))
        by_expert = stacked.transpose(1, 2) if transpose else stacked
        return torch.nn.functional.grouped_mm(rows, by_expert, offs=self.offsets)

    def weight_gradients(self, grad: Tensor, rows: Tensor) -> Sequence[Tensor]:
        result = torch.nn.functional.grouped_mm(grad.t(), rows, offs=self.offsets)
        # on Blackwell the kernel doesn't write the result of an expert without rows (pytorch#172439)
        return result.masked_fill_(self.empty[:, None, None], 0.0).unbind(0)

    def rows_of(self, vectors: Sequence[Tensor], rows: int) -> Tensor:
        places = torch.arange(rows, dtype=torch.int32, device=self.offsets.device)
        return torch.stack(tuple(vectors)).index_select(0, torch.searchsorted(self.offsets, places, right=True))

    def sums(self, rows: Tensor) -> Sequence[Tensor]:
        ones = rows.new_ones(rows.shape[0], _STRIDE)  # of the kernel's least width; one column is the sum
        return [product[:, 0] for product in self.weight_gradients(rows, ones)]


class _GatedExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, probs: Tensor, kind: tuple[ExpertProducts, GatedUnit, float],
                *weights: Tensor) -> Tensor:  # fmt: skip
        products, unit, share = kind
        up, down, up_bias, down_bias = _parts(weights)
        hidden = products.rows_by_weights(x, up, transpose=True)
        if up_bias:
            hidden += products.rows_of(up_bias, len(x))
        scaled = _scaled(unit.product(*hidden.chunk(2, dim=1)), probs)
        ctx.kind = kind
        ctx.save_for_backward(x, probs, hidden, *weights)
        out = products.rows_by_weights(scaled, down, transpose=True)
        if down_bias:
            out += _scaled(products.rows_of(down_bias, len(x)), probs * share)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, probs, hidden, *weights = ctx.saved_tensors
        (products, unit, share), grad = ctx.kind, grad.contiguous()
        up, down, up_bias, down_bias = _parts(weights)
        gate, linear = hidden.chunk(2, dim=1)
        product = unit.product(gate, linear)
        grad_scaled = products.rows_by_weights(grad, down, transpose=False)
        grad_down = products.weight_gradients(grad, _scaled(product, probs))
        grad_probs = product.mul_(grad_scaled).sum(1)
        grad_down_bias: Sequence[Tensor] = ()
        if down_bias:
            grad_probs += (grad * products.rows_of(down_bias, len(x))).sum(1) * share
            grad_down_bias = products.sums(_scaled(grad, probs))
        grad_hidden = torch.empty_like(hidden)
        unit.backward(_scaled(grad_scaled, probs), gate, linear, grad_hidden.chunk(2, dim=1))
        grad_up = products.weight_gradients(grad_hidden, x)
        grad_up_bias = products.sums(grad_hidden) if up_bias else ()
        grad_x = products.rows_by_weights(grad_hidden, up, transpose=False)
        return grad_x, grad_probs.to(probs.dtype), None, *grad_up, *grad_down, *grad_up_bias, *grad_down_bias


def _parts(weights: Sequence[Tensor]) -> tuple[Sequence[Tensor], ...]:
    """The experts' up and down weights, and their biases, if there are any."""
    experts = sum(weight.dim() == 2 for weight in weights) // 2
    up, down, up_bias, down_bias = (weights[i * experts : (i + 1) * experts] for i in range(4))
    return up, down, up_bias, down_bias


def _scaled(rows: Tensor, probs: Tensor) -> Tensor:
    """Times each row's probability, in ``rows``' dtype; multiplied in the wider of the two, as Megatron does."""
    return (rows * probs[:, None]).to(rows.dtype)
