"""The launcher that other tests stand on: results by rank, the first traceback, the timeout."""

import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed import run_distributed


def _total(rank: int, world_size: int, value: int) -> tuple[int, torch.Tensor]:
    total = torch.tensor([value + rank])
    dist.all_reduce(total)
    return rank, total


def _fail_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("the cause")
    dist.barrier()


def _hang(rank: int, world_size: int) -> None:
    if rank == 0:
        time.sleep(100)
    dist.barrier()


def test_returns_values_by_rank():
    results = run_distributed(_total, 3, 10)
    assert [rank for rank, _ in results] == [0, 1, 2]
    assert all(total.item() == 33 for _, total in results)


def test_first_failure_is_the_one_reported():
    with pytest.raises(RuntimeError, match=r"rank 1 of 2 failed first(.|\n)*ValueError: the cause"):
        run_distributed(_fail_on_one, 2)


def test_timeout_shows_where_ranks_stand():
    started = time.monotonic()
    with pytest.raises(TimeoutError, match="_hang"):
        run_distributed(_hang, 2, timeout=2.0)
    assert time.monotonic() - started < 15.0
