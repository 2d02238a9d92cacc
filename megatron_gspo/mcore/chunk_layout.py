"""Where the tokens of packed sequences are in the chunks of a recurrence and of the convolution
before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_gspo.mcore.device_copies import copy_to_device
from megatron_gspo.models.flops import RECURRENCE_CHUNK
from megatron_gspo.parallel.autograd_context import AutogradContext
from megatron_gspo.parallel.context_parallel import concatenated_ranges, zigzag_indices


@dataclass(frozen=True)
class ChunkLayout:
    """Tokens in chunks of ``size`` slots, in the order of ``chunked_delta_rule``. No chunk holds
    two sequences.

    For the convolution each chunk has ``before`` more slots at its start: the tokens before it. A
    row is a token in the order of the layer: by context-parallel rank, then by position. Tensors
    are int32, or int64 where torch needs it.

    active: see ``chunked_delta_rule``. rows: [chunks * size], the row in each slot; any where there
    is none. valid: [chunks, size] bool, whether there is. slots: [rows] int64, the slot of each
    row. wide_rows, wide_slots: the same with the ``before`` slots, and the slots of no row are in
    ``absent`` int64. copied_rows, copied_slots: int64, the rows that are also before a chunk, and
    where.
    """

    size: int
    before: int
    active: tuple[int, ...]
    rows: Tensor
    valid: Tensor
    slots: Tensor
    wide_rows: Tensor
    wide_slots: Tensor
    absent: Tensor
    copied_rows: Tensor
    copied_slots: Tensor


def chunk_layout(
    cu_seqlens: Tensor,
    before: int,
    cp_size: int = 1,
    *,
    device: torch.device | str = "cpu",
) -> ChunkLayout:
    """The layout of sequences with bounds ``cu_seqlens`` [n + 1] int32, on the host and before
    context parallelism.

    Built on the host in time linear in tokens. Raises ValueError for ``before`` above the
    size of a chunk.
    """
    size = RECURRENCE_CHUNK
    if before > size:
        raise ValueError(f"before={before} slots do not fit a chunk of {size}")
    lengths = cu_seqlens.diff().long()
    chunks = -(-lengths // size)
    active = _active(chunks)
    place = torch.empty_like(chunks)  # of each sequence in a step
    place[chunks.argsort(descending=True, stable=True)] = torch.arange(len(chunks))
    starts = active.cumsum(0) - active
    position = concatenated_ranges(torch.zeros_like(lengths), lengths)
    sequence = torch.arange(len(lengths)).repeat_interleave(lengths)
    step = position // size
    offset = position % size
    chunk = starts[step] + place[sequence]
    row = _row_of_token(cu_seqlens, cp_size)
    width = size + before
    number = int(active.sum())

    copied = (offset >= size - before) & (step + 1 < chunks[sequence])
    copied_rows = row[copied]
    copied_slots = (
        (starts[step[copied] + 1] + place[sequence[copied]]) * width
        + offset[copied]
        - (size - before)
    )
    slots = torch.empty_like(row)
    wide_slots = torch.empty_like(row)
    slots[row], wide_slots[row] = chunk * size + offset, chunk * width + before + offset
    wide_rows = torch.full((number * width,), -1)
    wide_rows[wide_slots] = torch.arange(len(row))
    wide_rows[copied_slots] = copied_rows
    rows = wide_rows.view(number, width)[:, before:]
    moved = copy_to_device(
        dict(
            rows=rows.clamp(min=0).flatten(),
            valid=rows >= 0,
            slots=slots,
            wide_rows=wide_rows.clamp(min=0),
            wide_slots=wide_slots,
            absent=(wide_rows < 0).nonzero().flatten(),
            copied_rows=copied_rows,
            copied_slots=copied_slots,
        ),
        device,
    )
    # Torch adds, fills and copies at int64 indices only.
    for name in ("slots", "absent", "copied_rows"):
        moved[name] = moved[name].long()
    return ChunkLayout(size=size, before=before, active=tuple(active.tolist()), **moved)


def chunk_steps(active: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """(first chunk, chunks, chunks of the next step) of each step, for ``ChunkLayout.active``."""
    return list(zip(accumulate((0, *active)), active, (*active[1:], 0), strict=False))


def _active(chunks: Tensor) -> Tensor:
    """How many of the sequences with ``chunks`` [n] chunks have an i-th one; [largest of
    chunks].
    """
    ends = torch.bincount(chunks)  # sequences of each number of chunks
    return len(chunks) - ends.cumsum(0)[:-1]


def _row_of_token(cu_seqlens: Tensor, cp_size: int) -> Tensor:
    """The row of each token: its position among the tokens of all context-parallel ranks, one rank
    after the other.
    """
    by_rank = torch.cat([zigzag_indices(cu_seqlens, rank, cp_size) for rank in range(cp_size)])
    row = torch.empty_like(by_rank)
    row[by_rank] = torch.arange(len(by_rank))
    return row


def to_wide_chunks(x: Tensor, layout: ChunkLayout) -> Tensor:
    """Rows ``x`` [rows, d] in the chunks with the tokens before them, [chunks, before + size, d]; 0
    where there is none."""
    return _ToWideChunks.apply(x, layout).view(-1, layout.before + layout.size, x.shape[1])


class _LayoutContext(AutogradContext, Protocol):
    layout: ChunkLayout


class _ToWideChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _LayoutContext, x: Tensor, layout: ChunkLayout) -> Tensor:
        ctx.layout = layout
        return x.index_select(0, layout.wide_rows).index_fill_(0, layout.absent, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: _LayoutContext, grad: Tensor) -> tuple[Tensor, None]:
        layout = ctx.layout
        grad_x = grad.index_select(0, layout.wide_slots)
        return (
            grad_x.index_add_(0, layout.copied_rows, grad.index_select(0, layout.copied_slots)),
            None,
        )


def causal_convolution(x: Tensor, weight: Tensor) -> Tensor:
    """One filter a channel: ``y[:, t, c] = sum over j of weight[c, j] * x[:, t + j, c]``.

    ``x`` [chunks, k - 1 + size, c], each chunk after its k - 1 preceding tokens; ``weight`` [c, k];
    returns [chunks, size, c].
    """
    return _CausalConvolution.apply(x, weight)


class _CausalConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        size = x.shape[1] - weight.shape[1] + 1
        out = x[:, :size] * weight[:, 0]
        for j in range(1, weight.shape[1]):
            out.addcmul_(x[:, j : j + size], weight[:, j])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        grad_x = torch.zeros_like(x)
        columns = []
        size = grad.shape[1]
        for j in range(weight.shape[1]):
            grad_x[:, j : j + size].addcmul_(grad, weight[:, j])
            columns.append(torch.linalg.vecdot(x[:, j : j + size], grad, dim=1).sum(0))
        return grad_x, torch.stack(columns, dim=1)
