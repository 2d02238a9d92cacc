"""Samples that are ready to train on: generated, verified, filtered, with old log-probs and advantages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_gspo.config import ConfigError
from megatron_gspo.data.sample import Sample
from megatron_gspo.errors import RunError
from megatron_gspo.loop.assemble import Run
from megatron_gspo.loop.mismatch import correct, mismatch
from megatron_gspo.loop.rollout_buffer import Place, read_rollout, write_rollout
from megatron_gspo.loop.rollouts import draw_rollout, leave_servers
from megatron_gspo.loop.routing import (
    accept_routes,
    note_old_policy,
    old_policy_options,
    sample_old_policy,
)
from megatron_gspo.loop.scoring import attach_advantages, mask, varied
from megatron_gspo.loop.staleness import staleness
from megatron_gspo.loop.timers import Timers
from megatron_gspo.loop.turns import turn_metrics
from megatron_gspo.mcore.seeding import ROLLOUT, UPDATE, seed_generators
from megatron_gspo.mcore.train_step import compute_log_probs
from megatron_gspo.routing_replay.step_metrics import StepRouting


@dataclass(frozen=True)
class Experience:
    """One rollout batch, the same on every rank, and where the prompts stand after it."""

    samples: list[Sample]
    place: Place
    metrics: dict[str, float]
    routing: StepRouting


def collect(run: Run, step: int, place: Place, timers: Timers, *, checkpoint: Path | None = None) -> Experience:
    """Generate and score one rollout batch and give every sample its old log-probs and advantages.

    ``checkpoint``: that of the weights as they are, if there is one. The rollouts are kept in it, and taken from it
    where an earlier life of the run has left them.
    """
    seed_generators(run.config.seed, step, ROLLOUT)
    keeps = checkpoint is not None and not run.config.algorithm.is_supervised
    rollout = read_rollout(run, checkpoint) if keeps else None
    if rollout is None:
        rollout = draw_rollout(run, step, place, timers)
        if keeps:
            write_rollout(run, checkpoint, rollout)
    place = leave_servers(run, rollout.place, step)
    seed_generators(run.config.seed, step, UPDATE)
    samples, metrics, routing = rollout.samples, dict(rollout.metrics), StepRouting()
    accept_routes(run, samples, routing)
    if run.objective.has_ratio or run.reference is not None:
        metrics |= _attach_log_probs(run, samples, routing, timers)
    metrics |= mask(run, samples)
    if metrics["masked/non_finite"] and not any(sample.loss_mask.any() for sample in samples):
        raise RunError(
            f"step {step + 1}: no response has finite log-probs under the training engine, so its weights are broken; "
            "look at grad_norm before, lower optimizer.lr, and go on from an earlier checkpoint"
        )
    attach_advantages(run, samples)
    metrics |= correct(run.config.algorithm, samples)
    metrics |= staleness(samples, step) | turn_metrics(samples)
    metrics |= _describe(samples, supervised=run.config.algorithm.is_supervised)
    return Experience(samples, place, metrics, routing)


def _attach_log_probs(run: Run, samples: list[Sample], routing: StepRouting, timers: Timers) -> dict[str, float]:
    """``old_log_probs`` from the training engine (or the rollout's own), ``ref_log_probs`` where a KL asks for them,
    and the routes that the updates need."""
    temperature = run.config.rollout.temperature
    metrics: dict[str, float] = {}
    if run.config.algorithm.old_log_probs == "rollout":
        old = [sample.rollout_log_probs for sample in samples]
        if any(value is None for value in old):
            problem = "the engine gives no log-probs"
            raise ConfigError("algorithm.old_log_probs", "rollout", problem, "set it to recompute")
        sample_old_policy(run, samples, routing, timers)
    else:
        with timers("log_probs"):
            scores = compute_log_probs(run.policy, samples, run.batching, temperature=temperature, with_entropy=True,
                                       routing=old_policy_options(run))
        note_old_policy(run, samples, samples, scores.routing, routing, timers)
        old = scores.log_probs
        metrics = mismatch(samples, old) | {"entropy": _mean(scores.entropy, samples)}
    for sample, value in zip(samples, old, strict=True):
        sample.old_log_probs = value
    if run.reference is not None:
        with timers("log_probs"):
            reference = compute_log_probs(run.reference, samples, run.batching, temperature=temperature)
        for sample, value in zip(samples, reference.log_probs, strict=True):
            sample.ref_log_probs = value
    return metrics


def _joined(samples: Sequence[Sample], field: str) -> np.ndarray:
    return np.concatenate([getattr(sample, field) for sample in samples])


def _mean(values: Sequence[np.ndarray], samples: Sequence[Sample]) -> float:
    trained = _joined(samples, "loss_mask")
    return float(np.concatenate(values)[trained].mean()) if trained.any() else float("nan")


def _describe(samples: Sequence[Sample], *, supervised: bool) -> dict[str, float]:
    lengths = np.array([sample.response_length for sample in samples], dtype=np.float64)
    found = {
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response_length/truncated": float(np.mean([sample.finish_reason == "length" for sample in samples])),
    }
    if supervised:
        return found
    rewards = np.array([sample.reward for sample in samples if not math.isnan(sample.reward)])
    return found | {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "groups/zero_variance": 1.0 - float(np.mean(varied(samples))),
    }
