"""Copies of tokens in another order, and their sums: for experts, one for each of a token's experts,
sorted by expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_gspo.kernels import row_kernels_apply
from megatron_gspo.kernels.operators import copy_rows, sum_rows
from megatron_gspo.mcore.device_copies import copy_to_device
from megatron_gspo.parallel.autograd_context import AutogradContext


class Copies(Protocol):
    """Copies of tokens, and their sums; both without a gradient."""

    def copy(self, x: Tensor) -> Tensor:
        """Tokens [n, d] to copies [copies, d]."""
        ...

    def sum(self, x: Tensor) -> Tensor:
        """Copies [copies, d] to the sum of each token's copies, [n, d]."""
        ...


@dataclass(frozen=True)
class TokenCopies:
    """k copies of each of n tokens, sorted by expert.

    token: [n k], the token that each copy is of. entry: [n k], its place in the flattened map of
    tokens and experts. slot: [n, k], where the copies of each token are, from its first expert on.
    All are int64.
    """

    token: Tensor
    entry: Tensor
    slot: Tensor

    @classmethod
    def of(cls, routing_map: Tensor, per_token: int, *, last_first: bool = False) -> TokenCopies:
        """``routing_map`` [n, experts]: ``per_token`` entries of each row are true. So the number of
        copies is known on the host, which doesn't wait for the device. last_first: sorted from the
        last to the first expert.
        """
        tokens, experts = routing_map.shape
        by_expert = routing_map.t()
        if last_first:
            by_expert = by_expert.flip(0)
        entries = torch.nonzero_static(by_expert.contiguous(), size=tokens * per_token)
        expert, token = entries.unbind(1)
        slot = token.argsort(stable=True).view(tokens, per_token)
        if last_first:
            expert = experts - 1 - expert
            slot = slot.flip(1)
        return cls(token, token * experts + expert, slot)

    @classmethod
    def of_chunks(cls, sizes: Tensor, order: Tensor, device: torch.device) -> TokenCopies:
        """One copy of each row, with the chunks that rows come in put in another order.

        ``sizes`` [chunks]: rows of each chunk; ``order`` [chunks]: which chunk comes first, second
        and so on; both on the host.
        """
        starts = sizes.cumsum(0) - sizes
        sorted_sizes = sizes[order]
        distance = starts[order] - (sorted_sizes.cumsum(0) - sorted_sizes)
        distance_back = torch.empty_like(distance)
        distance_back[order] = -distance
        values = dict(there=distance, size=sorted_sizes, back=distance_back, size_back=sizes)
        moved = copy_to_device(values, device)
        count = int(sizes.sum())
        positions = torch.arange(count, device=device)
        row = positions + moved["there"].repeat_interleave(moved["size"], output_size=count)
        slot = positions + moved["back"].repeat_interleave(moved["size_back"], output_size=count)
        return cls(row, row, slot[:, None])

    def copy(self, x: Tensor) -> Tensor:
        """Tokens [n, d] to copies [n k, d]; without a gradient."""
        if row_kernels_apply(x):
            return copy_rows(x, self.token)
        return x.index_select(0, self.token)

    def sum(self, x: Tensor) -> Tensor:
        """Copies [n k, d] to the sum of each token's copies, [n, d], without a gradient; from its
        first expert on, unlike a scatter.
        """
        if row_kernels_apply(x):
            return sum_rows(x, self.slot)
        return torch.nn.functional.embedding_bag(self.slot, x, mode="sum")


def copy_tokens(x: Tensor, copies: Copies) -> Tensor:
    """``copies.copy`` with a gradient."""
    return _CopyTokens.apply(x, copies)


def sum_copies(x: Tensor, copies: Copies) -> Tensor:
    """``copies.sum`` with a gradient."""
    return _SumCopies.apply(x, copies)


class _CopiesContext(AutogradContext, Protocol):
    copies: Copies


class _CopyTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _CopiesContext, x: Tensor, copies: Copies) -> Tensor:
        ctx.copies = copies
        return copies.copy(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: _CopiesContext, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.copies.sum(grad.contiguous()), None


class _SumCopies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _CopiesContext, x: Tensor, copies: Copies) -> Tensor:
        ctx.copies = copies
        return copies.sum(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: _CopiesContext, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.copies.copy(grad), None
