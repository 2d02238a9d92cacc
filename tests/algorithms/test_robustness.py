"""Broken inputs: refused, or without an effect on other sequences."""

import math

import pytest
import torch

from megatron_gspo.algorithms import PRESETS, finish_metrics, preset

from .reference import call_policy_loss, complete_preset, random_batch


def inputs(**changes):
    ones = torch.full((6,), -1.0)
    return {
        "log_probs": ones.clone().requires_grad_(),
        "old_log_probs": ones,
        "advantages": torch.ones(6),
        "loss_mask": torch.ones(6),
        "segment_ids": torch.tensor([0, 0, 0, 1, 1, 1]),
        "num_sequences": 2,
        "num_tokens": 6,
        **changes,
    }


@pytest.mark.parametrize("name", PRESETS)
def test_untrained_positions_are_never_read(name):
    fields = dict(kl_loss_coef=0.1, entropy_coef=0.1)
    results = []
    for poison in (False, True):
        batch = random_batch(4, drift=0.01, poison=poison)
        arguments = batch.arguments(torch.float32)
        counts = {"num_sequences": batch.num_sequences, "num_tokens": batch.num_tokens}
        loss, metrics = call_policy_loss(complete_preset(name, **fields), **arguments, **counts)
        loss.backward()
        results.append((loss, arguments["log_probs"].grad, arguments["entropy"].grad, metrics))
    clean, poisoned = results
    assert clean[0] == poisoned[0] and clean[3] == poisoned[3]
    assert torch.equal(clean[1], poisoned[1]) and torch.equal(clean[2], poisoned[2])
    assert poisoned[1][batch.loss_mask == 0].abs().max() == 0


@pytest.mark.parametrize("broken", [-math.inf, -1e6, 1e6, math.inf])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("name", ["gspo", "gspo_token", "grpo", "dapo"])
def test_a_broken_sequence_is_clamped_counted_and_without_gradient(name, advantage, broken):
    """One token of the first response has a log-ratio of +-1e6 or infinity."""
    log_probs = torch.full((6,), -1.0)
    log_probs[1] = broken
    log_probs.requires_grad_()
    loss, metrics = call_policy_loss(
        complete_preset(name), **inputs(log_probs=log_probs, advantages=torch.full((6,), advantage))
    )
    loss.backward()
    assert loss.isfinite() and log_probs.grad.isfinite().all()
    final = finish_metrics(metrics)
    assert all(map(math.isfinite, final.values()))
    sequence = name.startswith("gspo")
    assert final["log_ratio_clamped"] == pytest.approx(1 / 2 if sequence else 1 / 6)
    assert log_probs.grad[1] == 0 and (not sequence or log_probs.grad[:3].abs().max() == 0)
    torch.testing.assert_close(log_probs.grad[3:], torch.full((3,), -advantage / 6))


def test_ratio_next_to_the_clamp_keeps_its_gradient():
    log_probs = torch.full((6,), -1.0)
    log_probs[:3] += 4.9
    log_probs.requires_grad_()
    objective = preset("gspo", max_log_ratio=5.0)
    loss, metrics = call_policy_loss(
        objective, **inputs(log_probs=log_probs, advantages=-torch.ones(6))
    )
    loss.backward()
    assert metrics["log_ratio_clamped"] == 0
    torch.testing.assert_close(
        log_probs.grad[:3], torch.full((3,), math.exp(4.9) / 6), rtol=1e-5, atol=0
    )


def test_nan_of_a_trained_token_shows():
    for name in ("gspo", "grpo"):
        log_probs = torch.full((6,), -1.0)
        log_probs[1] = math.nan
        loss, _ = call_policy_loss(
            complete_preset(name), **inputs(log_probs=log_probs.requires_grad_())
        )
        assert loss.isnan()


@pytest.mark.parametrize("name", PRESETS)
def test_nothing_trained_gives_zero_and_a_graph(name):
    arguments = inputs(loss_mask=torch.zeros(6))
    loss, metrics = call_policy_loss(complete_preset(name), **arguments)
    loss.backward()
    assert loss == 0 and torch.equal(arguments["log_probs"].grad, torch.zeros(6))
    assert not any(v.isnan() for v in metrics.values())
    assert "ratio_max" not in finish_metrics(metrics)


def test_no_positions_at_all():
    empty = torch.zeros(0)
    changes = {k: empty for k in ("old_log_probs", "advantages", "loss_mask")}
    changes |= {"log_probs": empty.clone().requires_grad_(), "segment_ids": empty.long()}
    loss, _ = call_policy_loss(preset("gspo"), **inputs(**changes))
    loss.backward()
    assert loss == 0


def test_only_log_probs_and_entropy_receive_gradient():
    batch = random_batch(4, drift=0.01, poison=False)
    arguments = batch.arguments()
    for key in ("old_log_probs", "ref_log_probs", "advantages"):
        arguments[key].requires_grad_()
    loss, _ = call_policy_loss(
        preset("gspo", kl_loss_coef=0.1, entropy_coef=0.1),
        **arguments,
        num_sequences=batch.num_sequences,
    )
    loss.backward()
    assert arguments["log_probs"].grad is not None and arguments["entropy"].grad is not None
    assert all(
        arguments[key].grad is None for key in ("old_log_probs", "ref_log_probs", "advantages")
    )


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_kl_figure_is_clamped_whatever_the_estimator(estimator):
    """One token ten nats below its reference, limit 5: k3 = e^5 - 1 - 5, a sixth of it in the
    mean.
    """
    objective = preset("gspo", kl_loss_type=estimator, max_log_ratio=5.0)
    reference = torch.tensor([9.0, -1, -1, -1, -1, -1])
    _, metrics = call_policy_loss(objective, **inputs(ref_log_probs=reference))
    assert metrics["kl/ref"].item() == pytest.approx((math.exp(5) - 6) / 6, rel=1e-6)
