"""Routing replay in a layout: what routers were told and what they did, against the reference and themselves."""

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
from megatron_gspo.mcore.forward_step import unwrap
from megatron_gspo.mcore.micro_batches import collect_values
from megatron_gspo.mcore.policy import Policy
from megatron_gspo.mcore.routing_replay.replay_pass import RoutingPass, RoutingTask
from megatron_gspo.mcore.routing_replay.replay_results import collect_routes, routing_figures
from megatron_gspo.mcore.routing_replay.router_hooks import RouteGate, moe_layers
from megatron_gspo.mcore.train_step import compute_log_probs, cut, forward_backward
from megatron_gspo.routing_replay.routes import RouteShape
from tests.equivalence.cases import CUTS, OTHER_CUTS, SCENARIOS, stack
from tests.support.transformers_reference import Routers


def route_shape(policy: Policy) -> RouteShape:
    shape = policy.shape
    return RouteShape(sum(shape.moe_layers), shape.experts_per_token, shape.num_experts)


def compare_recorded(policy: Policy, cut_name: str, samples: list[Sample], truth: Routers, errors: Any) -> None:
    """Record the routes of a pass, replay them in a training pass, and take both passes' figures.

    ``route``: tokens whose routes differ from those of the reference, or from those that were to be replayed.
    """
    scenario, batching, shape = SCENARIOS["gspo"], (CUTS | OTHER_CUTS)[cut_name], route_shape(policy)
    task = RoutingTask(shape, record=True, describe=True)
    scores = compute_log_probs(policy, samples, batching, temperature=scenario.temperature, routing=task)
    assert scores.routing is not None
    routes = collect_routes(scores.routing, samples, range(len(samples)))
    wrong = sum(different_rows(a, b) for a, b in zip(routes, truth.routes, strict=True))
    errors.add("route", wrong, "recorded")
    figures = routing_figures(scores.routing)
    errors.add("router figure", float(np.abs(figures.entropy - truth.entropy).max()), "entropy")
    errors.add("router figure", float(np.abs(figures.load - truth.load).max()), "load")
    replayed = [replace(sample, routed_experts=ids) for sample, ids in zip(samples, routes, strict=True)]
    task = RoutingTask(shape, replay=True, compare=True, storage="host")
    log_probs, done = train_pass(policy, replayed, scenario, batching, task, errors)
    errors.add("replayed log-prob", float((stack(log_probs) - stack(scores.log_probs)).abs().max()), "gspo")
    figures = routing_figures(done)
    trained = sum(int(sample.loss_mask.sum()) for sample in samples)
    errors.add("route", abs(figures.compared - trained), "compared tokens")
    errors.add("route", float(figures.flip_rate.sum()) + figures.flipped_tokens, "flips between equal weights")


def train_pass(policy: Policy, samples: list[Sample], scenario: Any, batching: Any, task: RoutingTask | None,
               errors: Any) -> tuple[list[np.ndarray], RoutingPass]:
    """Forward and backward with the samples' routes; the log-probs, and a look at every router's choice."""
    carried = [name for name in OPTIONAL_FIELDS if all(getattr(sample, name) is not None for sample in samples)]
    batches = cut(policy, samples, batching, optional=carried, routing=task)
    done = RoutingPass(task, policy.groups, policy.config.sequence_parallel, batches.batches)
    with watched(policy, errors):
        outputs = forward_backward(policy, scenario.objective, batches, temperature=scenario.temperature, routing=done)
    log_probs = collect_values([output["log_probs"] for output in outputs], batches.batches, samples, policy.groups)
    return log_probs, done


@contextmanager
def watched(policy: Policy, errors: Any) -> Iterator[None]:
    """Compare what every router returns, in every pass and recomputation, with the routes of its micro-batch."""
    told: dict[RouteGate, Tensor] = {}
    hooks = []

    def before(router: torch.nn.Module, args: Any) -> None:
        table = router.router_replay._table
        told[router.router_replay] = table.given[:, router.router_replay.layer]

    def after(router: torch.nn.Module, args: Any, output: tuple[Tensor, Tensor]) -> None:
        ids = told.pop(router.router_replay).long()
        wanted = torch.zeros_like(output[1]).scatter_(1, ids, True)
        errors.add("route", float((output[1] != wanted).any(1).sum()), f"used by {router.layer_number}")
        errors.add("route", float((output[0].ne(0) & ~output[1]).sum()), "weights of experts that weren't chosen")

    routers = [layer.mlp.router for chunk in policy.chunks for layer in moe_layers(unwrap(chunk))]
    for router in routers:
        hooks += [router.register_forward_pre_hook(before), router.register_forward_hook(after)]
    yield
    for hook in hooks:
        hook.remove()


def different_rows(found: np.ndarray, expected: np.ndarray) -> int:
    """Rows ``[layers, k]`` that name other experts, in whatever order."""
    assert found.shape == expected.shape and found.dtype == np.uint8
    return int((np.sort(found, -1) != np.sort(expected, -1)).any((1, 2)).sum())
