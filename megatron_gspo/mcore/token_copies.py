"""Copies of tokens, one for each of a token's experts, sorted by expert; and their sums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_gspo.parallel.autograd_context import AutogradContext


@dataclass(frozen=True)
class TokenCopies:
    """k copies of each of n tokens, sorted by expert, then token.

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


def copy_tokens(x: Tensor, copies: TokenCopies) -> Tensor:
    """Tokens [n, d] to copies [n k, d]."""
    return _CopyTokens.apply(x, copies)


def sum_copies(x: Tensor, copies: TokenCopies) -> Tensor:
    """Copies [n k, d] to the sum of each token's copies, [n, d]; from its first expert on, unlike
    a scatter.
    """
    return _SumCopies.apply(x, copies)


def _gather(x: Tensor, copies: TokenCopies) -> Tensor:
    return x.index_select(0, copies.token)


def _sum(x: Tensor, copies: TokenCopies) -> Tensor:
    return torch.nn.functional.embedding_bag(copies.slot, x, mode="sum")


class _CopiesContext(AutogradContext, Protocol):
    copies: TokenCopies


class _CopyTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _CopiesContext, x: Tensor, copies: TokenCopies) -> Tensor:
        ctx.copies = copies
        return _gather(x, copies)

    @staticmethod
    @once_differentiable
    def backward(ctx: _CopiesContext, grad: Tensor) -> tuple[Tensor, None]:
        return _sum(grad.contiguous(), ctx.copies), None


class _SumCopies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _CopiesContext, x: Tensor, copies: TokenCopies) -> Tensor:
        ctx.copies = copies
        return _sum(x, copies)

    @staticmethod
    @once_differentiable
    def backward(ctx: _CopiesContext, grad: Tensor) -> tuple[Tensor, None]:
        return _gather(grad, ctx.copies), None
