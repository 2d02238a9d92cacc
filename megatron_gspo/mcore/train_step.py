"""The two passes over a rollout batch: log-probs without a loss, and one optimizer step on a
mini-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_gspo.algorithms import (
    Distillation,
    Objective,
    ScoreCentering,
    finish_metrics,
    reduction_of,
)
from megatron_gspo.config import TrainingConfig
from megatron_gspo.data.micro_batch_plan import MicroBatchPlan
from megatron_gspo.data.packing import CENTERING_FIELDS, OPTIONAL_FIELDS, TEACHER_FIELDS
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.mcore.forward_step import (
    ForwardStep,
    PolicyLossOutput,
    log_prob_forward_step,
    output_weight,
    policy_forward_step,
    teacher_forward_step,
)
from megatron_gspo.mcore.micro_batch_inputs import POLICY_LOSS
from megatron_gspo.mcore.micro_batches import (
    MicroBatches,
    plan_of,
    planned_micro_batches,
    values_of_replica,
)
from megatron_gspo.mcore.policy import Policy
from megatron_gspo.mcore.routing_replay.micro_batch_routes import (
    MicroBatchRoutes,
    routes_of_mini_batch,
)
from megatron_gspo.mcore.routing_replay.replay_options import ReplayOptions
from megatron_gspo.mcore.teacher_states import TeacherStates, rows_of_policy
from megatron_gspo.parallel.log_probs import LogProbOptions
from megatron_gspo.parallel.metric_reduction import reduce_records


@dataclass(frozen=True)
class StepResult:
    """One optimizer step: its ``metrics``, the same on every rank, the ``log_probs`` of the policy
    before it, a column of the mini-batch's responses with 0 at untrained tokens, and what the
    routers did. ``shares``: this rank's part of the loss's metrics, for `finished_metrics`."""

    metrics: dict[str, float]
    shares: dict[str, Tensor]
    log_probs: np.ndarray
    batches: MicroBatches
    routing: list[MicroBatchRoutes] | None = None


def run_schedule(
    policy: Policy, forward_step: ForwardStep, batches: MicroBatches, *, forward_only: bool
) -> list[Any]:
    """Run Megatron's forward-backward schedule over this rank's micro-batches; returns the last
    stage's outputs.
    """
    iterators = [iter(batches.batches) for _ in policy.chunks]
    several = len(policy.chunks) > 1
    with _lengths_sent(policy, batches.several_lengths):
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if several else iterators[0],
            model=policy.chunks if several else policy.chunks[0],
            num_microbatches=len(batches.batches),
            seq_length=batches.seq_length,
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )


@contextmanager
def _lengths_sent(policy: Policy, needed: bool) -> Iterator[None]:
    """Within the context pipeline stages send each micro-batch's length before its hidden states.

    A pass over a step's mini-batches, each padded to a length of its own, fills and drains the
    pipeline once. A mini-batch alone has one length, and its stages need not wait for it.
    """
    config = policy.config
    before = config.variable_seq_lengths
    config.variable_seq_lengths = before or needed
    try:
        yield
    finally:
        config.variable_seq_lengths = before


@dataclass(frozen=True)
class LogProbOutput:
    """Columns ``[T]`` float32 of the batch's responses; 0 at text of an environment. ``routing``:
    this rank's routes."""

    log_probs: np.ndarray
    entropy: np.ndarray | None
    routing: list[MicroBatchRoutes] | None


def compute_log_probs(
    policy: Policy,
    batch: TrainingBatch,
    training: TrainingConfig,
    *,
    temperature: float,
    with_entropy: bool = False,
    routing: ReplayOptions | None = None,
    plan: MicroBatchPlan | None = None,
) -> LogProbOutput:
    """Log-probs (and entropies) of every response token under the policy's weights, without a
    gradient.

    ``routing``: what the routers record or replay. ``plan``: of the batch, as `StepPlan.first_epoch`;
    None if every rank holds all its samples.
    """
    batches = pack_mini_batch(policy, batch, training, optional=(), routing=routing, plan=plan)
    routes = mini_batch_routes(policy, batches, routing)
    step = log_prob_forward_step(
        policy.groups,
        num_microbatches=len(batches.batches),
        temperature=temperature,
        vocab_size=policy.shape.vocab_size,
        with_entropy=with_entropy,
        routing=routes,
        chunk_bytes=training.log_prob_bytes,
    )
    policy.memory.restore_weights()
    with torch.no_grad(), policy.active_adapters():
        outputs = run_schedule(policy, step, batches, forward_only=True)
    for micro_batch in routes or ():
        micro_batch.check_uses(forward_only=True)
    log_probs = values_of_replica(
        [output[0] for output in outputs], batches.layouts, batch, policy.groups
    )
    if not with_entropy:
        return LogProbOutput(log_probs, None, routes)
    entropy = values_of_replica(
        [output[1] for output in outputs], batches.layouts, batch, policy.groups
    )
    return LogProbOutput(log_probs, entropy, routes)


@dataclass(frozen=True)
class TeacherScores:
    """Columns of the batch's responses, without a meaning at text of an environment."""

    log_probs: np.ndarray
    """[T] float32, of the response tokens."""

    top_ids: np.ndarray
    """[T, K] int32, the teacher's most likely ids, descending."""

    top_log_probs: np.ndarray
    """[T, K] float32, of these."""

    states: TeacherStates | None = None
    """For the divergence over the whole vocabulary; in the micro-batches of the pass."""


def compute_teacher_scores(
    teacher: Policy,
    batch: TrainingBatch,
    training: TrainingConfig,
    *,
    temperature: float,
    vocab_size: int,
    top_k: int,
    states_for: Policy | None = None,
    plan: MicroBatchPlan | None = None,
) -> TeacherScores:
    """How a teacher scores every response token.

    ``vocab_size``: of the policy; other ids of the teacher have no probability. ``states_for``: the
    policy whose updates read the teacher's states. ``plan``: as in ``compute_log_probs``. Afterwards
    the teacher's weights are in host memory.
    """
    batches = pack_mini_batch(teacher, batch, training, optional=(), routing=None, plan=plan)
    step = teacher_forward_step(
        teacher.groups,
        num_microbatches=len(batches.batches),
        options=LogProbOptions(temperature, vocab_size, chunk_bytes=training.log_prob_bytes),
        top_k=top_k,
        keeps_states=states_for is not None,
    )
    teacher.memory.restore_weights()
    with torch.no_grad():
        outputs = run_schedule(teacher, step, batches, forward_only=True)
    states = None
    if states_for is not None:
        weight = None
        if teacher.groups.is_last_stage:
            rows = len(output_weight(states_for.chunks[-1]))
            weight = rows_of_policy(output_weight(teacher.chunks[-1]), rows, teacher.groups.tp)
        states = TeacherStates([rows for _, rows in outputs], weight)
    teacher.memory.release()
    scores = values_of_replica(
        [values for values, _ in outputs],
        batches.layouts,
        batch,
        teacher.groups,
        shape=(1 + 2 * top_k,),
    )
    return TeacherScores(
        log_probs=scores[:, 0].copy(),
        top_log_probs=scores[:, 1 : 1 + top_k].copy(),
        top_ids=scores[:, 1 + top_k :].astype(np.int32),
        states=states,
    )


def pack_mini_batch(
    policy: Policy,
    batch: TrainingBatch,
    training: TrainingConfig,
    *,
    optional: Sequence[str],
    routing: ReplayOptions | None,
    plan: MicroBatchPlan | None = None,
) -> MicroBatches:
    """This rank's packed micro-batches of a mini-batch, with routes where the options need them.

    optional: which of ``OPTIONAL_FIELDS``, ``TEACHER_FIELDS`` and ``CENTERING_FIELDS`` the batches
    carry. plan: as in ``compute_log_probs``.
    """
    return planned_micro_batches(
        batch,
        plan or plan_of(batch, training, policy.config, policy.groups),
        policy.groups,
        optional=optional,
        routes=routing.shape if routing is not None and routing.needs_routes else None,
    )


def mini_batch_routes(
    policy: Policy, batches: MicroBatches, options: ReplayOptions | None
) -> list[MicroBatchRoutes] | None:
    """The routes of this rank's micro-batches, new for each pass; None without options."""
    return routes_of_mini_batch(
        options, batches.layouts, policy.groups, sequence_parallel=policy.config.sequence_parallel
    )


def train_mini_batch(
    policy: Policy,
    batch: TrainingBatch,
    objective: Objective,
    training: TrainingConfig,
    *,
    temperature: float,
    routing: ReplayOptions | None = None,
    plan: MicroBatchPlan | None = None,
    distillation: Distillation | None = None,
    teacher: TeacherStates | None = None,
    score_centering: ScoreCentering | None = None,
) -> StepResult:
    """One optimizer step on a global mini-batch: forward, backward, gradient reduction, clipping,
    optimizer, schedule.

    ``plan``: as in ``compute_log_probs``. ``distillation``, ``teacher``, ``score_centering``: as in
    ``policy_forward_step``.
    """
    optional = OPTIONAL_FIELDS + TEACHER_FIELDS + CENTERING_FIELDS
    carried = [name for name in POLICY_LOSS if name in optional and name in batch.responses]
    if not objective.reads_rollout_log_probs and "rollout_log_probs" in carried:
        carried.remove("rollout_log_probs")
    batches = pack_mini_batch(policy, batch, training, optional=carried, routing=routing, plan=plan)
    routes = mini_batch_routes(policy, batches, routing)
    outputs = forward_backward(
        policy,
        objective,
        batches,
        temperature=temperature,
        routing=routes,
        chunk_bytes=training.log_prob_bytes,
        distillation=distillation,
        teacher=teacher,
        score_centering=score_centering,
    )
    metrics = optimizer_step(policy)
    shares = combined_shares([output["metrics"] for output in outputs])
    log_probs = values_of_replica(
        [output["log_probs"] for output in outputs], batches.layouts, batch, policy.groups
    )
    return StepResult(metrics, shares, log_probs, batches, routes)


def optimizer_step(policy: Policy) -> dict[str, float]:
    """One step of the optimizer and the learning rate's schedule: the gradient norm, and the
    rate that was used.
    """
    assert policy.optimizer is not None and policy.scheduler is not None, "a trained policy"
    with _timed(policy, "optimizer"):
        _, grad_norm, _ = policy.optimizer.step()
    metrics = {"grad_norm": float(grad_norm), "lr": float(policy.optimizer.param_groups[0]["lr"])}
    policy.scheduler.step(1)
    return metrics


@contextmanager
def _timed(policy: Policy, name: str) -> Iterator[None]:
    """Time a block with the timers of the model's config, if it has any."""
    clock = policy.config.timers
    if clock is None:
        yield
        return
    clock(name).start()
    try:
        yield
    finally:
        clock(name).stop()


def forward_backward(
    policy: Policy,
    objective: Objective,
    batches: MicroBatches,
    *,
    temperature: float,
    routing: Sequence[MicroBatchRoutes] | None = None,
    chunk_bytes: int | None = None,
    distillation: Distillation | None = None,
    teacher: TeacherStates | None = None,
    score_centering: ScoreCentering | None = None,
) -> list[PolicyLossOutput]:
    """Zero the gradients, run the schedule and reduce the gradients; returns the last stage's
    output per micro-batch. ``chunk_bytes``, ``distillation``, ``teacher``, ``score_centering``: as in
    ``policy_forward_step``.

    Raises ``RoutingError`` where a router did not use its routes exactly once.
    """
    zero_gradients(policy)
    step = policy_forward_step(
        objective,
        num_microbatches=len(batches.batches),
        temperature=temperature,
        vocab_size=policy.shape.vocab_size,
        groups=policy.groups,
        routing=routing,
        chunk_bytes=chunk_bytes,
        distillation=distillation,
        teacher=teacher,
        score_centering=score_centering,
    )
    outputs = run_schedule(policy, step, batches, forward_only=False)
    for micro_batch in routing or ():
        micro_batch.check_uses(forward_only=False)
    return outputs


def zero_gradients(policy: Policy) -> None:
    """Before a forward-backward pass; takes back what was offloaded."""
    assert policy.optimizer is not None, "a trained policy"
    policy.memory.restore()
    for chunk in policy.chunks:
        chunk.zero_grad_buffer()
    policy.optimizer.zero_grad()


def combined_shares(per_micro_batch: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The metrics of all micro-batches of this rank, shares still."""
    total: dict[str, Tensor] = {}
    for metrics in per_micro_batch:
        for name, value in metrics.items():
            if name in total:
                value = reduction_of(name).combine(total[name], value)
            total[name] = value
    return total


def finished_metrics(results: Sequence[StepResult], policy: Policy) -> list[dict[str, float]]:
    """All metrics of each optimizer step, the same on every rank. A collective of the world, once
    for all steps."""
    of_loss = summed_metrics([result.shares for result in results], policy)
    return [
        result.metrics | finish_metrics(summed)
        for result, summed in zip(results, of_loss, strict=True)
    ]


def summed_metrics(
    records: Sequence[Mapping[str, Tensor]], policy: Policy
) -> list[dict[str, float]]:
    """Each record of shares, over all data-parallel ranks and broadcast to every pipeline stage."""
    groups = policy.groups
    summed: list[list[dict[str, float]] | None] = [None]
    if groups.is_last_stage:
        reduced = reduce_records(records, groups.dp_cp)
        scalars = [value for record in reduced for value in record.values()]
        # One transfer.
        values = iter(torch.stack(scalars).cpu().tolist() if scalars else [])
        summed = [[{name: next(values) for name in record} for record in reduced]]
    if groups.pp.size() > 1:
        dist.broadcast_object_list(summed, src=groups.last_stage_rank, group=groups.pp)
    [metrics_of_all] = summed
    assert metrics_of_all is not None
    return metrics_of_all
