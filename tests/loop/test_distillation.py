"""The advantages of a teacher beside the rewards', by hand."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_gspo.config import DistillationConfig
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.loop.distillation import with_teacher_advantages
from megatron_gspo.loop.loss_masking import mask_samples
from megatron_gspo.loop.teachers import Teachers
from tests.support.samples import make_sample


def scored_batch() -> TrainingBatch:
    """Two responses, of tokens 11, 12, 13 (the last not trained) and 21."""
    first = make_sample(
        2, 3, mask=[True, True, False], log_probs=False, tokens=np.array([1, 2, 11, 12, 13])
    )
    second = make_sample(1, 1, log_probs=False, tokens=np.array([3, 21]), reward=1.0)
    first.reward = 0.0
    for sample, old, advantage in ((first, [-1, -2, -3], 0.5), (second, [-4], -0.5)):
        sample.old_log_probs = np.array(old, dtype=np.float32)
        sample.advantages = np.full(len(old), advantage, dtype=np.float32)
    batch = TrainingBatch.of([first, second])
    return batch.with_column("teacher_log_probs", np.array([-3, -1, 0, -2], dtype=np.float32))


def test_the_sampled_token_alone():
    distillation = DistillationConfig(teacher="teacher", coef=2.0)
    batch, metrics = with_teacher_advantages(scored_batch(), distillation, Teachers({}))
    np.testing.assert_allclose(batch.responses["advantages"], [-4, 2, 6, 4])
    assert batch.responses["advantages"].dtype == np.float32
    assert metrics == {"distillation/kl": pytest.approx((2 - 1 - 2) / 3)}


def test_added_to_the_advantages_of_rewards():
    distillation = DistillationConfig(teacher="teacher", coef=2.0, reward_coef=4.0)
    batch, _ = with_teacher_advantages(scored_batch(), distillation, Teachers({}))
    np.testing.assert_allclose(batch.responses["advantages"], [2 - 4, 2 + 2, 2 + 6, -2 + 4])


def test_forward_kl():
    distillation = DistillationConfig(teacher="teacher", forward_weight=1.0)
    batch, _ = with_teacher_advantages(scored_batch(), distillation, Teachers({}))
    expected = np.expm1([-2, 1, 3, 2])
    np.testing.assert_allclose(batch.responses["advantages"], expected, rtol=1e-6)


def test_a_token_among_the_teachers_ids_has_its_term_in_the_loss():
    batch = scored_batch()
    ids = np.array([[7, 8], [12, 9], [1, 2], [20, 21]], dtype=np.int32)
    shares = np.array([[0.5, 0.25], [0.5, 0.125], [0.5, 0.5], [0.25, 0.25]])
    batch = batch.with_column("teacher_top_ids", ids)
    batch = batch.with_column("teacher_top_log_probs", np.log(shares).astype(np.float32))
    distillation = DistillationConfig(teacher="teacher", reward_coef=1.0, top_k=2)
    batch, metrics = with_teacher_advantages(batch, distillation, Teachers({}))
    np.testing.assert_allclose(batch.responses["advantages"], [-1.5, 0.5, 3.5, -0.5])
    assert metrics["distillation/top_k_mass"] == pytest.approx((0.75 + 0.625 + 0.5) / 3)


def test_metrics_of_each_teacher():
    """The first response is the second teacher's, whose third token is not trained."""
    batch = scored_batch()
    batch.table["prompt_index"] = [4, 1]
    chosen = np.array([0, 0, 0, 0, 1], dtype=np.int32)
    teachers = Teachers({"math": None, "code": None, "none": None}, chosen)
    _, metrics = with_teacher_advantages(batch, DistillationConfig(teacher="one"), teachers)
    assert metrics == {
        "distillation/kl": pytest.approx((2 - 1 - 2) / 3),
        "distillation/kl/math": pytest.approx(-2),
        "distillation/kl/code": pytest.approx((2 - 1) / 2),
    }


def test_a_response_that_the_teacher_cannot_score_is_masked():
    batch = scored_batch()
    log_probs = np.array([-3, np.nan, 0, -2], dtype=np.float32)
    masked, counts = mask_samples(
        batch.with_column("teacher_log_probs", log_probs), step=0, truncated=False
    )
    assert counts["masked/non_finite"] == 1
    assert masked.responses["loss_mask"].tolist() == [False, False, False, True]
