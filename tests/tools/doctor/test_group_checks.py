"""The collectives: exact results pass, a wrong one is reported."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_gspo.tools.doctor.group_checks import (
    Measure,
    expected_sum,
    judge_groups,
    measure_group,
    part_lengths,
    pattern,
    slow_groups,
)
from tests.support.distributed import run_distributed


def test_the_sum_is_what_a_loop_adds_up():
    ranks = (0, 5, 129, 300)
    totals = [sum(pattern(rank, 20)[i].item() for rank in ranks) for i in range(20)]
    assert expected_sum(ranks, 20).tolist() == totals
    assert pattern(2, 3).tolist() == [3.0, 6.0, 9.0]


def test_sums_over_4096_ranks_are_exact():
    """Every partial sum is a whole number below 2^24, in whichever order it is taken."""
    total = expected_sum(range(4096), 8)
    assert total.max() < 2**24
    running = torch.zeros(8)
    for rank in range(4096):
        running += pattern(rank, 8)
    assert torch.equal(running, total)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_what_one_sends_the_other_awaits(size):
    lengths = [part_lengths(place, size, 100) for place in range(size)]
    assert all(lengths[a][b] == lengths[b][a] for a in range(size) for b in range(size))
    assert len({length for each in lengths for length in each}) > 1  # unequal, as tokens to experts


def forget_a_rank(total: torch.Tensor, group: Any) -> None:
    """An all-reduce that leaves the group's last rank out."""
    size = dist.get_world_size(group)
    if dist.get_rank(group) == size - 1:
        total.zero_()
    dist.all_reduce(total, group=group)


def swap_parts(got: torch.Tensor, sent: torch.Tensor, out: list[int], into: list[int], group: Any) -> None:
    """An all-to-all that gives the parts in the wrong order."""
    dist.all_to_all_single(got, sent, out, into, group=group)
    got.copy_(got.flip(0))


def measure(rank: int, world: int) -> list[Measure]:
    pairs = [dist.new_group(ranks) for ranks in ([0, 2], [1])]
    mine = pairs[rank % 2]
    return [
        measure_group("world", dist.group.WORLD),
        measure_group("tp", mine),
        measure_group("ep", dist.group.WORLD, all_reduce=forget_a_rank),
        measure_group("cp", dist.group.WORLD, all_to_all=swap_parts),
    ]


def test_groups_of_real_processes():
    results = [found for each in run_distributed(measure, 3) for found in each]
    by_kind = {kind: [m for m in results if m.kind == kind] for kind in ("world", "tp", "ep", "cp")}
    assert all(m.wrong == "" and m.all_reduce > 0 and m.all_to_all > 0 for m in by_kind["world"] + by_kind["tp"])
    assert {m.ranks for m in by_kind["tp"]} == {(0, 2), (1,)}
    assert all(m.wrong.startswith("all-reduce gave 3 at 0, 6 is right") for m in by_kind["ep"])
    assert all(m.wrong.startswith("all-to-all gave ") for m in by_kind["cp"])
    assert [Measure.from_dict(m.as_dict()) for m in results] == results
    found = judge_groups(results)
    assert {(f.level, f.check) for f in found} == {
        ("ok", "groups.world"), ("ok", "groups.tp"), ("error", "groups.ep"), ("error", "groups.cp"),
    }  # fmt: skip
    assert "silently wrong" in next(f for f in found if f.check == "groups.ep").why


def test_groups_of_one_share_a_line():
    alone = [Measure("pp", (rank,), rank, 0.0, 0.0) for rank in range(2)]
    [found] = judge_groups([*alone, *(replace(m, kind="cp") for m in alone)])
    assert found.what == "pp, cp: one rank each, nothing to exchange"


def test_a_slow_group_among_several():
    times = {(0, 1): 1e-3, (2, 3): 1.2e-3, (4, 5): 9e-3, (6, 7): 0.8e-3}
    [found] = slow_groups("tp", times)
    assert found.what == "the tp group of ranks 4-5 takes 9.00 ms for 1 MiB, usual is 1.10 ms"
    assert slow_groups("tp", {(0, 1): 1e-3, (2, 3): 1.0}) == []  # of two, neither is usual
    measures = [Measure("tp", ranks, ranks[0], time, time, backend="nccl") for ranks, time in times.items()]
    assert [f.level for f in judge_groups(measures)] == ["ok", "warning"]
    assert [f.level for f in judge_groups([replace(m, backend="gloo") for m in measures])] == ["ok"]
