"""The sequences of a packed micro-batch, and sums over them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

SumOverContext: TypeAlias = Callable[[Tensor], Tensor]


def segment_sums(values: Tensor, segment_ids: Tensor, num_segments: int) -> Tensor:
    """Sum `values` [T], floating or bool, by sequence: [num_segments] float64.

    The sum is float64 because a GSPO log-ratio is a small difference of large sums, compared with a
    clip of 3e-4, and because the order in which a GPU adds must not change the float32 result. A
    bool is counted in int32, which is exact too and three times as fast on a CPU.
    """
    dtype = torch.int32 if values.dtype == torch.bool else torch.float64
    zeros = torch.zeros(num_segments, dtype=dtype, device=values.device)
    return zeros.index_add(0, segment_ids, values.to(dtype)).double()


@dataclass(frozen=True)
class Segments:
    """The sequences that this rank's tokens belong to."""

    loss_mask: Tensor
    """[T]; nonzero where a token is trained."""

    segment_ids: Tensor
    """[T] integers, the sequence of each token, 0..num_segments-1."""

    num_segments: int
    """Number of sequences in the micro-batch."""

    sum_over_context: SumOverContext | None = None
    """Adds a [rows, num_segments] float64 tensor over the context-parallel ranks, without autograd.
    None: this rank holds whole sequences."""

    def trained(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """`values` [T] at trained positions, 0 elsewhere, as `dtype`; loss_mask must be bool.
        One pass over tokens.
        """
        # where, not a product: NaN * 0 is NaN, in the value and in the gradient.
        return torch.where(self.loss_mask, values, 0).to(dtype)

    def sums(self, values: Tensor) -> Tensor:
        """Sum `values` [T] by sequence over this rank's tokens: [num_segments] float64."""
        return segment_sums(values, self.segment_ids, self.num_segments)

    def sum_ranks(self, *rows: Tensor) -> tuple[Tensor, ...]:
        """Add each of the rows, [num_segments] float64, over the context-parallel ranks: one
        collective.
        """
        stacked = torch.stack(rows)
        if self.sum_over_context is not None:
            stacked = self.sum_over_context(stacked)
        return stacked.unbind()
