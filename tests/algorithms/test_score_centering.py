"""Score centering, against loops in double precision and by enumeration of a small vocabulary."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron_gspo.algorithms import Objective, ScoreCentering, centering
from tests.algorithms.reference import call_policy_loss, centering_weight, complete_preset

VOCABULARY = 7
BOUNDS = (0.7, 1.5)
WEIGHINGS = {
    "none": ScoreCentering(),
    "truncated": ScoreCentering(bounds=BOUNDS),
    "masked": ScoreCentering(kept=BOUNDS),
    "both": ScoreCentering(bounds=(0.0, 1.2), kept=BOUNDS),
}


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def test_by_hand():
    """p = 1/2 and 1/4, q = 1/4 and 5/8: the policy has 1/4 elsewhere, the engine 1/8, so rho is
    1/2."""
    log_probs = torch.tensor([[0.5, 0.25]]).log()
    q = torch.tensor([[0.25, 0.625]]).log()
    plain = (0.25 - 0.5 * 0.5) * math.log(0.5) + (0.625 - 0.5 * 0.25) * math.log(0.25)
    assert centering(ScoreCentering(), log_probs, q).item() == pytest.approx(plain)
    # Weights 2 and 0.4 become 1.5 and 0.7; elsewhere 1 / rho = 2 becomes 1.5.
    alpha = 1.5 * 0.5
    truncated = (1.5 * 0.25 - alpha * 0.5) * math.log(0.5)
    truncated += (0.7 * 0.625 - alpha * 0.25) * math.log(0.25)
    value = centering(ScoreCentering(bounds=BOUNDS), log_probs, q)
    assert value.item() == pytest.approx(truncated)
    # None of these ratios is between 0.7 and 1.5.
    assert centering(ScoreCentering(kept=BOUNDS), log_probs, q).item() == 0


@pytest.mark.parametrize("name", WEIGHINGS)
def test_value_and_gradient_against_a_loop(name):
    weighing = WEIGHINGS[name]
    log_probs = draw(6, VOCABULARY, seed=1).log_softmax(1)[:, :4].requires_grad_()
    rollout = draw(6, VOCABULARY, seed=2).log_softmax(1)[:, :4]
    of_tokens = draw(6, seed=3)
    value = centering(weighing, log_probs, rollout)
    (value * of_tokens).sum().backward()
    for token in range(6):
        p = log_probs.detach()[token].exp().tolist()
        q = rollout[token].exp().tolist()
        rho = (1 - sum(q)) / (1 - sum(p))
        alpha = rho * centering_weight(weighing, 1 / rho)
        total = 0.0
        for k in range(4):
            coefficient = q[k] * centering_weight(weighing, p[k] / q[k]) - alpha * p[k]
            total += coefficient * math.log(p[k])
            expected = coefficient * float(of_tokens[token])
            assert float(log_probs.grad[token, k]) == pytest.approx(expected, abs=1e-12)
        assert float(value.detach()[token]) == pytest.approx(total, abs=1e-12)


def gradient_over_draws(
    objective: Objective,
    weighing: ScoreCentering | None,
    logits: Tensor,
    rollout: Tensor,
    ids: Tensor,
    *,
    weighs_advantages: bool,
) -> Tensor:
    """The expected gradient of the loss over all tokens that the engine may draw, of responses of
    one token with advantages of their own."""
    logits = logits.clone().requires_grad_()
    log_probs = logits.log_softmax(0)
    advantages = draw(VOCABULARY, seed=9) + 0.5
    of_rollout = objective.needs_rollout_log_probs
    against_rollout = objective.surrogate == "cispo"
    expected = torch.zeros((), dtype=torch.float64)
    for token in range(VOCABULARY):
        sampled = log_probs[token : token + 1]
        q = rollout[token : token + 1]
        advantage = advantages[token : token + 1]
        scale = 1.0
        if weighing is not None and weighs_advantages:
            scale = centering_weight(weighing, float((sampled - q).detach().exp()))
        of_position = None
        if weighing is not None:
            of_position = centering(weighing, log_probs[ids][None], rollout[ids][None])
        loss, _ = call_policy_loss(
            objective,
            log_probs=sampled,
            old_log_probs=q if against_rollout else sampled.detach(),
            rollout_log_probs=q if of_rollout else None,
            advantages=scale * advantage,
            loss_mask=torch.ones(1),
            segment_ids=torch.zeros(1, dtype=torch.int64),
            num_segments=1,
            num_sequences=1,
            num_tokens=1,
            centering=of_position,
            centering_advantages=advantage,
        )
        expected = expected + q.exp().squeeze() * loss
    expected.backward()
    assert logits.grad is not None
    return logits.grad


def covariance(weighing: ScoreCentering, logits: Tensor, rollout: Tensor) -> Tensor:
    """- Cov_q(A, w grad log p), the gradient of a loss."""
    p = logits.softmax(0)
    q = rollout.exp()
    advantages = draw(VOCABULARY, seed=9) + 0.5
    mean_advantage = (q * advantages).sum()
    total = torch.zeros(VOCABULARY, dtype=torch.float64)
    for token in range(VOCABULARY):
        score = -p.clone()
        score[token] += 1
        share = float(q[token]) * centering_weight(weighing, float(p[token] / q[token]))
        total -= share * float(advantages[token] - mean_advantage) * score
    return total


def policy_and_engine(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of the policy, log-probs of the engine, and some ids outside which the engine's
    probabilities are the policy's, scaled."""
    logits = draw(VOCABULARY, seed=4)
    p = logits.softmax(0)
    q = draw(VOCABULARY, seed=5).softmax(0)
    ids = q.topk(count).indices
    others = torch.ones(VOCABULARY, dtype=torch.bool)
    others[ids] = False
    q[others] = p[others] / p[others].sum() * (1 - q[ids].sum())
    return logits, q.log(), ids


@pytest.mark.parametrize("count", [3, VOCABULARY])
@pytest.mark.parametrize(
    ("objective", "weighing", "weighs_advantages"),
    [
        (complete_preset("grpo"), WEIGHINGS["none"], True),
        (complete_preset("gspo"), WEIGHINGS["none"], True),
        (complete_preset("gspo_token"), WEIGHINGS["none"], True),
        (complete_preset("sapo"), WEIGHINGS["none"], True),
        (complete_preset("grpo"), WEIGHINGS["truncated"], True),
        (complete_preset("dapo"), WEIGHINGS["masked"], True),
        (complete_preset("grpo"), WEIGHINGS["both"], True),
        (complete_preset("cispo", min_weight=0.7, max_weight=1.5), WEIGHINGS["truncated"], False),
        (complete_preset("minirl", max_weight=1.5), ScoreCentering(bounds=(0.0, 1.5)), False),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_the_expected_gradient_is_the_covariance_alone(
    objective, weighing, weighs_advantages, count
):
    """Exact where all ids are known, and where the others have the policy's proportions."""
    arguments = policy_and_engine(count)
    centred = gradient_over_draws(
        objective, weighing, *arguments, weighs_advantages=weighs_advantages
    )
    expected = covariance(weighing, *arguments[:2])
    torch.testing.assert_close(centred, expected, rtol=1e-9, atol=1e-12)
    plain = gradient_over_draws(objective, None, *arguments, weighs_advantages=weighs_advantages)
    assert float((plain - expected).abs().max()) > 0.01


def test_nothing_is_left_of_an_engine_that_agrees_and_of_whole_weights():
    log_probs = draw(4, 9).log_softmax(1)[:, :5].requires_grad_()
    rollout = draw(4, 9, seed=3).log_softmax(1)[:, :5]
    everything = ScoreCentering(bounds=(0.0, math.inf))
    for weighing, q in ((everything, rollout), (ScoreCentering(), log_probs.detach())):
        (gradient,) = torch.autograd.grad(centering(weighing, log_probs, q).sum(), log_probs)
        assert float(gradient.abs().max()) < 1e-14


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_masses_of_one_up_to_rounding(dtype):
    """All mass in the ids, on either side or both."""
    sharp = torch.tensor([[40.0, 0.0, 0.0, 0.0]], dtype=dtype).log_softmax(1)[:, :3]
    flat = torch.zeros(1, 4, dtype=dtype).log_softmax(1)[:, :3]
    for p, q in ((sharp, flat), (flat, sharp), (sharp, sharp)):
        for weighing in WEIGHINGS.values():
            log_probs = p.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(centering(weighing, log_probs, q).sum(), log_probs)
            assert gradient.isfinite().all()


def test_a_response_with_one_ratio_weighs_its_centering_as_its_score():
    """Three responses of two tokens, of ratios 1.02, 1.2 (clipped) and 0.97; the last token is not
    trained."""
    objective = complete_preset("gspo", epsilon_low=0.05, epsilon_high=0.06)
    log_probs = draw(6, VOCABULARY, seed=6).log_softmax(1).requires_grad_()
    labels = [0, 3, 2, 5, 6, 1]
    shifts = [0.03, 0.01, 0.3, 0.06, math.log(0.97), 0.5]
    sampled = log_probs[range(6), labels]
    advantages = torch.tensor([0.7, 0.7, 1.1, 1.1, -0.4, -0.4], dtype=torch.float64)
    rollout = draw(6, VOCABULARY, seed=7).log_softmax(1)
    loss, metrics = call_policy_loss(
        objective,
        log_probs=sampled,
        old_log_probs=sampled.detach() - torch.tensor(shifts, dtype=torch.float64),
        advantages=advantages,
        loss_mask=torch.tensor([1.0, 1, 1, 1, 1, 0]),
        segment_ids=torch.tensor([0, 0, 1, 1, 2, 2]),
        num_segments=3,
        num_sequences=3,
        num_tokens=5,
        centering=centering(ScoreCentering(), log_probs, rollout),
    )
    loss.backward()
    expected = torch.zeros_like(log_probs)
    for token, (response, length) in enumerate([(0, 2), (0, 2), (1, 2), (1, 2), (2, 1)]):
        ratio = [math.exp(0.02), 0.0, 0.97][response]
        share = float(advantages[token]) * ratio / length / 3
        expected[token] = share * rollout[token].exp()
        expected[token, labels[token]] -= share
    torch.testing.assert_close(log_probs.grad, expected, rtol=1e-9, atol=1e-12)
    assert math.isfinite(metrics["loss/score_centering"])
