"""The divergence from a teacher, against loops in double precision and by enumeration."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron_gspo.algorithms import Distillation, divergence, token_advantages
from tests.algorithms.reference import call_policy_loss, complete_preset

WEIGHTS = (0.0, 1.0, 0.3)  # reverse, forward and mixed
VOCABULARY = 7


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def test_by_hand():
    """p = 1/2 and t = 1/8 of one id, p = 1/10 and t = 2/5 of another."""
    log_probs = torch.tensor([[0.5, 0.1]]).log()
    teacher = torch.tensor([[0.125, 0.4]]).log()
    reverse = 0.5 * math.log(4) - 0.375 + 0.1 * math.log(1 / 4) + 0.3
    forward = 0.125 * math.log(1 / 4) + 0.375 + 0.4 * math.log(4) - 0.3
    for weight, expected in (
        (0.0, reverse),
        (1.0, forward),
        (0.25, 0.75 * reverse + 0.25 * forward),
    ):
        distillation = Distillation(coef=3.0, forward_weight=weight)
        assert divergence(distillation, log_probs, teacher).item() == pytest.approx(3 * expected)
    sampled = Distillation(coef=2.0)
    assert token_advantages(sampled, log_probs[0], teacher[0]).tolist() == pytest.approx(
        [2 * math.log(1 / 4), 2 * math.log(4)]
    )
    forward = Distillation(coef=2.0, forward_weight=1.0)
    assert token_advantages(forward, log_probs[0], teacher[0]).tolist() == pytest.approx(
        [2 * (1 / 4 - 1), 2 * (4 - 1)]
    )


@pytest.mark.parametrize("weight", WEIGHTS)
def test_value_and_gradient_against_a_loop(weight):
    log_probs = draw(5, 3, seed=1).log_softmax(1).requires_grad_()
    teacher = draw(5, 3, seed=2).log_softmax(1)
    of_tokens = draw(5, seed=3)
    distillation = Distillation(coef=1.7, forward_weight=weight)
    value = divergence(distillation, log_probs, teacher)
    (value * of_tokens).sum().backward()
    for token in range(5):
        total = 0.0
        for k in range(3):
            p = math.exp(log_probs.detach()[token, k])
            t = math.exp(teacher[token, k])
            total += (1 - weight) * (p * math.log(p / t) - p + t)
            total += weight * (t * math.log(t / p) - t + p)
            slope = (1 - weight) * p * math.log(p / t) + weight * (p - t)
            expected = 1.7 * slope * float(of_tokens[token])
            assert float(log_probs.grad[token, k]) == pytest.approx(expected, abs=1e-12)
        assert float(value[token]) == pytest.approx(1.7 * total, abs=1e-12)


def kl_gradient(logits: Tensor, teacher: Tensor, weight: float) -> Tensor:
    """Of the mixed KL between the whole distributions, by autograd."""
    logits = logits.detach().clone().requires_grad_()
    p = logits.log_softmax(0)
    reverse = (p.exp() * (p - teacher)).sum()
    forward = (teacher.exp() * (teacher - p)).sum()
    ((1 - weight) * reverse + weight * forward).backward()
    assert logits.grad is not None
    return logits.grad


@pytest.mark.parametrize("top_k", [0, 1, 3, VOCABULARY])
@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("name", ["grpo", "gspo_token"])
def test_the_expected_gradient_is_that_of_the_kl(name, weight, top_k):
    """Over all tokens that may be sampled, each with its probability, of responses of one token."""
    logits = draw(VOCABULARY, seed=4).requires_grad_()
    teacher = draw(VOCABULARY, seed=5).log_softmax(0)
    distillation = Distillation(forward_weight=weight)
    ids = teacher.topk(top_k).indices
    log_probs = logits.log_softmax(0)
    expected_loss = torch.zeros((), dtype=torch.float64)
    for token in range(VOCABULARY):
        sampled = log_probs[token : token + 1]
        advantage = token_advantages(distillation, sampled, teacher[token : token + 1])
        if token in ids.tolist():
            advantage = torch.zeros(1, dtype=torch.float64)
        loss, _ = call_policy_loss(
            complete_preset(name),
            log_probs=sampled,
            old_log_probs=sampled.detach(),
            advantages=advantage,
            loss_mask=torch.ones(1),
            segment_ids=torch.zeros(1, dtype=torch.int64),
            num_segments=1,
            num_sequences=1,
            num_tokens=1,
            divergence=divergence(distillation, log_probs[ids][None], teacher[ids][None]),
        )
        expected_loss = expected_loss + sampled.detach().exp().squeeze() * loss
    expected_loss.backward()
    torch.testing.assert_close(
        logits.grad, kl_gradient(logits, teacher, weight), rtol=1e-10, atol=1e-12
    )


def test_nothing_is_left_to_learn_from_a_teacher_that_agrees():
    log_probs = draw(4, 3).log_softmax(1).requires_grad_()
    for weight in WEIGHTS:
        distillation = Distillation(forward_weight=weight)
        value = divergence(distillation, log_probs, log_probs.detach())
        (gradient,) = torch.autograd.grad(value.sum(), log_probs)
        assert not value.any() and float(gradient.abs().max()) < 1e-15
        assert not token_advantages(distillation, log_probs[:, 0], log_probs[:, 0]).any()


def test_no_gradient_to_teacher_or_advantage():
    log_probs = draw(4, 3).log_softmax(1).requires_grad_()
    teacher = draw(4, 3, seed=1).log_softmax(1).requires_grad_()
    distillation = Distillation(forward_weight=0.5)
    divergence(distillation, log_probs, teacher).sum().backward()
    assert teacher.grad is None
    assert not token_advantages(distillation, log_probs[:, 0], teacher[:, 0]).requires_grad


def test_the_term_is_aggregated_as_the_objective_is():
    """Two responses of 1 and 3 tokens: 1/2 (d_0 + (d_1 + d_2 + d_3) / 3), the last not trained."""
    arguments = {
        "log_probs": torch.zeros(5),
        "old_log_probs": torch.zeros(5),
        "advantages": torch.zeros(5),
        "loss_mask": torch.tensor([1.0, 1, 1, 1, 0]),
        "segment_ids": torch.tensor([0, 1, 1, 1, 1]),
        "num_segments": 2,
        "num_sequences": 2,
        "num_tokens": 4,
        "divergence": torch.tensor([3.0, 1.0, 2.0, 6.0, math.nan]),
    }
    loss, metrics = call_policy_loss(complete_preset("gspo_token"), **arguments)
    assert float(loss) == pytest.approx((3 + 9 / 3) / 2)
    assert float(metrics["loss/distillation"]) == pytest.approx(3.0)
    loss, _ = call_policy_loss(complete_preset("dapo"), **arguments)
    assert float(loss) == pytest.approx(12 / 4)
