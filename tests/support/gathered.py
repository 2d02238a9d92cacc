"""What the replicas of a layout hold of a mini-batch, on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch.distributed as dist

from megatron_gspo.data.sample import Sample
from megatron_gspo.data.sample_batch import SampleBatch
from megatron_gspo.mcore.micro_batches import MicroBatches, values_everywhere, values_of_replica
from megatron_gspo.mcore.routing_replay.gather_results import flips_of_replica, routes_of_replica


def everywhere(
    found: Mapping[int, np.ndarray], samples: Sequence[Sample], groups: Any
) -> list[np.ndarray]:
    """One array for each sample."""
    return values_everywhere(found, SampleBatch.of(samples), groups)


def in_order(found: Mapping[int, np.ndarray]) -> list[np.ndarray]:
    """The values of all samples of one process."""
    return [found[i] for i in range(len(found))]


def values_of(
    values: Sequence[Any], batches: MicroBatches, samples: Sequence[Sample], groups: Any
) -> list[np.ndarray]:
    """Per-token results of every rank's micro-batches, one array for each sample."""
    return everywhere(
        values_of_replica(values, batches.layouts, SampleBatch.of(samples), groups), samples, groups
    )


def all_routes(
    done: Sequence[Any], samples: Sequence[Sample], wanted: Sequence[int]
) -> tuple[list[np.ndarray], int]:
    """The recorded routes of each of `wanted`, of all layers, and the bytes that this rank
    exchanged.
    """
    own, moved = routes_of_replica(done, SampleBatch.of(samples), wanted)
    layers = sorted(done[0].layers)
    found = _merged(
        {(i, layer): ids[:, n] for i, ids in own.items() for n, layer in enumerate(layers)}
    )
    every = range(done[0].options.shape.layers)
    return [np.stack([found[i, layer] for layer in every], axis=1) for i in wanted], moved


def all_flips(done: Sequence[Any], samples: Sequence[Sample]) -> list[np.ndarray]:
    """The flips of each sample."""
    found = _merged(flips_of_replica(done, SampleBatch.of(samples)))
    return [found[i] for i in range(len(samples))]


def _merged(own: dict[Any, np.ndarray]) -> dict[Any, np.ndarray]:
    """Also checks that ranks which have a sample agree."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    found: dict[Any, np.ndarray] = {}
    for part in everyone:
        for i, values in part.items():
            assert np.array_equal(found.setdefault(i, values), values), i
    return found
