"""On-policy distillation: teachers score the policy's samples, and advantages take its scores."""

from __future__ import annotations

import numpy as np
import torch

from megatron_gspo.algorithms import token_advantages
from megatron_gspo.config import DistillationConfig
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.loop.step_plan import StepPlan
from megatron_gspo.loop.teachers import Teachers
from megatron_gspo.loop.timers import Timers
from megatron_gspo.mcore.teacher_states import TeacherStates


def with_teacher_scores(
    batch: TrainingBatch, teachers: Teachers, plan: StepPlan, timers: Timers
) -> tuple[TrainingBatch, TeacherStates | None]:
    """The batch with the columns of its teachers, and what the updates read of the teacher for the
    divergence over the whole vocabulary."""
    with timers("teacher"):
        scores = teachers.score(batch, plan)
    batch = batch.with_column("teacher_log_probs", scores.log_probs)
    if scores.top_ids.shape[1]:
        batch = batch.with_column("teacher_top_ids", scores.top_ids)
        batch = batch.with_column("teacher_top_log_probs", scores.top_log_probs)
    return batch, scores.states


def with_teacher_advantages(
    batch: TrainingBatch, distillation: DistillationConfig, teachers: Teachers
) -> tuple[TrainingBatch, dict[str, float]]:
    """A batch with old log-probs, teachers' scores and the rewards' advantages, with the sum of both
    advantages; ``distillation/*``. A collective of the batch's group.

    A sampled token whose term is in the loss, as one among the teacher's most likely ids, has none of
    the teacher's.
    """
    responses = batch.responses
    old_log_probs = responses["old_log_probs"]
    teacher_log_probs = responses["teacher_log_probs"]
    of_teacher = token_advantages(
        distillation, torch.from_numpy(old_log_probs), torch.from_numpy(teacher_log_probs)
    ).numpy()
    if distillation.takes_all_ids:
        of_teacher = np.zeros_like(of_teacher)
    elif distillation.num_ids:
        sampled = batch.response_tokens
        is_summed = (responses["teacher_top_ids"] == sampled[:, None]).any(axis=1)
        of_teacher = np.where(is_summed, 0, of_teacher)
    advantages = distillation.reward_coef * responses["advantages"] + of_teacher
    batch = batch.with_column("advantages", advantages.astype(np.float32))
    return batch, _metrics(batch, distillation, teachers)


def _metrics(
    batch: TrainingBatch, distillation: DistillationConfig, teachers: Teachers
) -> dict[str, float]:
    """Means over trained tokens, and over those of each of several teachers."""
    responses = batch.responses
    trained = responses["loss_mask"]
    ones = np.ones(len(trained))
    log_ratios = responses["old_log_probs"] - responses["teacher_log_probs"]
    mass = ones
    if distillation.num_ids:
        mass = np.exp(responses["teacher_top_log_probs"], dtype=np.float64).sum(axis=1)
    numbers = responses.repeat(teachers.numbers(batch)[responses.positions])
    suffixes = ["", *(f"/{name}" for name in teachers.names)]
    chosen = [trained, *(trained & (numbers == i) for i in range(len(teachers.names)))]
    sums = batch.sum(
        *(
            float(np.sum(column[rows], dtype=np.float64))
            for rows in chosen
            for column in (log_ratios, mass, ones)
        )
    )
    metrics = {}
    for suffix, (total, total_mass, count) in zip(
        suffixes, np.reshape(sums, (-1, 3)).tolist(), strict=True
    ):
        if suffix and not count:
            continue
        metrics[f"distillation/kl{suffix}"] = total / max(count, 1)
        if distillation.num_ids:
            metrics[f"distillation/top_k_mass{suffix}"] = total_mass / max(count, 1)
    return metrics
