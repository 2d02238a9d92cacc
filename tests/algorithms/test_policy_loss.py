"""The vectorised loss against loops over sequences in double precision, value and gradient."""

import pytest
import torch

from megatron_gspo.algorithms import PRESETS, Objective, finish_metrics, preset

from .reference import (
    call_policy_loss,
    complete_preset,
    drift_of,
    has_token_advantages,
    naive_loss,
    naive_metrics,
    random_batch,
)

# (objective, drift that clips some and not all)
CASES = {
    **{name: (complete_preset(name), drift_of(name)) for name in PRESETS},
    "sft_sequence_mean": (preset("sft", loss_agg_mode="seq-mean-token-mean"), 0.2),
    "gspo_wide": (preset("gspo", epsilon_low=0.05, epsilon_high=0.08), 0.1),
    "gspo_kl_entropy": (
        preset("gspo", kl_loss_coef=0.1, kl_loss_type="k3", entropy_coef=0.01),
        5e-4,
    ),
    "gspo_dual": (preset("gspo", epsilon_low=0.05, epsilon_high=0.08, dual_clip=1.1), 0.2),
    "grpo_k1": (preset("grpo", kl_loss_coef=0.1, kl_loss_type="k1"), 0.2),
    "grpo_k2": (preset("grpo", kl_loss_coef=0.1, kl_loss_type="k2"), 0.2),
    "dapo_entropy_k3": (preset("dapo", kl_loss_coef=0.1, entropy_coef=0.05), 0.2),
    "dr_grpo_kl": (preset("dr_grpo", kl_loss_coef=0.1, loss_scale_factor=77), 0.2),
    "grpo_dual": (preset("grpo", dual_clip=1.5), 0.5),
    "gspo_token_mean": (preset("gspo", loss_agg_mode="token-mean", allow_nonstandard=True), 5e-4),
    "cispo_bounded": (preset("cispo", max_weight=1.2, min_weight=0.8), 0.2),
    "cispo_sequence": (
        Objective(
            "own", "sequence_token", "seq-mean-token-mean", surrogate="cispo", max_weight=1.05
        ),
        0.1,
    ),
    "sapo_sequence": (
        Objective(
            "own",
            "sequence_token",
            "seq-mean-token-mean",
            surrogate="sapo",
            tau_pos=1.0,
            tau_neg=2.0,
        ),
        0.2,
    ),
    "dppo_tv_truncated": (preset("dppo_tv", max_weight=1.1), 0.3),
    "gspo_off_policy": (preset("gspo", off_policy_mask_threshold=1e-4), 5e-4),
    "grpo_off_policy": (preset("grpo", off_policy_mask_threshold=0.05), 0.2),
    "gmpo_off_policy": (preset("gmpo", off_policy_mask_threshold=0.05), 0.3),
    "grpo_log_ratio": (preset("grpo", log_ratio_coef=0.1), 0.2),
    "dapo_unbiased_kl": (preset("dapo", kl_loss_coef=0.1, unbiased_kl=True), 0.2),
    "own_ppo": (
        Objective("own_ppo", "token", "token-mean", epsilon_low=0.2, epsilon_high=0.2),
        0.2,
    ),
}


def both(objective, batch, dtype):
    arguments = batch.arguments(dtype)
    loss, metrics = call_policy_loss(
        objective, **arguments, num_sequences=batch.num_sequences, num_tokens=batch.num_tokens
    )
    loss.backward()
    log_probs = batch.log_probs.clone().requires_grad_()
    entropy = batch.entropy.clone().requires_grad_()
    expected = naive_loss(objective, batch, log_probs, entropy)
    expected.backward()
    return loss, arguments, metrics, expected, log_probs.grad, entropy.grad


def zeros_where_none(grad, like):
    return torch.zeros_like(like) if grad is None else grad


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient_in_float64(name, seed):
    objective, drift = CASES[name]
    batch = random_batch(seed, drift=drift, per_token=has_token_advantages(objective))
    loss, arguments, _, expected, grad, entropy_grad = both(objective, batch, torch.float64)
    torch.testing.assert_close(loss, expected, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(arguments["log_probs"].grad, grad, rtol=1e-10, atol=1e-14)
    got = zeros_where_none(arguments["entropy"].grad, batch.entropy)
    torch.testing.assert_close(
        got, zeros_where_none(entropy_grad, batch.entropy), rtol=1e-10, atol=1e-14
    )
    assert grad.abs().max() > 0 and (grad[batch.loss_mask > 0] == 0).float().mean() < 1


@pytest.mark.parametrize("name", CASES)
def test_float32_stays_within_its_rounding(name):
    objective, drift = CASES[name]
    batch = random_batch(2, drift=drift)
    # the inputs rounded to float32, so that only the arithmetic is compared
    batch = type(batch)(
        **{
            k: v.float().double() if torch.is_tensor(v) and v.is_floating_point() else v
            for k, v in vars(batch).items()
        }
    )
    loss, arguments, _, expected, grad, _ = both(objective, batch, torch.float32)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(arguments["log_probs"].grad.double(), grad, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize("name", [n for n, (o, _) in CASES.items() if o.has_ratio])
def test_metrics_against_counting(name, seed):
    objective, drift = CASES[name]
    batch = random_batch(seed, drift=drift, per_token=has_token_advantages(objective))
    _, _, metrics, *_ = both(objective, batch, torch.float64)
    assert not any(value.requires_grad for value in metrics.values())
    got = finish_metrics(metrics)
    expected = naive_metrics(objective, batch)
    assert {k: got[k] for k in expected} == pytest.approx(expected, rel=1e-6, abs=1e-9)
    if not objective.sequence_level and objective.surrogate != "sapo":
        assert 0 < got["clip_fraction/tokens"] < 1
    rest = set(got) - set(expected)
    assert rest <= {
        "loss/policy",
        "loss/kl",
        "loss/entropy",
        "loss/log_ratio",
        "clip_fraction/dual",
    }


def test_num_tokens_and_num_segments_default_to_this_call():
    """Where the loss doesn't divide by the tokens, only metrics read num_tokens."""
    batch = random_batch(0, drift=0.2)
    arguments = {**batch.arguments(), "num_sequences": batch.num_sequences}
    for name in ("gspo", "grpo", "dr_grpo"):
        objective = complete_preset(name)
        given = call_policy_loss(objective, **arguments, num_tokens=batch.num_tokens)
        assert call_policy_loss(objective, **{**arguments, "num_segments": None}) == given
        doubled, metrics = call_policy_loss(objective, **arguments, num_tokens=2 * batch.num_tokens)
        assert doubled == given[0] and metrics["kl/old_policy"] == given[1]["kl/old_policy"] / 2


def micro_batches(batch):
    """Arguments of one call per half of the sequences, each with the values of its micro-batch."""
    for half in (batch.segment_ids < 4, batch.segment_ids >= 4):
        micro_batch = batch.take(half.nonzero().flatten())
        yield micro_batch, {**micro_batch.arguments(), "num_sequences": batch.num_sequences}


@pytest.mark.parametrize(
    "objective", [preset("dapo"), preset("sft"), CASES["gspo_token_mean"][0]], ids=str
)
def test_a_token_mean_is_never_normalised_by_one_micro_batch(objective):
    """Without the global count two micro-batches would each divide by their own tokens:
    refused, not computed.
    """
    batch = random_batch(0, drift=0.2)
    for micro_batch, arguments in micro_batches(batch):
        with pytest.raises(ValueError, match="num_tokens = None with loss_agg_mode = 'token-mean'"):
            call_policy_loss(objective, **arguments)
        assert 0 < micro_batch.num_tokens < batch.num_tokens
    whole, _ = call_policy_loss(
        objective,
        **batch.arguments(),
        num_sequences=batch.num_sequences,
        num_tokens=batch.num_tokens,
    )
    parts = [
        call_policy_loss(objective, **a, num_tokens=batch.num_tokens)[0]
        for _, a in micro_batches(batch)
    ]
    if not objective.sequence_level:
        torch.testing.assert_close(sum(parts), whole, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", PRESETS)
def test_log_probs_decide_the_dtype(name):
    """Advantages may be integers or float64, the other log-probs float64: loss and metrics stay
    float32.
    """
    batch = random_batch(0, drift=0.01)
    arguments = batch.arguments()
    arguments["log_probs"] = batch.log_probs.float().requires_grad_()
    masked = {} if name == "sft" else {"off_policy_mask_threshold": 0.1}
    objective = complete_preset(name, kl_loss_coef=0.1, entropy_coef=0.1, **masked)
    for dtype in (torch.long, torch.float64):
        arguments["advantages"] = torch.ones(len(batch.advantages), dtype=dtype)
        loss, metrics = call_policy_loss(
            objective, **arguments, num_sequences=batch.num_sequences, num_tokens=batch.num_tokens
        )
        assert {x.dtype for x in (loss, *metrics.values())} == {torch.float32}
