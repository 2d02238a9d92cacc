"""The optimizer steps of one rollout batch: mini-batches, updates and their metrics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from megatron_gspo.algorithms import (
    RatioHistogram,
    Reduction,
    add_ratios,
    ratio_histograms,
    reduction_of,
)
from megatron_gspo.config import Config
from megatron_gspo.data.columns import joined_columns
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.errors import RunError, first_line
from megatron_gspo.loop.rollout_correction import mismatch
from megatron_gspo.loop.routing import RoutingReplay
from megatron_gspo.loop.step_plan import StepPlan
from megatron_gspo.loop.timers import Timers
from megatron_gspo.mcore.policy import Policy
from megatron_gspo.mcore.teacher_states import TeacherStates
from megatron_gspo.mcore.train_step import StepResult, finished_metrics, train_mini_batch


@dataclass(frozen=True)
class Update:
    """The metrics of a step's updates, and the ratios of the last one, whose policy differs most
    from the old one.
    """

    metrics: dict[str, float]
    batch: TrainingBatch = field(default_factory=lambda: TrainingBatch.of([]))
    """The last mini-batch."""

    log_probs: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.float32))
    """Log-probs of the last mini-batch before its update, a column of its responses."""

    flips: np.ndarray | None = None
    """Flips of the last mini-batch (``flips_of_replica``), another column; None if not measured."""


def writes_ratios(config: Config, step: int) -> bool:
    """Whether the ratios of a step's last update are written (``tracking.ratio_interval``)."""
    interval = config.tracking.ratio_interval
    return interval > 0 and step % interval == 0


def run_optimizer_steps(
    policy: Policy,
    batch: TrainingBatch,
    config: Config,
    step: int,
    plan: StepPlan,
    routing: RoutingReplay,
    timers: Timers,
    ratios: dict[str, RatioHistogram],
    teacher: TeacherStates | None = None,
) -> Update:
    """Train on a rollout batch: ``ppo_epochs`` passes, one optimizer step for each mini-batch.

    A mini-batch without a trained token is skipped and counted. Metrics are means over optimizer
    steps.

    Args:
        ratios: the histograms of the step, by the names of their quantiles; those of the updates
            are added.
        teacher: hidden states of the micro-batches of all mini-batches, of one epoch.
    """
    results: list[StepResult] = []
    mini_batches: list[TrainingBatch] = []
    first_update_metrics: dict[str, float] = {}
    clock = policy.config.timers
    if clock is not None:
        clock.read_and_reset()  # it also timed the old policy's pass
    for number, update in enumerate(plan.updates):
        mini_batch = batch.select(update.positions)
        if not mini_batch.has_trained_tokens:
            continue
        teacher_states = None
        if teacher is not None:
            teacher_states = teacher.of_micro_batches(
                update.first_micro_batch, update.packing.num_micro_batches
            )
        with timers("train"), gradient_failure_explained(step, "optimizer"):
            result = train_mini_batch(
                policy,
                mini_batch,
                config.algorithm,
                config.training,
                temperature=config.rollout.temperature,
                routing=routing.update_options(number),
                plan=update.packing,
                distillation=config.distillation,
                teacher=teacher_states,
                score_centering=config.algorithm.centering,
            )
        routing.add_update(
            result.routing, mini_batch, timers, flips=writes_ratios(config, step + 1)
        )
        if not results:
            first_update_metrics = _first_update_metrics(
                mini_batch, result.log_probs, config, ratios
            )
        mini_batches.append(mini_batch)
        results.append(replace(result, routing=None))  # frees the mini-batch's routes
    metrics = {
        "updates": float(len(results)),
        "updates/skipped": float(len(plan.updates) - len(results)),
    }
    if config.training.ppo_epochs > 1:
        metrics["updates/repacked"] = plan.repacked
    if not results:
        return Update(metrics)
    if config.algorithm.has_ratio:
        _add_ratios(ratios, mini_batches, [result.log_probs for result in results])
    metrics |= first_update_metrics | averaged_metrics(finished_metrics(results, policy))
    metrics |= packing_metrics(policy, results)
    metrics |= clock.read_and_reset() if clock is not None else {}
    return Update(metrics, mini_batches[-1], results[-1].log_probs, routing.measured.flips)


def _first_update_metrics(
    mini_batch: TrainingBatch,
    log_probs: np.ndarray,
    config: Config,
    ratios: dict[str, RatioHistogram],
) -> dict[str, float]:
    """What the first update tells of the old policy, whose weights it still has.

    log_probs: [T] of the mini-batch's responses, in that update.
    """
    if config.algorithm.old_log_probs == "rollout":
        return mismatch(mini_batch, log_probs, ratios)
    if config.algorithm.has_ratio:
        return {"log_ratio/first_update": largest_log_ratio(mini_batch, log_probs)}
    return {}


def largest_log_ratio(batch: TrainingBatch, log_probs: np.ndarray) -> float:
    """The largest absolute difference of ``log_probs`` [T] from the old ones at trained tokens.

    A collective of the batch's group.
    """
    distance = np.abs(log_probs - batch.responses["old_log_probs"])[batch.responses["loss_mask"]]
    return batch.max(float(distance.max(initial=0.0)))[0]  # NaN stays


@contextmanager
def gradient_failure_explained(step: int, section: str) -> Iterator[None]:
    """Turn the error for a non-finite gradient, of the optimizer or of Megatron's gradient buffers,
    into a message for the user. section: of the config, with the optimizer's keys."""
    try:
        yield
    except RuntimeError as error:
        if "grad norm" not in str(error):
            raise
        raise RunError(
            f"step {step + 1}: the gradient is not finite ({first_line(error)}), so the weights"
            f" were not updated; lower {section}.lr or {section}.clip_grad, and look at ratio_max"
            " and grad_norm of the steps before"
        ) from error


def averaged_metrics(records: Sequence[dict[str, float]]) -> dict[str, float]:
    """Means over the updates; of an extreme its largest or smallest."""
    combined: dict[str, float] = {}
    for name in dict.fromkeys(name for record in records for name in record):
        values = [record[name] for record in records if name in record]
        reduction = reduction_of(name)
        if reduction is Reduction.MAX:
            combined[name] = float(np.max(values))
        elif reduction is Reduction.MIN:
            combined[name] = float(np.min(values))
        else:
            combined[name] = sum(values) / len(values)
    if "entropy" in combined:  # of the policies in between; "entropy" is the old policy's
        combined["entropy/updates"] = combined.pop("entropy")
    return combined


def packing_metrics(policy: Policy, results: Sequence[StepResult]) -> dict[str, float]:
    """``perf/*``: padding of the packed batches, and the share of the pipeline's time in fill
    and drain.
    """
    batches = [result.batches for result in results]
    real = sum(b.real_tokens for b in batches)
    packed = sum(b.packed_tokens for b in batches)
    stages = policy.groups.pp.size()
    chunks = len(policy.chunks)
    bubbles = [(stages - 1) / (len(b.batches) * chunks + stages - 1) for b in batches]
    return {
        "perf/trained_tokens": float(real),
        "perf/padding": 1.0 - real / packed,
        "perf/pipeline_bubble": float(np.mean(bubbles)),
        "perf/micro_batches": float(np.mean([len(b.batches) for b in batches])),
    }


def _add_ratios(
    ratios: dict[str, RatioHistogram],
    mini_batches: Sequence[TrainingBatch],
    log_probs: Sequence[np.ndarray],
) -> None:
    """Add the ratios of this replica's responses in the updates to ``ratio_token`` and
    ``ratio_sequence``. All updates at once, since a few tokens cost as much as many."""
    ratios.update({f"ratio_{level}": of_level for level, of_level in ratio_histograms().items()})
    histograms = {level: ratios[f"ratio_{level}"] for level in ("token", "sequence")}
    responses = joined_columns(
        [batch.responses for batch in mini_batches], "old_log_probs", "loss_mask"
    )
    for piece in responses.with_column("log_probs", np.concatenate(log_probs)).pieces():
        add_ratios(
            histograms,
            torch.from_numpy(piece["log_probs"]),
            torch.from_numpy(piece["old_log_probs"]),
            torch.from_numpy(piece["loss_mask"]),
            torch.from_numpy(piece.sample_ids),
        )
