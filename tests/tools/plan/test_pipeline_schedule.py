"""Numbers of Megatron's schedules."""

from __future__ import annotations

import pytest

from megatron_gspo.config import ParallelConfig
from megatron_gspo.tools.plan.pipeline_schedule import in_flight


def layout(stages: int, chunks: int | None) -> ParallelConfig:
    return ParallelConfig(pipeline_model_parallel_size=stages, virtual_pipeline_model_parallel_size=chunks)


def naive_in_flight(stages: int, chunks: int | None, stage: int, micro_batches: int) -> set[tuple[int, ...]]:
    """Walk the order of one stage's passes as Megatron's schedules run them, micro-batch by micro-batch."""
    forwards = [(i, chunk) for first in range(0, micro_batches, stages) for chunk in range(chunks or 1)
                for i in range(first, min(first + stages, micro_batches))]  # fmt: skip
    backwards = [(i, (chunks or 1) - 1 - chunk) for i, chunk in forwards]
    warm_up = stages - stage - 1 if chunks is None else 2 * (stages - stage - 1) + (chunks - 1) * stages
    alive: set[tuple[int, int]] = set()
    found = set()
    for step in range(len(forwards) + warm_up):
        if step < len(forwards):
            alive.add(forwards[step])
        if step >= warm_up:
            found.add(tuple(sum(chunk == own for _, own in alive) for chunk in range(chunks or 1)))
            alive.remove(backwards[step - warm_up])
    assert not alive
    return found


@pytest.mark.parametrize("stages, chunks", [(1, None), (2, None), (4, None), (2, 2), (4, 3)])
def test_in_flight(stages: int, chunks: int | None) -> None:
    for stage in range(stages):
        for micro_batches in (stages, 2 * stages, 8 * stages):
            found = in_flight(layout(stages, chunks), stage, micro_batches)
            assert found == naive_in_flight(stages, chunks, stage, micro_batches), (stage, micro_batches)


def test_numbers_of_two_stages() -> None:
    assert in_flight(layout(2, None), 0, 5) == {(2,), (1,)} and in_flight(layout(2, None), 1, 5) == {(1,)}
    # as the first backward starts: two of each chunk and one more of the first
    assert max(in_flight(layout(2, 2), 0, 8), key=sum) in {(3, 2), (4, 1), (2, 3)}
    assert {sum(counts) for counts in in_flight(layout(2, 2), 1, 8)} == {1, 2, 3}


def test_more_micro_batches_than_fill_the_pipeline_change_nothing() -> None:
    for stage in range(4):
        assert max(map(sum, in_flight(layout(4, 2), stage, 64))) == 2 * (3 - stage) + 4 + 1
