"""Routing replay in a layout: the routes that routers got and used, against the reference and
themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_gspo.data.packing import OPTIONAL_FIELDS
from megatron_gspo.data.sample import Sample
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.mcore.forward_step import unwrap
from megatron_gspo.mcore.policy import Policy
from megatron_gspo.mcore.routing_replay.gather_results import routing_counts, routing_stats
from megatron_gspo.mcore.routing_replay.micro_batch_routes import MicroBatchRoutes
from megatron_gspo.mcore.routing_replay.replay_options import ReplayOptions
from megatron_gspo.mcore.routing_replay.router_hooks import RouterHook, moe_layers
from megatron_gspo.mcore.train_step import (
    compute_log_probs,
    forward_backward,
    mini_batch_routes,
    pack_mini_batch,
)
from megatron_gspo.routing_replay.routes import RouteShape
from tests.equivalence.cases import CUTS, NOISE, OTHER_CUTS, SCENARIOS, stack
from tests.support.gathered import all_routes, everywhere, values_of
from tests.support.samples import trained_only
from tests.support.transformers_reference import Routers


def route_shape(policy: Policy) -> RouteShape:
    """Of this rank's own layers."""
    assert policy.routes is not None
    return policy.routes


def held_by(policy: Policy, samples: list[Sample]) -> list[Sample]:
    """The samples with the routes of this rank's own layers, of all layers' routes."""
    layers = list(route_shape(policy).held_layers)
    return [replace(sample, routed_experts=sample.routed_experts[:, layers]) for sample in samples]


def compare_recorded(
    policy: Policy, cut_name: str, samples: list[Sample], truth: Routers, errors: Any
) -> None:
    """Record the routes of a pass, replay them in a training pass, and take both passes' stats.
    Softmax routers have noise.

    ``route``: tokens whose routes differ from those of the reference, or from those that were to be
    replayed.
    """
    scenario = SCENARIOS["gspo"]
    batching = (CUTS | OTHER_CUTS)[cut_name]
    shape = route_shape(policy)
    noise = NOISE if policy.shape.router.score == "softmax" else None
    options = ReplayOptions(shape, record=True, entropy=True, perturbed_pass=noise)
    scores = compute_log_probs(
        policy,
        TrainingBatch.of(samples),
        batching,
        temperature=scenario.temperature,
        routing=options,
    )
    assert scores.routing is not None
    routes, _ = all_routes(scores.routing, samples, range(len(samples)))
    wrong = sum(different_rows(a, b) for a, b in zip(routes, truth.routes, strict=True))
    errors.add("route", wrong, "recorded")
    stats = routing_stats([routing_counts(scores.routing)])[0]
    errors.add("router figure", float(np.abs(stats.entropy - truth.entropy).max()), "entropy")
    errors.add("router figure", float(np.abs(stats.load - truth.load).max()), "load")
    replayed = [
        replace(sample, routed_experts=ids) for sample, ids in zip(samples, routes, strict=True)
    ]
    options = ReplayOptions(shape, replay=True, compare=True, storage="host", perturbed_pass=noise)
    log_probs, done = train_pass(
        policy, held_by(policy, replayed), scenario, batching, options, errors
    )
    expected = stack(trained_only(everywhere(scores.log_probs, samples, policy.groups), samples))
    errors.add("replayed log-prob", float((stack(log_probs) - expected).abs().max()), "gspo")
    stats = routing_stats([routing_counts(done)])[0]
    trained = sum(int(sample.loss_mask.sum()) for sample in samples)
    errors.add("route", abs(stats.compared - trained), "compared tokens")
    errors.add(
        "route", float(stats.flip_rate.sum()) + stats.flipped_tokens, "flips between equal weights"
    )


def train_pass(
    policy: Policy,
    samples: list[Sample],
    scenario: Any,
    batching: Any,
    options: ReplayOptions | None,
    errors: Any,
) -> tuple[list[np.ndarray], list[MicroBatchRoutes]]:
    """Forward and backward with the samples' routes; the log-probs, and a check of every
    router's choice.
    """
    carried = [
        name
        for name in OPTIONAL_FIELDS
        if all(getattr(sample, name) is not None for sample in samples)
    ]
    batches = pack_mini_batch(
        policy, TrainingBatch.of(samples), batching, optional=carried, routing=options
    )
    done = mini_batch_routes(policy, batches, options)
    with watched(policy, errors):
        outputs = forward_backward(
            policy, scenario.objective, batches, temperature=scenario.temperature, routing=done
        )
    log_probs = values_of(
        [output["log_probs"] for output in outputs], batches, samples, policy.groups
    )
    return log_probs, done


@contextmanager
def watched(policy: Policy, errors: Any) -> Iterator[None]:
    """Compare what every router returns, in every pass and recomputation, with the routes of
    its micro-batch.
    """
    given: dict[RouterHook, Tensor] = {}
    hooks = []

    def before(router: torch.nn.Module, args: Any) -> None:
        hook = router.router_replay
        given[hook] = hook._routes.given[hook.layer]

    def after(router: torch.nn.Module, args: Any, output: tuple[Tensor, Tensor]) -> None:
        ids = given.pop(router.router_replay).long()
        wanted = torch.zeros_like(output[1]).scatter_(1, ids, True)
        errors.add(
            "route", float((output[1] != wanted).any(1).sum()), f"used by {router.layer_number}"
        )
        errors.add(
            "route",
            float((output[0].ne(0) & ~output[1]).sum()),
            "weights of experts that weren't chosen",
        )

    routers = [layer.mlp.router for chunk in policy.chunks for layer in moe_layers(unwrap(chunk))]
    for router in routers:
        hooks += [router.register_forward_pre_hook(before), router.register_forward_hook(after)]
    yield
    for hook in hooks:
        hook.remove()


def different_rows(actual: np.ndarray, expected: np.ndarray) -> int:
    """Rows ``[layers, k]`` that name other experts, in any order."""
    assert actual.shape == expected.shape and actual.dtype == np.uint8
    return int((np.sort(actual, -1) != np.sort(expected, -1)).any((1, 2)).sum())
