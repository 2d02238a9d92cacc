"""The rank grid is Megatron's; the chosen ranks have every role and share groups; every rank is
represented once.
"""

from __future__ import annotations

from itertools import product

import pytest
from megatron.core.parallel_state import RankGenerator

from megatron_gspo.config import ParallelConfig
from megatron_gspo.errors import InputError
from megatron_gspo.tools.rehearse.roles import (
    MOST_RANKS,
    RankGrid,
    choose_ranks,
    stage_roles,
)

ORDER = "tp-cp-ep-dp-pp"  # the default of initialize_model_parallel


def layout(
    tensor: int = 1, pipeline: int = 1, context: int = 1, expert: int = 1, expert_tensor: int = 1
) -> ParallelConfig:
    return ParallelConfig(
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        context_parallel_size=context,
        expert_model_parallel_size=expert,
        expert_tensor_parallel_size=expert_tensor,
    )


def layouts(worlds: tuple[int, ...]) -> list[tuple[ParallelConfig, int]]:
    """Every layout of sizes 1, 2, 3 and 4 that divides a world."""
    valid = []
    for world, sizes in product(worlds, product((1, 2, 3, 4), repeat=5)):
        tensor, pipeline, context, expert, expert_tensor = sizes
        if (
            world % (tensor * pipeline * context) == 0
            and world % (pipeline * expert * expert_tensor) == 0
        ):
            valid.append((layout(*sizes), world))
    return valid


def names(parallel: ParallelConfig, world: int) -> dict[int, tuple[str, ...]]:
    return {played.rank: played.roles for played in choose_ranks(parallel, world)}


def test_one_rank_of_each_kind_of_stage():
    chosen = choose_ranks(layout(tensor=2, pipeline=4, expert=2), 16, "stages")
    assert [played.rank for played in chosen] == [0, 4, 12]
    assert [len(played.stands_for) for played in chosen] == [4, 8, 4]


@pytest.mark.parametrize(
    "sizes, world", [((2, 2, 2, 4, 1), 16), ((4, 3, 1, 2, 2), 48), ((1, 2, 2, 8, 2), 32)]
)
def test_groups_are_megatrons(sizes, world):
    parallel = layout(*sizes)
    grid = RankGrid.of(parallel, world)
    tensor, context, data, expert_tensor, expert, expert_data = grid.sizes
    stages = parallel.pipeline_model_parallel_size
    dense = RankGenerator(tp=tensor, ep=1, dp=data, pp=stages, cp=context, order=ORDER)
    experts = RankGenerator(
        tp=expert_tensor, ep=expert, dp=expert_data, pp=stages, cp=1, order=ORDER
    )
    tokens = [
        (dense, "tp"),
        (dense, "cp"),
        (dense, "dp"),
        (experts, "tp"),
        (experts, "ep"),
        (experts, "dp"),
    ]
    for dimension, (generator, token) in enumerate(tokens):
        for group in generator.get_ranks(token):
            assert [grid.coordinates(rank)[dimension] for rank in group] == list(range(len(group)))
            assert all(list(grid.group(rank, dimension)) == group for rank in group)
    for pipeline in dense.get_ranks("pp"):
        assert [grid.stage(rank) for rank in pipeline] == list(range(stages))


def covered(grid: RankGrid, offsets: tuple[int, ...]) -> bool:
    """Each dimension has its first and last rank in one group among the offsets."""
    return all(
        size == 1
        or any(
            grid.group(rank, d)[0] in offsets and grid.group(rank, d)[-1] in offsets
            for rank in offsets
        )
        for d, size in enumerate(grid.sizes)
    )


def test_every_stage_covers_every_dimension():
    for parallel, world in [
        *layouts((12,)),
        (layout(2, 8, 1, 8), 4096),
        (layout(8, 16, 4, 32, 2), 4096),
    ]:
        grid = RankGrid.of(parallel, world)
        ranks = [played.rank for played in choose_ranks(parallel, world)]
        for stage in stage_roles(grid.stages):
            offsets = tuple(
                rank - stage * grid.stage_size for rank in ranks if grid.stage(rank) == stage
            )
            assert covered(grid, offsets), (parallel, world, ranks)
        assert {grid.stage(rank) for rank in ranks} == set(stage_roles(grid.stages))


def test_the_ranks_of_the_two_node_layout():
    assert names(layout(tensor=2, expert=8), 16) == {
        0: ("first tensor rank", "first data rank", "first expert rank", "first expert data rank"),
        1: ("last tensor rank", "first data rank", "first expert data rank"),
        7: ("last tensor rank", "last expert rank", "first expert data rank"),
        15: ("last tensor rank", "last data rank", "last expert rank", "last expert data rank"),
    }
    assert names(layout(), 1) == {0: ("only rank",)}
    assert [rank for rank in names(layout(pipeline=8), 8)] == [0, 1, 7]
    assert [roles for roles in names(layout(pipeline=8), 8).values()] == [
        ("first stage",),
        ("middle stage",),
        ("last stage",),
    ]


def test_every_rank_is_represented_once():
    for parallel, world in [*layouts((12,)), (layout(2, 8, 1, 8), 4096)]:
        played = choose_ranks(parallel, world)
        assert sorted(rank for choice in played for rank in choice.stands_for) == list(range(world))
        assert all(choice.rank in choice.stands_for for choice in played)
        grid = RankGrid.of(parallel, world)
        for choice in played:
            stages = {grid.stage(rank) for rank in choice.stands_for}
            assert len(stages) == 1 or not stages & {0, grid.stages - 1}


def test_all_ranks_and_lists():
    parallel = layout(tensor=2)
    assert [choice.rank for choice in choose_ranks(parallel, 8, "all")] == list(range(8))
    chosen = choose_ranks(parallel, 8, "5, 0,5")
    assert [(choice.rank, choice.stands_for) for choice in chosen] == [(0, (0,)), (5, (5,))]
    for wrong, says in (
        ("8", "no rank 8 in a world of 8"),
        ("x", "is not a list"),
        ("", "is not a list"),
    ):
        with pytest.raises(InputError, match=says):
            choose_ranks(parallel, 8, wrong)
    with pytest.raises(InputError, match=f"at most {MOST_RANKS} ranks"):
        choose_ranks(parallel, 2 * MOST_RANKS, "all")
