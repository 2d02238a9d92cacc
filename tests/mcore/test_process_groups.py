from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from megatron_gspo.errors import RunError
from megatron_gspo.mcore.process_groups import every_group, initialize, shutdown, start
from tests.support.configs import parallel
from tests.support.distributed import run_distributed


def sizes_of(rank: int, world_size: int) -> list[Any]:
    group_sizes = []
    for layout in (
        parallel(tensor=2),
        parallel(pipeline=2),
        parallel(context=2),
        parallel(expert=2),
    ):
        groups = initialize(layout, seed=1, gloo_groups=False)
        sizes = {name: dist.get_world_size(group) for name, group in every_group().items()}
        group_sizes.append((sizes, groups.is_last_stage, groups.last_stage_rank))
        shutdown(keep_distributed=True)
        shutdown(keep_distributed=True)  # safe to call twice
    return group_sizes


def test_groups_have_the_sizes_of_the_layout():
    first, second = run_distributed(sizes_of, 2)
    tensor, pipeline, context, expert = (sizes[0] for sizes in first)
    assert (tensor["tp"], tensor["dp"], tensor["model"], tensor["world"]) == (2, 1, 2, 2)
    assert (pipeline["pp"], pipeline["tp"], pipeline["dp"]) == (2, 1, 1)
    assert (context["cp"], context["dp"], context["dp_cp"]) == (2, 1, 2)
    assert (expert["ep"], expert["dp"], expert["expert_dp"], expert["expert_tp_ep"]) == (2, 2, 1, 2)
    assert (first[1][1:], second[1][1:]) == (
        (False, 1),
        (True, 1),
    ), "the last pipeline stage is rank 1"


def test_ranks_that_do_not_meet_end_with_one_line(monkeypatch):
    for name, value in dict(
        RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1"
    ).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        RunError, match="the 2 processes did not find each other in 0.01 minutes"
    ) as caught:
        start(backend="gloo", timeout_minutes=0.01)
    assert "\n" not in str(caught.value)
