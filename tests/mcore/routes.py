"""Policies, samples with routes and passes for the tests of routing replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from megatron_gspo.algorithms import Objective, preset
from megatron_gspo.data.sample import Sample
from megatron_gspo.mcore.forward_step import unwrap
from megatron_gspo.mcore.micro_batches import MicroBatches, collect_values
from megatron_gspo.mcore.model import ModelSettings
from megatron_gspo.mcore.policy import DataParallelSettings, OptimizerSettings, Policy, build_policy
from megatron_gspo.mcore.process_groups import Layout
from megatron_gspo.mcore.routing_replay.replay_pass import RoutingPass, RoutingTask
from megatron_gspo.mcore.routing_replay.router_hooks import moe_layers
from megatron_gspo.mcore.train_step import Batching, cut, forward_backward
from megatron_gspo.routing_replay.routes import RouteShape
from tests.equivalence.cases import make_samples
from tests.mcore.layouts import groups_of

GRPO = preset("grpo")


def policy_of(path: str, layout: Layout = Layout(), *, lr: float = 1e-2, **model: Any) -> Policy:  # noqa: B008
    return build_policy(path, layout, groups_of(layout), model=ModelSettings(**model), optimizer=OptimizerSettings(lr),
                        data_parallel=DataParallelSettings(False))  # fmt: skip


def shape_of(policy: Policy) -> RouteShape:
    return RouteShape(sum(policy.shape.moe_layers), policy.shape.experts_per_token, policy.shape.num_experts)


def routers(policy: Policy) -> list[Any]:
    """The routers of this rank, in the order of the layers."""
    return [layer.mlp.router for chunk in policy.chunks for layer in moe_layers(unwrap(chunk))]


def scored_samples(count: int = 6, seed: int = 4) -> list[Sample]:
    """Samples with old log-probs of some sort."""
    samples = make_samples(seed, count)
    for sample in samples:
        sample.old_log_probs = np.full(sample.response_length, -4.0, dtype=np.float32)
    return samples


def with_random_routes(samples: Sequence[Sample], shape: RouteShape, seed: int = 0, among: int | None = None,
                       holes: float = 0.0) -> list[Sample]:
    """A different set of experts for every token and layer, of the first ``among``; ``holes``: the share of rows whose
    route isn't known."""
    g, found = np.random.default_rng(seed), []
    for sample in samples:
        order = g.random((sample.length - 1, shape.layers, among or shape.num_experts)).argsort(-1)
        unknown = g.random(sample.length - 1) < holes if holes else None
        found.append(replace(sample, routed_experts=order[..., : shape.k].astype(shape.dtype), route_holes=unknown))
    return found


def run_pass(policy: Policy, samples: Sequence[Sample], task: RoutingTask, objective: Objective = GRPO,
             batching: Batching = Batching(80), **changes: Any) -> tuple[MicroBatches, list[Any], RoutingPass]:  # noqa: B008
    """Forward and backward without an optimizer step; ``changes``: fields of the pass."""
    batches = cut(policy, samples, batching, optional=("old_log_probs",), routing=task)
    done = RoutingPass(task, policy.groups, policy.config.sequence_parallel, batches.batches)
    for name, value in changes.items():
        setattr(done, name, value)
    return batches, forward_backward(policy, objective, batches, temperature=1.0, routing=done), done


def train_pass(policy: Policy, samples: Sequence[Sample], task: RoutingTask,
               objective: Objective = GRPO) -> tuple[list[np.ndarray], RoutingPass]:
    """The log-probs of a training pass, and what became of the routes; a collective of the world."""
    batches, outputs, done = run_pass(policy, samples, task, objective)
    values = [output["log_probs"] for output in outputs]
    return collect_values(values, batches.batches, samples, policy.groups), done


def around_routing(router: Any, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace what a router does with its logits."""
    router.routing = change(router.routing)


def distance(found: Sequence[Any], expected: Sequence[Any]) -> float:
    """Largest difference of two lists of arrays or tensors."""
    pairs = zip(found, expected, strict=True)
    return max(float((torch.as_tensor(a).double() - torch.as_tensor(b).double()).abs().max()) for a, b in pairs)
