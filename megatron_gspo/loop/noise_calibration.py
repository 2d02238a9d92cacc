"""The strength of the routers' noise that reaches ``router_noise.target_flip_rate``, found before
the first step.

The flip rate is measured with the trainer's own passes over responses to the first prompts: one
records the routes of the rollout engine's side, the other compares those of the trainer's side,
each with the noise of its engine. So noise in lower layers changes the logits of upper ones as it
does in training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from megatron_gspo.config import Config, ConfigError
from megatron_gspo.data.columns import Columns
from megatron_gspo.data.micro_batch_plan import MicroBatchPlan, plan_micro_batches
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.loop.generation import rollout_seed
from megatron_gspo.loop.routing import router_noise
from megatron_gspo.loop.setup import Components
from megatron_gspo.mcore.micro_batches import packing_rules
from megatron_gspo.mcore.policy import Policy
from megatron_gspo.mcore.routing_replay.gather_results import routes_of_replica, routing_stats
from megatron_gspo.mcore.routing_replay.micro_batch_routes import MicroBatchRoutes, ReplayOptions
from megatron_gspo.mcore.seeding import ROLLOUT, seed_generators
from megatron_gspo.mcore.train_step import compute_log_probs
from megatron_gspo.rollout.sample_exchange import move_samples
from megatron_gspo.routing_replay.router_noise import RouterNoise

TOLERANCE = 0.05  # of the target
LARGEST = 64.0  # noise so much stronger than the logits chooses at random
_TRIES = 24


def calibrated_strength(run: Components, step: int) -> tuple[float, float]:
    """The strength that reaches ``router_noise.target_flip_rate``, and the flip rate that it was
    measured to have: the same on every rank. The engine has the weights of ``step`` and clean
    routers. A collective of the world.

    Raises ``ConfigError`` where no strength reaches the target.
    """
    seed_generators(run.config.seed, step, ROLLOUT)
    batch, plan = _first_responses(run)
    section = run.config.router_noise
    target = section.target_flip_rate
    assert target is not None
    if not section.in_rollout:
        batch = with_rollout_routes(run.policy, batch, plan, run.config, None)
    return bisect(lambda strength: flip_rate(run.policy, batch, plan, run.config, strength), target)


def bisect(rate: Callable[[float], float], target: float) -> tuple[float, float]:
    """(strength, its rate) with a rate within ``TOLERANCE`` of the target, of a rate that grows
    with the strength.

    Raises ``ConfigError`` where there is none.
    """
    low = 0.0
    high = 1.0
    while (reached := rate(high)) < target and high < LARGEST:
        low = high
        high = 2 * high
    if reached < target * (1 - TOLERANCE):
        raise _refused(target, f"the strongest noise reaches {reached:.3g}", "set it below that")
    strength = high
    for _ in range(_TRIES):
        if abs(reached - target) <= TOLERANCE * target:
            return strength, reached
        strength = (low + high) / 2
        reached = rate(strength)
        low, high = (strength, high) if reached < target else (low, strength)
    problem = f"the measured rate jumps from below it to {rate(high):.3g}"
    raise _refused(
        target, problem, "raise routing.metric_sequences, for more tokens, or set another target"
    )


def flip_rate(
    policy: Policy, batch: TrainingBatch, plan: MicroBatchPlan, config: Config, strength: float
) -> float:
    """Share of the experts that differ between the two engines, each with its noise, mean over
    layers and the response tokens of ``batch``, which is on its replicas and has the rollout
    engine's routes if those are without noise. A collective of the world."""
    section = config.router_noise
    rollout, trainer = (
        router_noise(section, strength, "calibration", side) if is_noisy else None
        for side, is_noisy in (("rollout", section.in_rollout), ("trainer", section.in_trainer))
    )
    if rollout is not None:
        batch = with_rollout_routes(policy, batch, plan, config, rollout)
    rates = routing_stats(_routed(policy, batch, plan, config, trainer, compare=True)).flip_rate
    assert rates is not None
    return float(np.mean(rates))


def with_rollout_routes(
    policy: Policy,
    batch: TrainingBatch,
    plan: MicroBatchPlan,
    config: Config,
    noise: RouterNoise | None,
) -> TrainingBatch:
    """The samples with the routes that a pass with the rollout engine's noise takes."""
    routed = _routed(policy, batch, plan, config, noise, compare=False)
    routes, _ = routes_of_replica(routed, batch.inputs)
    positions = batch.inputs.positions
    return batch.with_routes(Columns.of(positions, batch.inputs.lengths, routed_experts=routes))


def _routed(
    policy: Policy,
    batch: TrainingBatch,
    plan: MicroBatchPlan,
    config: Config,
    noise: RouterNoise | None,
    *,
    compare: bool,
) -> list[MicroBatchRoutes]:
    """What the routers do in a pass: they are compared with the samples' routes, or recorded."""
    assert policy.routes is not None
    options = ReplayOptions(policy.routes, record=not compare, compare=compare, noise=noise)
    temperature = config.rollout.temperature
    done = compute_log_probs(
        policy, batch, config.training, temperature=temperature, routing=options, plan=plan
    )
    assert done.routing is not None
    return done.routing


def _first_responses(run: Components) -> tuple[TrainingBatch, MicroBatchPlan]:
    """One response to each of the first step's first prompts, on their replicas."""
    config = run.config
    groups = run.policy.groups
    count = min(config.routing.metric_sequences, config.rollout.rollout_batch_size)
    prompts, _ = run.prompts.batch(0, count)
    sampling = replace(config.rollout, n_samples_per_prompt=1)
    responses = run.groups.generate(prompts, sampling, seed=rollout_seed(config.seed, 0))
    run.groups.pause(keep=False)
    rules = packing_rules(config.training, run.policy.config, groups)
    replica = np.arange(count, dtype=np.int32) % rules.replicas
    batch = move_samples(responses, replica, groups, routes=run.policy.routes)
    return batch, plan_micro_batches(batch.lengths, rules, replica)


def _refused(target: float, problem: str, fix: str) -> ConfigError:
    return ConfigError("router_noise.target_flip_rate", target, problem, fix)
