"""Metrics over ranks: sums, extremes, absent keys, NaN, and how many collectives it takes."""

import math

import pytest
import torch
import torch.distributed as dist

from megatron_gspo.parallel import reduce_metrics
from megatron_gspo.parallel.metric_reduction import reduce_records
from tests.support.distributed import collectives_so_far, run_distributed

LOCAL = [
    {
        "loss": torch.tensor(1.0),
        "ratio_max": torch.tensor(1.5),
        "ratio_min": torch.tensor(0.5),
        "late": 3.0,
    },
    {"ratio_min": torch.tensor(0.25), "loss": torch.tensor(2.0), "ratio_max": torch.tensor(-2.0)},
    {},
]
WHOLE = {"late": 3.0, "loss": 3.0, "ratio_max": 1.5, "ratio_min": 0.25}


def _reduce(rank, world_size, names):
    reduced = reduce_metrics(LOCAL[rank], dist.group.WORLD, names=names)
    return reduced, collectives_so_far()


@pytest.mark.parametrize("names", [None, list(WHOLE)])
def test_sums_and_extremes_with_keys_that_ranks_lack(names):
    for reduced, collectives in run_distributed(_reduce, 3, names):
        assert {name: value.item() for name, value in reduced.items()} == WHOLE
        assert list(reduced) == sorted(WHOLE)
        assert all(value.shape == () and value.dtype == torch.float32 for value in reduced.values())
        assert collectives == 2 if names else collectives > 3


def _reduce_updates(rank, world_size):
    """The metrics of two updates, of which the second is the first without a sum."""
    records = [{"loss": 1.0 + rank, "ratio_max": 2.0 - rank, "ratio_min": 0.5 - rank}]
    records.append({name: 10 * value for name, value in records[0].items() if name != "loss"})
    return reduce_records(records, dist.group.WORLD), collectives_so_far()


def test_several_records_take_the_collectives_of_one():
    for reduced, collectives in run_distributed(_reduce_updates, 2):
        first, second = [
            {name: value.item() for name, value in record.items()} for record in reduced
        ]
        assert first == {"loss": 3.0, "ratio_max": 2.0, "ratio_min": -0.5}
        assert second == {"ratio_max": 20.0, "ratio_min": -5.0}
        assert collectives == 3  # one compares the names


def _nan_and_infinity(rank, world_size):
    with_nan = {
        "ratio_max": math.nan if rank == 0 else 1.0,
        "ratio_min": 1.0 if rank == 0 else math.nan,
        "loss": math.nan,
    }
    finite = {"ratio_max": -5.0 - rank, "ratio_min": -math.inf if rank else 2.0}
    return reduce_metrics(with_nan, dist.group.WORLD), reduce_metrics(finite, dist.group.WORLD)


def test_nan_survives_and_negative_extremes_are_right():
    for with_nan, finite in run_distributed(_nan_and_infinity, 2):
        assert all(value.isnan() for value in with_nan.values())
        assert finite["ratio_max"] == -5.0 and finite["ratio_min"] == -math.inf


def test_one_process_sorts_and_detaches():
    loss = torch.tensor([2.0], requires_grad=True)
    reduced = reduce_metrics(
        {"loss": loss, "entropy": 1, "kl": torch.tensor(0.5, dtype=torch.float64)}, None
    )
    assert list(reduced) == ["entropy", "kl", "loss"]
    assert {value.dtype for value in reduced.values()} == {torch.float32}
    assert reduced["loss"].shape == () and not reduced["loss"].requires_grad


def test_refuses_a_metric_that_names_lack():
    with pytest.raises(ValueError) as error:
        reduce_metrics({"loss": 1.0, "kl": 2.0, "entropy": 0.0}, None, names=["entropy"])
    assert (
        str(error.value) == "metrics ['kl', 'loss'] are missing from names; add them on every rank"
    )
