"""Copies of tokens in another order, and their sums: one for each of a token's experts, sorted by
expert, or one for each rank that has some of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_gspo.kernels import row_kernels_apply
from megatron_gspo.kernels.operators import copy_rows, sum_rows
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
    """Copies of n tokens, sorted by group: by expert, or by the rank that they are sent to.

    token: [copies], the token that each copy is of. entry: [copies], its place in the flattened map
    of tokens and groups. slot: [copies], where the copies are, those of the first token first, each
    token's from its first group on; first: [n], where each token's begin in it. All are int64.
    most: the most copies of a token.
    """

    token: Tensor
    entry: Tensor
    slot: Tensor
    first: Tensor
    most: int

    @classmethod
    def of(
        cls, token_map: Tensor, count: int, *, most: int, last_first: bool = False
    ) -> TokenCopies:
        """``token_map`` [n, groups]: ``count`` entries are true, at most ``most`` of a row. The host
        knows both, and doesn't wait for the device. last_first: sorted from the last to the first
        group.
        """
        tokens, groups = token_map.shape
        by_group = token_map.t()
        if last_first:
            by_group = by_group.flip(0)
        group, token = torch.nonzero_static(by_group.contiguous(), size=count).unbind(1)
        if last_first:
            group = groups - 1 - group
        entry = token * groups + group
        if count == tokens * most:
            first = torch.arange(0, count, most, device=token_map.device)
        else:
            copies = token_map.sum(1)
            first = copies.cumsum(0) - copies
        return cls(token, entry, entry.argsort(), first, most)

    def copy(self, x: Tensor) -> Tensor:
        """Tokens [n, d] to copies [copies, d]; without a gradient."""
        if row_kernels_apply(x, "row_copies"):
            return copy_rows(x, self.token)
        return x.index_select(0, self.token)

    def sum(self, x: Tensor) -> Tensor:
        """Copies [copies, d] to the sum of each token's copies, [n, d], without a gradient; from its
        first group on, unlike a scatter.
        """
        if row_kernels_apply(x, "row_copies"):
            return sum_rows(x, self.slot, self.first, self.most)
        return torch.nn.functional.embedding_bag(self.slot, x, self.first, mode="sum")


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
