"""All-to-all with unequal parts over gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import megatron_gspo.mcore.train_step  # noqa: F401  applies the patches; the fork server of the tests imports it once
from megatron_gspo.patches.mark import MARK
from tests.support.distributed import run_distributed
from tests.support.patched_policies import on_cpu


def exchange(rank: int, world_size: int) -> dict[str, Any]:
    """Rank r has r + 1 rows for everyone; what upstream's and the corrected collectives make of
    it.
    """
    rows = torch.arange(3 * (rank + 1), dtype=torch.float32).view(-1, 3) + 100 * rank
    sizes = [1, 2]
    outcomes: dict[str, Any] = {"errors": []}
    upstream = getattr(dist.all_to_all_single, MARK)
    whole = torch.cat([torch.full((sizes[to], 2), 10.0 * rank + to) for to in range(2)])
    out = torch.zeros(2 * sizes[rank], 2)
    splits = torch.tensor(sizes), torch.tensor([sizes[rank]] * 2)
    try:
        upstream(out, whole, splits[1], splits[0])
    except TypeError as error:
        outcomes["errors"].append(str(error))
    dist.all_to_all_single(out, whole, splits[1], splits[0])
    outcomes["all_to_all"] = out[:, 0].tolist()
    parts = [torch.zeros(size, 3) for size in sizes]
    dist.all_gather(parts, rows)
    outcomes["all_gather"] = parts
    reduced = torch.zeros(sizes[rank], 3)
    dist.reduce_scatter(reduced, [torch.full((size, 3), float(rank + 1)) for size in sizes])
    outcomes["reduce_scatter"] = reduced
    even = [torch.zeros(2), torch.zeros(2)]
    dist.all_gather(even, torch.full((2,), float(rank)))
    outcomes["even"] = torch.stack(even)[:, 0].tolist()
    return outcomes


@on_cpu
def test_unequal_parts_are_exchanged():
    for rank, outcomes in enumerate(run_distributed(exchange, 2)):
        assert len(outcomes["errors"]) == 1, (
            "upstream takes tensors as split sizes: delete the patch"
        )
        assert outcomes["all_to_all"] == [0.0 + rank] * (rank + 1) + [10.0 + rank] * (rank + 1)
        expected = [torch.arange(3.0).view(1, 3), torch.arange(6.0).view(2, 3) + 100]
        assert all(torch.equal(a, b) for a, b in zip(outcomes["all_gather"], expected, strict=True))
        assert torch.equal(outcomes["reduce_scatter"], torch.full((rank + 1, 3), 3.0))
        assert outcomes["even"] == [0.0, 1.0]


def gather_upstream(rank: int, world_size: int) -> None:
    getattr(dist.all_gather, MARK)([torch.zeros(1, 3), torch.zeros(2, 3)], torch.zeros(rank + 1, 3))


@on_cpu
def test_gloo_refuses_unequal_parts_without_the_patch():
    with pytest.raises(RuntimeError, match="(?i)size|shape"):
        run_distributed(gather_upstream, 2)
