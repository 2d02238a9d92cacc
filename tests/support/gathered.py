"""What the replicas of a layout hold of a mini-batch, on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch.distributed as dist

from megatron_gspo.data.sample import Sample
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.mcore.micro_batches import MicroBatches, values_everywhere, values_of_replica
from megatron_gspo.mcore.routing_replay.gather_results import flips_of_replica, routes_of_replica


def everywhere(column: np.ndarray, samples: Sequence[Sample], groups: Any) -> list[np.ndarray]:
    """One array for each sample, of a column of the batch that every rank has."""
    return by_sample(values_everywhere(column, groups), samples)


def by_sample(column: np.ndarray, samples: Sequence[Sample]) -> list[np.ndarray]:
    """The values of each response, from a column of all."""
    return np.split(column, np.cumsum([sample.response_length for sample in samples])[:-1])


def values_of(
    values: Sequence[Any], batches: MicroBatches, samples: Sequence[Sample], groups: Any
) -> list[np.ndarray]:
    """Per-token results of every rank's micro-batches, one array for each sample."""
    column = values_of_replica(values, batches.layouts, TrainingBatch.of(samples), groups)
    return everywhere(column, samples, groups)


def all_routes(
    done: Sequence[Any], samples: Sequence[Sample], wanted: Sequence[int]
) -> tuple[list[np.ndarray], int]:
    """The recorded routes of each of `wanted`, of all layers, and the bytes that this rank
    exchanged.
    """
    chosen = TrainingBatch.of(samples).inputs.chosen(wanted)
    column, moved = routes_of_replica(done, chosen)
    layers = sorted(done[0].layers)
    local_routes = {
        (i, layer): ids[:-1, n]
        for i, ids in chosen.split(column).items()
        if i in _local(done)
        for n, layer in enumerate(layers)
    }
    merged = _merged(local_routes)
    every = range(done[0].options.shape.layers)
    return [np.stack([merged[i, layer] for layer in every], axis=1) for i in wanted], moved


def all_flips(done: Sequence[Any], samples: Sequence[Sample]) -> list[np.ndarray]:
    """The flips of each sample."""
    batch = TrainingBatch.of(samples)
    flips = batch.responses.split(flips_of_replica(done, batch))
    merged = _merged({i: flips[i] for i in _local(done)})
    return [merged[i] for i in range(len(samples))]


def _local(done: Sequence[Any]) -> set[int]:
    """The samples that this replica trains."""
    return {row.sample for routes in done for row in routes.layout.rows}


def _merged(own_values: dict[Any, np.ndarray]) -> dict[Any, np.ndarray]:
    """Also checks that ranks which have a sample agree."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own_values)
    merged: dict[Any, np.ndarray] = {}
    for of_rank in everyone:
        for i, values in of_rank.items():
            assert np.array_equal(merged.setdefault(i, values), values), i
    return merged
