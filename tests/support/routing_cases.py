"""Policies, samples with routes and passes for the tests of routing replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from megatron_gspo.algorithms import Objective, preset
from megatron_gspo.config import ParallelConfig, TrainingConfig
from megatron_gspo.data.sample import Sample
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.mcore.forward_step import unwrap
from megatron_gspo.mcore.micro_batches import MicroBatches
from megatron_gspo.mcore.policy import Policy, build_policy
from megatron_gspo.mcore.routing_replay.micro_batch_routes import MicroBatchRoutes
from megatron_gspo.mcore.routing_replay.replay_options import ReplayOptions
from megatron_gspo.mcore.routing_replay.router_hooks import moe_layers
from megatron_gspo.mcore.train_step import forward_backward, mini_batch_routes, pack_mini_batch
from megatron_gspo.routing_replay.routes import RouteShape
from tests.equivalence.cases import make_samples
from tests.support.configs import adam, micro_batches_of, model_config, parallel
from tests.support.gathered import values_of
from tests.support.parallel_groups import groups_of

GRPO = preset("grpo")


def policy_of(
    path: str, layout: ParallelConfig = parallel(), *, lr: float = 1e-2, **model: Any
) -> Policy:
    layout = replace(layout, use_distributed_optimizer=False)
    return build_policy(model_config(path, **model), layout, groups_of(layout), optimizer=adam(lr))


def shape_of(policy: Policy) -> RouteShape:
    shape = RouteShape.of_model(policy.shape)
    assert shape is not None
    return shape


def routers(policy: Policy) -> list[Any]:
    """The routers of this rank, in the order of the layers."""
    return [layer.mlp.router for chunk in policy.chunks for layer in moe_layers(unwrap(chunk))]


def scored_samples(count: int = 6, seed: int = 4) -> list[Sample]:
    """Samples with old log-probs of some sort."""
    samples = make_samples(seed, count)
    for sample in samples:
        sample.old_log_probs = np.full(sample.response_length, -4.0, dtype=np.float32)
    return samples


def with_random_routes(
    samples: Sequence[Sample],
    shape: RouteShape,
    seed: int = 0,
    among: int | None = None,
    missing: float = 0.0,
) -> list[Sample]:
    """A different set of experts for every token and layer, of the first ``among``; ``missing``:
    the fraction of rows whose route isn't known."""
    g = np.random.default_rng(seed)
    copies = []
    for sample in samples:
        order = g.random((sample.length - 1, shape.layers, among or shape.num_experts)).argsort(-1)
        unknown = g.random(sample.length - 1) < missing if missing else None
        copies.append(
            replace(
                sample,
                routed_experts=order[..., : shape.k].astype(shape.dtype),
                missing_routes=unknown,
            )
        )
    return copies


def run_pass(
    policy: Policy,
    samples: Sequence[Sample],
    options: ReplayOptions,
    objective: Objective = GRPO,
    batching: TrainingConfig = micro_batches_of(80),
    routes: list[MicroBatchRoutes] | None = None,
) -> tuple[MicroBatches, list[Any], list[MicroBatchRoutes]]:
    """Forward and backward without an optimizer step; ``routes``: those of an earlier pass, to
    misuse them.
    """
    batches = pack_mini_batch(
        policy, TrainingBatch.of(samples), batching, optional=("old_log_probs",), routing=options
    )
    done = routes or mini_batch_routes(policy, batches, options)
    return (
        batches,
        forward_backward(policy, objective, batches, temperature=1.0, routing=done),
        done,
    )


def train_pass(
    policy: Policy, samples: Sequence[Sample], options: ReplayOptions, objective: Objective = GRPO
) -> tuple[list[np.ndarray], list[MicroBatchRoutes]]:
    """The log-probs and the routes of a training pass; a collective of the world."""
    batches, outputs, done = run_pass(policy, samples, options, objective)
    values = [output["log_probs"] for output in outputs]
    return values_of(values, batches, samples, policy.groups), done


def around_routing(router: Any, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace what a router does with its logits."""
    router.routing = change(router.routing)


def distance(actual: Sequence[Any], expected: Sequence[Any]) -> float:
    """Largest difference of two lists of arrays or tensors."""
    pairs = zip(actual, expected, strict=True)
    return max(
        float((torch.as_tensor(a).double() - torch.as_tensor(b).double()).abs().max())
        for a, b in pairs
    )
