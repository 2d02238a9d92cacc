"""Optimizer steps, checkpoints, routing replay and host synchronisations of a training step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_gspo.algorithms import preset
from megatron_gspo.data.sample import Sample
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.mcore import policy_tensors
from megatron_gspo.mcore.checkpoint.save_load import load_checkpoint, save_checkpoint
from megatron_gspo.mcore.offload import whole_storages
from megatron_gspo.mcore.policy import Policy, build_policy
from megatron_gspo.mcore.routing_replay.gather_results import flips_of_replica, routes_of_replica
from megatron_gspo.mcore.routing_replay.replay_options import ReplayOptions
from megatron_gspo.mcore.train_step import (
    compute_log_probs,
    finished_metrics,
    forward_backward,
    pack_mini_batch,
    train_mini_batch,
)
from tests.equivalence.cases import make_samples
from tests.equivalence.replay import route_shape
from tests.gpu.tolerances import BITS
from tests.support.configs import adam, micro_batches_of, model_config, parallel
from tests.support.gathered import by_sample
from tests.support.tiny_models import save_tiny_model

GRPO = preset("grpo", entropy_coef=0.01)
ROUNDOFF = 2.0 ** -BITS["bfloat16"]


@pytest.fixture(scope="module")
def path(sizes, tmp_path_factory) -> str:
    return save_tiny_model(
        tmp_path_factory.mktemp("models") / "model", dtype=torch.bfloat16, **sizes.model
    )


@pytest.fixture
def new_policy(groups, path, sizes, implementation) -> Callable[[], Policy]:
    """Makes a policy of the same weights: in bfloat16, with main weights in float32."""
    model = model_config(path, dtype="bfloat16", implementation=implementation)
    optimizer = adam(lr=sizes.lr, lr_warmup_steps=1, weight_decay=0.1)
    return lambda: build_policy(model, parallel(), groups, optimizer=optimizer, total_steps=10)


def weights(policy: Policy) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in policy.weights()}


def samples_of(policy: Policy, scale: int, seed: int) -> list[Sample]:
    """With old log-probs that are the policy's own."""
    samples = make_samples(seed, 8, policy.shape.vocab_size, scale=scale)
    scores = compute_log_probs(
        policy, TrainingBatch.of(samples), micro_batches_of(80 * scale), temperature=1.0
    )
    return [
        replace(s, old_log_probs=value)
        for s, value in zip(samples, by_sample(scores.log_probs, samples), strict=True)
    ]


def test_a_step_raises_the_objective_and_a_resumed_run_takes_the_same(new_policy, sizes, tmp_path):
    policy = new_policy()
    batching = micro_batches_of(80 * sizes.scale)
    samples = samples_of(policy, sizes.scale, seed=0)
    steps = [
        train_mini_batch(policy, TrainingBatch.of(samples), GRPO, batching, temperature=1.0)
        for _ in range(3)
    ]
    losses = [metrics["loss"] for metrics in finished_metrics(steps, policy)]
    assert losses[2] < losses[1] < losses[0]
    state = {"position": 7}
    at = save_checkpoint(policy, Path(tmp_path), 3, state, keep=1)
    before = weights(policy)
    result = train_mini_batch(policy, TrainingBatch.of(samples), GRPO, batching, temperature=1.0)
    after = weights(policy)

    resumed = new_policy()
    assert load_checkpoint(resumed, at) == {"step": 3, **state}
    loaded = weights(resumed)
    assert loaded.keys() == before.keys() and all(
        torch.equal(loaded[name], before[name]) for name in before
    )
    again = train_mini_batch(resumed, TrainingBatch.of(samples), GRPO, batching, temperature=1.0)
    [metrics] = finished_metrics([result], policy)
    [metrics_again] = finished_metrics([again], resumed)
    assert metrics_again["lr"] == metrics["lr"]
    # Some GPU kernels add in an order of their own; a gradient's sign may differ where it is
    # rounding noise.
    for name in ("loss", "grad_norm"):
        assert metrics_again[name] == pytest.approx(metrics[name], rel=4 * ROUNDOFF), name
    different = [
        name for name, value in weights(resumed).items() if distance(value, after[name]) > ROUNDOFF
    ]
    assert not different
    assert any(not torch.equal(after[name], before[name]) for name in after)


def distance(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def test_memory_is_released_for_generation_and_taken_back(device, new_policy, sizes):
    policy = new_policy()
    batching = micro_batches_of(80 * sizes.scale)
    samples = TrainingBatch.of(samples_of(policy, sizes.scale, seed=3))
    train_mini_batch(policy, samples, GRPO, batching, temperature=1.0)
    before = [tensor.clone().cpu() for tensor in kept(policy)]
    allocated = torch.cuda.memory_allocated() if device == "cuda" else 0
    policy.memory.release()
    if device == "cuda":
        released = sum(tensor.nbytes for tensor in before)  # and the gradients
        assert allocated - torch.cuda.memory_allocated() >= released
    policy.memory.restore()
    assert all(torch.equal(now.cpu(), was) for now, was in zip(kept(policy), before, strict=True))
    assert (
        train_mini_batch(policy, samples, GRPO, batching, temperature=1.0).metrics["grad_norm"] > 0
    )


def kept(policy: Policy) -> list[Tensor]:
    """What a policy keeps between steps, each storage once."""
    tensors = (
        *policy_tensors.weights(policy.chunks),
        *policy_tensors.optimizer_states(policy.chunks, policy.optimizer),
    )
    return whole_storages(tensors)


@pytest.mark.parametrize("storage", ["device", "host"])
def test_recorded_routes_are_replayed(new_policy, sizes, storage):
    """A pass with the routes that it took itself gives the same log-probs, and other routes
    give other ones.
    """
    policy = new_policy()
    batching = micro_batches_of(80 * sizes.scale)
    shape = route_shape(policy)
    samples = make_samples(1, 8, policy.shape.vocab_size, scale=sizes.scale)
    record = ReplayOptions(shape, record=True, entropy=True, storage=storage)
    recorded = compute_log_probs(
        policy, TrainingBatch.of(samples), batching, temperature=1.0, routing=record
    )
    inputs = TrainingBatch.of(samples).inputs
    column, _ = routes_of_replica(recorded.routing, inputs)
    routes = [ids[:-1] for ids in inputs.split(column).values()]
    replay = ReplayOptions(shape, replay=True, compare=True, storage=storage)

    def scores(given: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        batch = [
            replace(sample, routed_experts=ids) for sample, ids in zip(samples, given, strict=True)
        ]
        scored = compute_log_probs(
            policy, TrainingBatch.of(batch), batching, temperature=1.0, routing=replay
        )
        return scored.log_probs, flips_of_replica(scored.routing, TrainingBatch.of(batch))

    replayed, flips = scores(routes)
    spread = recorded.log_probs.std()
    # A few tokens whose best experts are equally good may choose the other one in the second pass:
    # they are replayed.
    assert (flips > 0).mean() < 0.01
    assert np.abs(replayed - recorded.log_probs).max() < ROUNDOFF * spread
    other, flips = scores([(ids + 1) % shape.num_experts for ids in routes])
    assert (
        np.abs(other - replayed).max() > 10 * ROUNDOFF * spread and (flips[flips >= 0] == 1).all()
    )


def test_our_code_does_not_wait_for_the_gpu(device, new_policy, sizes):
    """Within the forward and backward of a mini-batch.

    Megatron's own synchronisations are printed.
    """
    if device == "cpu":
        pytest.skip("needs a GPU; tests/mcore/test_no_synchronisation.py has the CPU's test")
    policy = new_policy()
    batching = micro_batches_of(40 * sizes.scale)
    samples = samples_of(policy, sizes.scale, seed=2)
    batches = pack_mini_batch(
        policy, TrainingBatch.of(samples), batching, optional=("old_log_probs",), routing=None
    )
    # Kernels are compiled and buffers allocated.
    forward_backward(policy, GRPO, batches, temperature=1.0)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            forward_backward(policy, GRPO, batches, temperature=1.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    places = [f"{w.filename}:{w.lineno}" for w in caught if "synchronizing" in str(w.message)]
    print("\n" + "\n".join(sorted(set(places))))
    assert [site for site in places if "megatron_gspo/" in site] == []
