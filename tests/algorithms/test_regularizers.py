"""The KL and entropy terms by hand: weighted as the objective, reported as token means."""

import math

import pytest
import torch

from megatron_gspo.algorithms import Segments, policy_loss, preset
from megatron_gspo.algorithms.aggregation import TokenWeights
from megatron_gspo.algorithms.regularizers import (
    entropy_regularizer,
    kl_regularizer,
    log_ratio_regularizer,
    regularizers,
)

LOG_PROBS, REFERENCE = torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -3.0])  # d = 0, 1
# token mean over 4 tokens, objective weights of their own
WEIGHTS = TokenWeights(token=torch.tensor(0.25), sequence=torch.zeros(1), objective=torch.tensor([0.5, 0.125]))
K3 = math.exp(-1) - 1 + 1
LOG_RATIO = torch.tensor([0.25, -0.5])
KL = {"k1": 1.0, "k2": 0.5, "k3": K3}


@pytest.mark.parametrize("kind", KL)
def test_kl_by_hand(kind):
    log_probs = LOG_PROBS.clone().requires_grad_()
    objective = preset("gspo", kl_loss_coef=0.1, kl_loss_type=kind)
    term, metrics = kl_regularizer(objective, log_probs, REFERENCE, WEIGHTS, LOG_RATIO)
    assert term.item() == pytest.approx(0.1 * 0.125 * KL[kind])
    assert metrics["kl/ref"].item() == pytest.approx(0.25 * K3)  # k3 for any estimator of the term
    assert metrics["loss/kl"].item() == term.item()
    assert not any(value.requires_grad for value in metrics.values())
    term.backward()
    slope = {"k1": (1.0, 1.0), "k2": (0.0, 1.0), "k3": (0.0, 1 - math.exp(-1))}[kind]
    expected = [0.1 * weight * d for weight, d in zip((0.5, 0.125), slope, strict=True)]
    assert log_probs.grad.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("kind", KL)
def test_the_limit_of_the_log_ratio_holds_in_the_term_and_in_the_metric(kind):
    objective = preset("gspo", kl_loss_coef=1.0, kl_loss_type=kind, max_log_ratio=0.5)
    term, metrics = kl_regularizer(objective, LOG_PROBS, REFERENCE, WEIGHTS, LOG_RATIO)
    k3 = math.exp(-0.5) - 0.5
    assert metrics["kl/ref"].item() == pytest.approx(0.25 * k3)
    assert term.item() == pytest.approx(0.125 * {"k1": 1.0, "k2": 0.125, "k3": k3}[kind])


def test_unbiased_kl_by_hand():
    """0.1 * 0.125 * exp(-0.5) * k3 of the second token; the ratio has a gradient too."""
    log_probs, log_ratio = LOG_PROBS.clone().requires_grad_(), LOG_RATIO.clone().requires_grad_()
    objective = preset("grpo", kl_loss_coef=0.1, unbiased_kl=True)
    term, metrics = kl_regularizer(objective, log_probs, REFERENCE, WEIGHTS, log_ratio)
    assert term.item() == pytest.approx(0.1 * 0.125 * math.exp(-0.5) * K3)
    assert metrics["kl/ref"].item() == pytest.approx(0.25 * K3)  # without the ratio
    term.backward()
    assert log_probs.grad[1].item() == pytest.approx(0.1 * 0.125 * math.exp(-0.5) * (1 - math.exp(-1)))
    assert log_ratio.grad[1].item() == pytest.approx(term.item()) and log_ratio.grad[0] == 0
    limited = preset("grpo", kl_loss_coef=0.1, unbiased_kl=True, max_log_ratio=0.4)
    term, _ = kl_regularizer(limited, LOG_PROBS, REFERENCE, WEIGHTS, LOG_RATIO)
    assert term.item() == pytest.approx(0.1 * 0.125 * math.exp(-0.4) * (math.exp(-0.4) - 0.6))


def test_squared_log_ratio_by_hand():
    log_ratio = LOG_RATIO.clone().requires_grad_()
    term, metrics = log_ratio_regularizer(preset("grpo", log_ratio_coef=0.2), log_ratio, WEIGHTS)
    assert term.item() == pytest.approx(0.2 * (0.5 * 0.0625 + 0.125 * 0.25))
    assert metrics == {"loss/log_ratio": term.detach()} and not metrics["loss/log_ratio"].requires_grad
    term.backward()
    assert log_ratio.grad.tolist() == pytest.approx([0.2 * 0.5 * 0.5, 0.2 * 0.125 * -1.0])
    limited, _ = log_ratio_regularizer(preset("grpo", log_ratio_coef=0.2, max_log_ratio=0.3), LOG_RATIO, WEIGHTS)
    assert limited.item() == pytest.approx(0.2 * (0.5 * 0.0625 + 0.125 * 0.09))


def test_without_a_coefficient_there_is_the_metric_alone():
    log_probs = LOG_PROBS.clone().requires_grad_()
    term, metrics = kl_regularizer(preset("gspo"), log_probs, REFERENCE, WEIGHTS, LOG_RATIO)
    assert term is None and set(metrics) == {"kl/ref"} and not metrics["kl/ref"].requires_grad
    term, metrics = entropy_regularizer(preset("gspo"), log_probs, WEIGHTS)
    assert term is None and set(metrics) == {"entropy"} and not metrics["entropy"].requires_grad


def test_entropy_by_hand():
    """A bonus: the loss falls as the entropy rises."""
    entropy = torch.tensor([2.0, 4.0], requires_grad=True)
    term, metrics = entropy_regularizer(preset("gspo", entropy_coef=0.1), entropy, WEIGHTS)
    assert term.item() == pytest.approx(-0.1 * (0.5 * 2 + 0.125 * 4))
    assert metrics["entropy"].item() == 1.5 and metrics["loss/entropy"].item() == term.item()
    assert not any(value.requires_grad for value in metrics.values())
    term.backward()
    assert entropy.grad.tolist() == pytest.approx([-0.05, -0.0125])


def test_each_regularizer_needs_its_input():
    segments = Segments(torch.tensor([True, True]), torch.zeros(2, dtype=torch.long), 1)
    objective = preset("gspo", kl_loss_coef=0.1, entropy_coef=0.1)

    def found(ref_log_probs, entropy):
        return regularizers(objective, LOG_PROBS, LOG_RATIO, ref_log_probs, entropy, segments, WEIGHTS)

    assert found(None, None) == []
    ((term, metrics),) = found(REFERENCE, None)
    assert (term, metrics) == kl_regularizer(objective, LOG_PROBS, REFERENCE, WEIGHTS, LOG_RATIO)
    ((term, metrics),) = found(None, REFERENCE)
    assert (term, metrics) == entropy_regularizer(objective, REFERENCE, WEIGHTS)
    assert [set(metrics) for _, metrics in found(REFERENCE, REFERENCE)] == [{"kl/ref", "loss/kl"},
                                                                           {"entropy", "loss/entropy"}]


def test_untrained_positions_are_not_read_and_have_no_gradient():
    segments = Segments(torch.tensor([True, False]), torch.zeros(2, dtype=torch.long), 1)
    nan = float("nan")
    log_probs = torch.tensor([-1.0, nan], requires_grad=True)
    reference = torch.tensor([-2.0, nan], dtype=torch.float64, requires_grad=True)
    entropy = torch.tensor([2.0, nan], requires_grad=True)
    objective = preset("gspo", kl_loss_coef=0.1, entropy_coef=0.1)
    terms = [term for term, _ in regularizers(objective, log_probs, LOG_RATIO, reference, entropy, segments, WEIGHTS)]
    assert {term.dtype for term in terms} == {torch.float32}
    sum(terms).backward()
    assert terms[0].item() == pytest.approx(0.1 * 0.5 * K3) and terms[1].item() == pytest.approx(-0.1 * 0.5 * 2)
    assert log_probs.grad[1] == entropy.grad[1] == 0 and reference.grad is None


def test_the_squared_log_ratio_is_clamped_on_both_sides():
    """Log-ratios of 2 and -2 count as 0.5 and -0.5."""
    for sign in (1, -1):
        given = dict(old_log_probs=torch.full((1,), -3.0), advantages=torch.zeros(1), loss_mask=torch.ones(1),
                     segment_ids=torch.zeros(1, dtype=torch.long), num_sequences=1, num_tokens=1)  # fmt: skip
        objective = preset("dapo", log_ratio_coef=0.1, max_log_ratio=0.5)
        loss, _ = policy_loss(objective, log_probs=torch.full((1,), -3.0 + 2.0 * sign), **given)
        assert float(loss) == pytest.approx(0.1 * 0.25)
