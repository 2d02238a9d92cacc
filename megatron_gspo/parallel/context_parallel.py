"""Context parallelism: the tokens of a packed batch that a rank owns, and collectives over these
tokens.

Megatron's zigzag split: every (padded) sequence is divided into 2 * cp_size equal chunks, and rank
r owns chunks r and 2 * cp_size - 1 - r. Under a causal mask all ranks then do the same work.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from megatron_gspo.parallel.autograd_context import AutogradContext
from megatron_gspo.parallel.collectives import (
    gather_rows,
    group_size,
    scatter_summed_rows,
    sum_in_place,
)


def zigzag_indices(cu_seqlens: Tensor | Sequence[int], cp_rank: int, cp_size: int) -> Tensor:
    """Positions of the packed batch that ``cp_rank`` owns, in its own order: int64 [T / cp_size] on
    the CPU.

    ``cu_seqlens`` [n + 1]: padded bounds of the sequences, from 0 to T. They should be on the CPU,
    because their values determine the shape of the result. Raises ValueError for a length that 2 *
    cp_size does not divide, or a rank outside [0, cp_size).
    """
    if not 0 <= cp_rank < cp_size:
        raise ValueError(f"cp_rank={cp_rank} is not in [0, cp_size={cp_size})")
    bounds = torch.as_tensor(cu_seqlens, dtype=torch.int64, device="cpu")
    starts = bounds[:-1]
    lengths = bounds.diff()
    if cp_size == 1:
        return torch.arange(int(bounds[0]), int(bounds[-1]))
    widths = chunk_lengths(lengths, cp_size)
    first = starts + cp_rank * widths
    second = starts + (2 * cp_size - 1 - cp_rank) * widths
    chunk_starts = torch.stack([first, second], dim=1).flatten()
    return concatenated_ranges(chunk_starts, widths.repeat_interleave(2))


def chunk_lengths(lengths: Tensor, cp_size: int) -> Tensor:
    """Length of the 2 * cp_size chunks of each sequence. Raises ValueError for a length that 2 *
    cp_size does not divide."""
    uneven = (lengths % (2 * cp_size)).nonzero()
    if len(uneven):
        i = int(uneven[0])
        raise ValueError(
            f"sequence {i} has {int(lengths[i])} positions, not a multiple of 2 * cp_size ="
            f" {2 * cp_size}; pad every sequence to one (pack with sequence_multiple={2 * cp_size})"
        )
    return lengths // (2 * cp_size)


def concatenated_ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """``starts[i], starts[i] + 1, ...``, ``lengths[i]`` numbers for each i, concatenated; on the
    CPU, of the dtype of ``starts``."""
    ends = lengths.cumsum(0, dtype=starts.dtype)
    total = int(ends[-1]) if len(ends) else 0
    offsets = (starts - (ends - lengths)).repeat_interleave(lengths, output_size=total)
    return torch.arange(total, dtype=starts.dtype).add_(offsets)


class _GroupContext(AutogradContext, Protocol):
    group: ProcessGroup


class _AllGatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _GroupContext, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return gather_rows(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: _GroupContext, grad: Tensor) -> tuple[Tensor, None]:
        return scatter_summed_rows(grad, ctx.group), None


def all_gather_tokens(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Concatenate every rank's ``x`` [n, ...] along dimension 0 by rank: [n * size, ...],
    differentiable.

    The backward sums the ranks' gradients and returns each rank's rows (reduce-scatter), which is
    correct if each rank computes its own share of the loss. n must be equal on all ranks.
    """
    return x if group_size(group) == 1 else _AllGatherTokens.apply(x, group)


def sum_over(group: ProcessGroup | None) -> Callable[[Tensor], Tensor]:
    """A function that sums a tensor over ``group`` without autograd; the identity for None or one
    process.

    It is the loss's only context-parallel collective in a micro-batch: the sequence ratio uses the
    summed value, and each rank's tokens have their own gradient, so that the backward needs no
    communication.
    """
    if group_size(group) == 1:
        return lambda x: x
    return lambda x: sum_in_place(x.detach().clone(memory_format=torch.contiguous_format), group)
