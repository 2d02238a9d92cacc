"""Pipeline stages that hold the routes of their own layers, against stages that hold those of
all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_gspo.data.sample import Sample
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.mcore.policy import Policy
from megatron_gspo.mcore.routing_replay.gather_results import routes_of_replica, routing_stats
from megatron_gspo.mcore.routing_replay.micro_batch_routes import ReplayOptions
from megatron_gspo.routing_replay.routes import RouteShape
from tests.support.configs import parallel
from tests.support.distributed import run_distributed
from tests.support.gathered import all_flips
from tests.support.routing_cases import (
    policy_of,
    scored_samples,
    shape_of,
    train_pass,
    with_random_routes,
)
from tests.support.tiny_models import save_tiny_model

LAYOUTS = {
    "pp2": parallel(pipeline=2),
    "pp2 vp2": parallel(pipeline=2, virtual_pipeline_model_parallel_size=2),
}
# By hand, of four layers of which these are dense: the MoE layers of either stage. Interleaved, the
# first stage has the first and the third layer.
OWNED = {
    ("pp2", ()): [(0, 1), (2, 3)],
    ("pp2 vp2", ()): [(0, 2), (1, 3)],
    ("pp2", (0,)): [(0,), (1, 2)],
    ("pp2 vp2", (0,)): [(1,), (0, 2)],
    ("pp2", (0, 1)): [(), (0, 1)],
    ("pp2 vp2", (1,)): [(0, 1), (2,)],
}


def naive(sample: Sample, layers: Sequence[int]) -> Sample:
    """The sample with the routes of these layers, token by token."""
    own = [[row[layer] for layer in layers] for row in sample.routed_experts.tolist()]
    k = sample.routed_experts.shape[2]
    return replace(
        sample, routed_experts=np.array(own, dtype=np.uint8).reshape(len(own), len(layers), k)
    )


def trained(policy: Policy, samples: Sequence[Sample], shape: RouteShape) -> dict[str, Any]:
    """All that a training pass with these routes gives."""
    log_probs, done = train_pass(
        policy, samples, ReplayOptions(shape, replay=True, compare=True, record=True)
    )
    gradients = [p.main_grad.clone() for chunk in policy.chunks for p in chunk.parameters()]
    recorded, _ = routes_of_replica(done, TrainingBatch.of(samples), range(len(samples)))
    return {
        "log_probs": log_probs,
        "gradients": gradients,
        "recorded": recorded,
        "stats": routing_stats(done),
        "flips": all_flips(done, samples),
    }


def compare_with_whole(rank: int, world_size: int, path: str, layout: str) -> tuple[int, ...]:
    policy = policy_of(path, LAYOUTS[layout])
    shape = shape_of(policy)
    own = policy.routes
    samples = with_random_routes(scored_samples(), shape, missing=0.1)
    held = [naive(sample, own.held_layers) for sample in samples]
    assert sum(s.routed_experts.nbytes for s in held) * shape.layers == (
        sum(s.routed_experts.nbytes for s in samples) * len(own.held_layers)
    )
    whole = trained(policy, samples, shape)
    found = trained(policy, held, own)
    for name in ("log_probs", "gradients", "flips"):
        pairs = list(zip(whole[name], found[name], strict=True))
        assert pairs and all(
            torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in pairs
        ), name
    assert whole["stats"].compared == found["stats"].compared > 0
    assert whole["stats"].flipped_tokens == found["stats"].flipped_tokens > 0
    assert np.array_equal(whole["stats"].flip_rate, found["stats"].flip_rate)
    for i, sample in enumerate(samples):
        assert np.array_equal(whole["recorded"][i], found["recorded"][i])
        assert found["recorded"][i].shape == (sample.length - 1, len(own.held_layers), shape.k)
    assert (
        any((a.routed_experts != found["recorded"][i]).any() for i, a in enumerate(held))
        or not own.held_layers
    )
    return own.held_layers


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, ...], str]:
    folder = tmp_path_factory.mktemp("models")
    dense = sorted({dense for _, dense in OWNED})
    return {
        layers: save_tiny_model(folder / f"dense{layers}", mlp_only_layers=list(layers))
        for layers in dense
    }


@pytest.mark.parametrize(("layout", "dense"), OWNED, ids=str)
def test_routes_of_the_own_layers_do_what_those_of_all_layers_do(
    layout: str, dense: tuple[int, ...], models: dict[tuple[int, ...], str]
) -> None:
    assert run_distributed(compare_with_whole, 2, models[dense], layout) == OWNED[layout, dense]
