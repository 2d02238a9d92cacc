"""Micro-batches whose activations a pipeline stage holds, by the schedules of Megatron (``pipeline_parallel``)."""

from __future__ import annotations

from collections.abc import Set
from functools import cache
from itertools import zip_longest

from megatron_gspo.config import ParallelConfig


def in_flight(parallel: ParallelConfig, stage: int, micro_batches: int) -> Set[tuple[int, ...]]:
    """How many micro-batches of each of its chunks a stage holds, before each of its backward passes.

    A stage starts with PP - stage - 1 forward passes or, interleaved, 2 (PP - stage - 1) + (VP - 1) PP. Then each
    forward is followed by a backward. Interleaved, PP micro-batches pass a chunk before the next chunk has its turn;
    the backward takes the chunks in the reverse order.
    """
    stages, chunks = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size
    return _in_flight(stages, chunks, stage, micro_batches)


@cache
def _in_flight(stages: int, chunks: int | None, stage: int, micro_batches: int) -> Set[tuple[int, ...]]:
    group = micro_batches if chunks is None else stages
    rounds = [min(group, micro_batches - first) for first in range(0, micro_batches, group)]
    order = [chunk for size in rounds for chunk in range(chunks or 1) for _ in range(size)]
    ahead = stages - stage if chunks is None else 2 * (stages - stage - 1) + (chunks - 1) * stages + 1
    held = [0] * (chunks or 1)
    for chunk in order[:ahead]:
        held[chunk] += 1
    found = set()
    for chunk, following in zip_longest(order, order[ahead:]):
        found.add(tuple(held))
        held[-1 - chunk] -= 1
        if following is not None:
            held[following] += 1
    return found
