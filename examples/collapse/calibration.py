"""The study of perturbed routers as a callback: the strength of the noise that reaches
``target_flip_rate``, found before the first step, and the study's metrics.

The flip rate is measured with the trainer's own passes over responses to the first prompts: one
records the routes of the rollout engine's side, the other compares those of the trainer's side,
each with the noise of its engine. So noise in lower layers changes the logits of upper ones as it
does in training.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch.distributed as dist

from megatron_gspo.config import ConfigError
from megatron_gspo.data.columns import Columns
from megatron_gspo.data.micro_batch_plan import MicroBatchPlan, plan_micro_batches
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.loop.callbacks import AfterStep, Callback
from megatron_gspo.loop.evaluation import evaluate
from megatron_gspo.loop.generation import rollout_seed
from megatron_gspo.loop.setup import Components
from megatron_gspo.loop.timers import Timers
from megatron_gspo.mcore.micro_batches import packing_rules
from megatron_gspo.mcore.routing_replay.gather_results import (
    routes_of_replica,
    routing_counts,
    routing_stats,
)
from megatron_gspo.mcore.routing_replay.micro_batch_routes import MicroBatchRoutes, ReplayOptions
from megatron_gspo.mcore.seeding import ROLLOUT, seed_generators
from megatron_gspo.mcore.train_step import compute_log_probs
from megatron_gspo.rollout.sample_exchange import move_samples
from megatron_gspo.routing_replay.perturbation import Perturbation, PerturbedPass
from megatron_gspo.user_code import UserCodeError

TOLERANCE = 0.05  # of the target
LARGEST = 64.0  # noise so much stronger than the logits chooses at random
_TRIES = 24


class NoiseStudy(Callback):
    """Logs `routing/noise_strength`, and `eval/accuracy_without_noise` with each evaluation after a
    step. Where ``target_flip_rate`` is set in place of ``strength``, finds the strength once.
    """

    def __init__(self) -> None:
        self._run: Components | None = None
        self._strength: float | None = None

    def start(self, run: Components, step: int) -> None:
        """Find the strength, or take that of the checkpoint."""
        if run.perturbation is None:
            raise UserCodeError(
                "callbacks: NoiseStudy needs routing.perturbation: examples/collapse/noise.py:noise"
            )
        self._run = run
        options = run.perturbation.options
        target = options.pop("target_flip_rate", None)
        if target is None:
            return
        if self._strength is None:
            self._strength, rate = calibrated_strength(run, step, target)
            if dist.get_rank() == 0:
                print(
                    f"noise: strength {self._strength:g} makes {100 * rate:.1f} % of the experts"
                    " differ",
                    file=sys.stderr,
                )
        options["strength"] = self._strength

    def after_step(self, step: int, metrics: Mapping[str, float]) -> AfterStep:
        """The strength, and the accuracy of clean routers where the step is evaluated."""
        run = self._run
        assert run is not None and run.perturbation is not None
        options = run.perturbation.options
        added = {"routing/noise_strength": float(options["strength"])}
        if "eval/accuracy" in metrics and options.get("engines", "both") != "trainer":
            assert run.eval_groups is not None
            with run.perturbation.off():
                clean = evaluate(
                    run.eval_groups, run.rewards, run.eval_prompts, run.config, Timers()
                )
            added["eval/accuracy_without_noise"] = clean["eval/accuracy"]
        return AfterStep(added)

    def state(self) -> dict[str, Any]:
        """The strength that was found."""
        return {} if self._strength is None else {"strength": self._strength}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Of a resumed run, whose weights would give another."""
        self._strength = state["strength"]


def calibrated_strength(run: Components, step: int, target: float) -> tuple[float, float]:
    """The strength that reaches the ``target`` flip rate, and the flip rate that it was measured to
    have: the same on every rank. The engine has the weights of ``step`` and clean routers. A
    collective of the world.

    Raises ``ConfigError`` where no strength reaches the target.
    """
    assert run.perturbation is not None
    seed_generators(run.config.seed, step, ROLLOUT)
    batch, plan = _first_responses(run)
    if run.perturbation.options.get("engines", "both") == "trainer":
        batch = with_rollout_routes(run, batch, plan, None)
    return bisect(lambda strength: flip_rate(run, batch, plan, strength), target)


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
    run: Components, batch: TrainingBatch, plan: MicroBatchPlan, strength: float
) -> float:
    """Share of the experts that differ between the two engines, each with its noise, mean over
    layers and the response tokens of ``batch``, which is on its replicas and has the rollout
    engine's routes if those are without noise. A collective of the world."""
    assert run.perturbation is not None
    given = run.perturbation
    options = given.options | {"strength": strength, "target_flip_rate": None}
    noisy = Perturbation(given.function, options, given.name)
    if given.options.get("engines", "both") != "trainer":
        batch = with_rollout_routes(run, batch, plan, noisy)
    routes = _routed(run, batch, plan, noisy, "trainer", compare=True)
    rates = routing_stats([routing_counts(routes)])[0].flip_rate
    assert rates is not None
    return float(np.mean(rates))


def with_rollout_routes(
    run: Components, batch: TrainingBatch, plan: MicroBatchPlan, noisy: Perturbation | None
) -> TrainingBatch:
    """The samples with the routes that a pass with the rollout engine's noise takes."""
    done = _routed(run, batch, plan, noisy, "rollout", compare=False)
    inputs = batch.inputs
    routes, _ = routes_of_replica(done, inputs)
    return batch.with_routes(Columns.of(inputs.positions, inputs.lengths, routed_experts=routes))


def _routed(
    run: Components,
    batch: TrainingBatch,
    plan: MicroBatchPlan,
    noisy: Perturbation | None,
    engine: str,
    *,
    compare: bool,
) -> list[MicroBatchRoutes]:
    """What the routers do in a pass with an engine's noise: they are compared with the samples'
    routes, or recorded."""
    assert run.policy.routes is not None
    perturbed_pass = None
    if noisy is not None:
        perturbed_pass = PerturbedPass(noisy, engine, seed=0, phase="calibration")
    options = ReplayOptions(
        run.policy.routes,
        record=not compare,
        compare=compare,
        perturbed_pass=perturbed_pass,
    )
    done = compute_log_probs(
        run.policy,
        batch,
        run.config.training,
        temperature=run.config.rollout.temperature,
        routing=options,
        plan=plan,
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
    return ConfigError("routing.perturbation_options.target_flip_rate", target, problem, fix)
