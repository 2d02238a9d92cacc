"""A pass over a mini-batch leaves no activation in memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_gspo.algorithms import preset
from megatron_gspo.data.sample import Sample
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.mcore.policy import Policy, build_policy
from megatron_gspo.mcore.routing_replay.replay_options import ReplayOptions
from megatron_gspo.mcore.train_step import compute_log_probs, train_mini_batch
from megatron_gspo.routing_replay.routes import RouteShape
from tests.equivalence.cases import make_samples
from tests.support.configs import adam, micro_batches_of, model_config, parallel
from tests.support.distributed import run_distributed
from tests.support.live_storages import LiveStorages
from tests.support.parallel_groups import groups_of
from tests.support.tiny_models import save_tiny_model

LAYOUTS = {
    "one": parallel(),
    "expert": parallel(expert=2),
    "expert tensor": parallel(tensor=2, expert_tensor=2),
}
# Bytes: a dispatcher keeps how many tokens each expert gets from each rank, int64.
SPLIT_SIZES = 2 * 8 * 8
ROUTES = RouteShape(layers=4, k=2, num_experts=8)


def routed(sample: Sample) -> Sample:
    """The sample with random routes."""
    size = (len(sample.tokens) - 1, ROUTES.layers, ROUTES.num_experts)
    draws = np.random.default_rng(sample.sample_index).random(size)
    return replace(sample, routed_experts=draws.argsort(-1)[..., : ROUTES.k].astype(np.uint8))


def one_step(policy: Policy, samples: list[Sample], replay: ReplayOptions) -> None:
    training = micro_batches_of(80)
    compute_log_probs(
        policy,
        TrainingBatch.of(samples),
        training,
        temperature=1.0,
        with_entropy=True,
        routing=replay,
    )
    train_mini_batch(
        policy, TrainingBatch.of(samples), preset("sft"), training, temperature=1.0, routing=replay
    )


def left_over(
    rank: int, world_size: int, path: str, name: str
) -> list[tuple[list[tuple[int, str]], int]]:
    """Without and with recomputation: the storages that a step leaves allocated, and the bytes that
    it allocated.

    A first step makes the optimizer's state.
    """
    layout = LAYOUTS[name]
    observed = []
    samples = [routed(sample) for sample in make_samples(count=6)]
    replay = ReplayOptions(ROUTES, replay=True, record=True, compare=True, entropy=True)
    for recompute in ("none", "full"):
        policy = build_policy(
            model_config(path, recompute_granularity=recompute),
            layout,
            groups_of(layout),
            optimizer=adam(lr=1e-3),
        )
        one_step(policy, samples, replay)
        with LiveStorages() as storages:
            one_step(policy, samples, replay)
        observed.append((storages.alive(), storages.allocated))
    return observed


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_leaves_nothing_allocated(tmp_path, name):
    path = save_tiny_model(tmp_path / "model")
    world_size = 1 if name == "one" else 2
    for observed in run_distributed(left_over, world_size, path, name):
        for alive, allocated in observed:
            assert allocated > 1_000_000, "the step was not followed: this test shows nothing"
            assert [storage for storage in alive if storage[0] > SPLIT_SIZES] == []
