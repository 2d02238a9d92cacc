"""The tokens of a rank as runs: consecutive tokens of one sequence."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megatron_gspo.parallel.context_parallel import chunk_lengths


@dataclass(frozen=True)
class TokenRun:
    """Consecutive tokens of a sequence that a rank has one after the other."""

    row: int
    """Of the first one among the local tokens."""

    length: int
    position: int
    """Of the first one in its sequence."""

    start: int
    """Where the sequence begins among the packed tokens of all context-parallel ranks."""


def token_runs(cu_seqlens: Tensor, cp_rank: int, cp_size: int) -> tuple[TokenRun, ...]:
    """The runs of a rank in the order of its tokens: its sequences, or under context parallelism
    its two chunks of each.

    ``cu_seqlens`` [n + 1] int32 on the host, bounds before context parallelism. Raises ValueError
    for a length that 2 * cp_size does not divide.
    """
    starts = cu_seqlens[:-1].tolist()
    lengths = cu_seqlens.diff()
    if cp_size == 1:
        bounds = zip(starts, lengths.tolist(), strict=True)
        return tuple(TokenRun(start, length, 0, start) for start, length in bounds)
    runs = []
    row = 0
    for start, width in zip(starts, chunk_lengths(lengths, cp_size).tolist(), strict=True):
        for chunk in (cp_rank, 2 * cp_size - 1 - cp_rank):
            runs.append(TokenRun(row, width, chunk * width, start))
            row += width
    return tuple(runs)
