"""Routes that are valid but wrong, as faulty engines return them, and passes of a tiny model
over such samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch

from megatron_gspo.config import Config
from megatron_gspo.data.sample import Sample
from megatron_gspo.data.sample_batch import SampleBatch
from megatron_gspo.loop.engines import perturb_rollout
from megatron_gspo.loop.log_probs import with_log_probs
from megatron_gspo.loop.routing import RoutingReplay, same_routers
from megatron_gspo.loop.setup import Components, build_components
from megatron_gspo.loop.step_plan import plan_step
from megatron_gspo.loop.timers import Timers
from megatron_gspo.mcore.micro_batches import packing_rules
from megatron_gspo.rollout.sample_exchange import move_samples
from megatron_gspo.routing_replay.routes import RouteError
from tests.support.random_samples import all_samples
from tests.support.transformers_reference import load_reference, observe_routers

Fault = Callable[[Sample, list[Sample]], np.ndarray]


def shifted(sample: Sample, everyone: list[Sample]) -> np.ndarray:
    """Each token has the row of the token before it, the first its own."""
    return np.concatenate([sample.routed_experts[:1], sample.routed_experts[:-1]])


def shifted_back(sample: Sample, everyone: list[Sample]) -> np.ndarray:
    """Each token has the row of the token after it."""
    return np.concatenate([sample.routed_experts[1:], sample.routed_experts[-1:]])


def repeated(sample: Sample, everyone: list[Sample]) -> np.ndarray:
    """In the last three quarters the same row again and again."""
    first = len(sample.routed_experts) // 4
    routes = sample.routed_experts.copy()
    routes[first:] = routes[first]
    return routes


def of_another(sample: Sample, everyone: list[Sample]) -> np.ndarray:
    """The rows of a sample of another prompt, repeated to its length."""
    other = next(s for s in everyone[::-1] if s.prompt_index != sample.prompt_index)
    return np.resize(other.routed_experts, sample.routed_experts.shape)


def of_weights(path: str, sample: Sample, everyone: list[Sample]) -> np.ndarray:
    """The routes that another checkpoint takes on the same tokens."""
    return observe_routers(_reference(path), [sample]).routes[0]


@cache
def _reference(path: str) -> torch.nn.Module:
    return load_reference(path)


def shifted_above(sample: Sample, everyone: list[Sample]) -> np.ndarray:
    """Shifted in the upper half of the layers alone."""
    routes = sample.routed_experts.copy()
    layers = sample.routed_experts.shape[1]
    routes[:, layers // 2 :] = shifted(sample, everyone)[:, layers // 2 :]
    return routes


def unchanged(sample: Sample, everyone: list[Sample]) -> np.ndarray:
    """What the engine returned."""
    return sample.routed_experts


def outcomes(
    rank: int,
    world: int,
    plain: dict[str, Any],
    faults: Mapping[str, tuple[Fault, str]],
) -> tuple[dict[str, str], tuple[str, str]]:
    """What a pass over the same samples says with each fault: "" or the error; and the name of the
    longest sample. A fault is of that one ("longest") or of "all"."""
    config = Config.from_dict(plain)
    with build_components(config) as run:
        run.groups.update_weights(run.policy.weights, version=0)
        if run.perturbation is not None:
            perturb_rollout(run.engine, run.perturbation)
        prompts, _ = run.prompts.batch(0, config.rollout.rollout_batch_size)
        batch = run.groups.generate(prompts, config.rollout, seed=1)
        everyone = all_samples(batch)
        longest = int(batch.lengths.argmax())
        results = {}
        for name, (fault, extent) in faults.items():
            results[name] = outcome(
                run,
                batch.with_samples(
                    {
                        i: replace(sample, routed_experts=fault(sample, everyone))
                        for i, sample in batch.held.items()
                        if i == longest or extent == "all"
                    }
                ),
            )
    row = batch.table[longest]
    return results, (str(row["prompt_index"]), str(row["sample_index"]))


def outcome(run: Components, batch: SampleBatch) -> str:
    """The error of the pass for old log-probs, or ""."""
    config = run.config
    policy = run.policy
    groups = run.policy.groups
    rules = packing_rules(config.training, policy.config, groups)
    plan = plan_step(batch, None, config, rules, 0)
    routing = RoutingReplay(
        config.routing,
        policy.routes,
        True,
        run.perturbation,
        seed=config.seed,
        same_routers=same_routers(config),
    )
    routing.check_rollout_routes(batch)
    moved = move_samples(batch, plan.replica, groups, routes=routing.shape)
    try:
        with_log_probs(moved, policy, None, config, plan, routing, Timers(), {})
    except RouteError as error:
        return str(error)
    return ""
