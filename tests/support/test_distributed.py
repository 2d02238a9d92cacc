"""The launcher of other tests: results by rank, the first traceback, the timeout."""

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.distributed import run_distributed


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


def _first_is_done_early(rank: int, world_size: int, folder: str) -> bool:
    """On the last rank: whether rank 0, which has nothing more to do, is still there."""
    done = Path(folder) / "done"
    if rank == 0:
        done.write_text(str(os.getpid()))
        return True
    while not done.is_file() or not done.read_text():
        time.sleep(0.01)
    time.sleep(0.5)
    return Path(f"/proc/{done.read_text()}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


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


def test_no_rank_leaves_while_others_may_still_connect_to_it(tmp_path):
    """gloo's mesh may be half built when a rank that communicates nothing is done; its peers would fail."""
    assert all(run_distributed(_first_is_done_early, 2, str(tmp_path)))
