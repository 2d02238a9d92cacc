"""On-policy distillation: a teacher scores the policy's samples, and advantages take its scores."""

from __future__ import annotations

import numpy as np
import torch

from megatron_gspo.algorithms import token_advantages
from megatron_gspo.config import DistillationConfig
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.loop.step_plan import StepPlan
from megatron_gspo.loop.teachers import Teacher
from megatron_gspo.loop.timers import Timers


def with_teacher_scores(
    batch: TrainingBatch, teacher: Teacher, plan: StepPlan, timers: Timers
) -> TrainingBatch:
    """The batch with the columns of a teacher."""
    with timers("teacher"):
        scores = teacher.score(batch, plan)
    batch = batch.with_column("teacher_log_probs", scores.log_probs)
    if scores.top_ids.shape[1]:
        batch = batch.with_column("teacher_top_ids", scores.top_ids)
        batch = batch.with_column("teacher_top_log_probs", scores.top_log_probs)
    return batch


def with_teacher_advantages(
    batch: TrainingBatch, distillation: DistillationConfig
) -> tuple[TrainingBatch, dict[str, float]]:
    """A batch with old log-probs, teacher's scores and the rewards' advantages, with the sum of both
    advantages; ``distillation/*``. A collective of the batch's group.

    A sampled token that is among the teacher's most likely ids has none of the teacher's: its term
    is in the loss.
    """
    responses = batch.responses
    old_log_probs = responses["old_log_probs"]
    teacher_log_probs = responses["teacher_log_probs"]
    of_teacher = token_advantages(
        distillation, torch.from_numpy(old_log_probs), torch.from_numpy(teacher_log_probs)
    ).numpy()
    trained = responses["loss_mask"]
    log_ratios = np.sum((old_log_probs - teacher_log_probs)[trained], dtype=np.float64)
    mass = 0.0
    if distillation.top_k:
        sampled = batch.response_tokens
        is_summed = (responses["teacher_top_ids"] == sampled[:, None]).any(axis=1)
        of_teacher = np.where(is_summed, 0, of_teacher)
        mass = float(np.exp(responses["teacher_top_log_probs"][trained], dtype=np.float64).sum())
    advantages = distillation.reward_coef * responses["advantages"] + of_teacher
    batch = batch.with_column("advantages", advantages.astype(np.float32))
    total, total_mass, count = batch.sum(float(log_ratios), mass, int(trained.sum()))
    metrics = {"distillation/kl": total / max(count, 1)}
    if distillation.top_k:
        metrics["distillation/top_k_mass"] = total_mass / max(count, 1)
    return batch, metrics
