"""Hand-worked numbers of the objectives."""

import math

import pytest
import torch

from megatron_gspo.algorithms import PRESETS, finish_metrics, preset

from .reference import call_policy_loss, complete_preset


def one_sequence(log_ratio, advantage, name, **fields):
    """Loss, gradient to log_probs and metrics of one response of len(log_ratio) tokens."""
    log_ratio = torch.as_tensor(log_ratio, dtype=torch.float32)
    old = torch.full_like(log_ratio, -1.5)
    log_probs = (old + log_ratio).requires_grad_()
    loss, metrics = call_policy_loss(
        complete_preset(name, **fields),
        log_probs=log_probs,
        old_log_probs=old,
        advantages=torch.full_like(old, advantage),
        loss_mask=torch.ones_like(old),
        segment_ids=torch.zeros(old.shape, dtype=torch.long),
        num_sequences=1,
        num_tokens=len(old),
    )
    loss.backward()
    return loss.item(), log_probs.grad, finish_metrics(metrics)


def two_outliers():
    log_ratio = torch.zeros(512)
    log_ratio[100], log_ratio[300] = math.log(1.9), math.log(0.4)
    return log_ratio


def test_gspo_two_outliers_in_512_tokens():
    s = math.exp((math.log(1.9) + math.log(0.4)) / 512)
    assert s == pytest.approx(0.99946, abs=5e-6)

    # A = +1: below the band [0.9997, 1.0004], but only the upper bound cuts
    loss, grad, metrics = one_sequence(two_outliers(), 1.0, "gspo")
    assert loss == pytest.approx(-s, rel=1e-6)
    torch.testing.assert_close(grad, torch.full((512,), -s / 512), rtol=1e-6, atol=0)
    assert metrics["clip_fraction/sequences"] == metrics["clip_fraction/tokens"] == 0
    assert metrics["ratio_max"] == pytest.approx(s, rel=1e-6)

    # A = -1: clipped, all 512 tokens with it
    loss, grad, metrics = one_sequence(two_outliers(), -1.0, "gspo")
    assert loss == pytest.approx(1 - 3e-4, rel=1e-6)
    assert grad.abs().max() == 0
    assert metrics["clip_fraction/sequences"] == metrics["clip_fraction/tokens"] == 1
    assert metrics["clip_fraction/lower"] == 1 and metrics["clip_fraction/upper"] == 0


def test_grpo_gives_those_tokens_weights_1_9_and_0_4():
    _, grad, metrics = one_sequence(two_outliers(), 1.0, "grpo")
    weights = -grad * 512
    assert weights[100] == 0  # 1.9 > 1.27: clipped
    assert weights[300].item() == pytest.approx(0.4, rel=1e-6)
    assert weights[0].item() == pytest.approx(1, rel=1e-6)
    assert metrics["clip_fraction/tokens"] == pytest.approx(1 / 512)
    assert metrics["clip_fraction/sequences"] == 1  # a response with a clipped token

    _, grad, metrics = one_sequence(two_outliers(), -1.0, "grpo")
    weights = grad * 512
    assert weights[100].item() == pytest.approx(1.9, rel=1e-6)
    assert weights[300] == 0  # 0.4 < 0.8: clipped
    assert metrics["clip_fraction/lower"] == pytest.approx(1 / 512)


def test_ratio_of_doubled_likelihood_has_the_length_exponent():
    # a response of 10 tokens goes from likelihood 1e-4 to 2e-4
    log_ratio = torch.zeros(10)
    log_ratio[4] = math.log(2.0)
    _, _, metrics = one_sequence(log_ratio, 1.0, "gspo")
    assert metrics["ratio/mean"] == pytest.approx(1.0718, abs=5e-5)
    assert metrics["ratio/mean"] == pytest.approx(2**0.1, rel=1e-6)


def test_true_log_ratio_of_2_6e_6_is_seen():
    # in bfloat16 it came out as 0
    _, _, metrics = one_sequence(torch.full((100,), 2.6e-6), 1.0, "gspo")
    assert metrics["ratio/mean"] - 1 == pytest.approx(2.6e-6, rel=0.1)


def test_length_weighting_tells_the_algorithms_apart():
    """Two responses of 2 and 6 tokens, advantage 1, on policy: each token's share of the
    objective.
    """
    ids = torch.tensor([0, 0, 1, 1, 1, 1, 1, 1])
    expected = {
        "gspo": [1 / 4] * 2 + [1 / 12] * 6,  # 1/N 1/|y|
        "grpo": [1 / 4] * 2 + [1 / 12] * 6,
        "dapo": [1 / 8] * 8,  # 1/tokens
        "dr_grpo": [1 / 2048] * 8,  # 1/(N * 1024)
        "sft": [1 / 8] * 8,
        "gmpo": [1 / 4] * 2 + [1 / 12] * 6,
        "sapo": [1 / 4] * 2 + [1 / 12] * 6,
        "luspo": [1 / 2] * 8,  # 1/N
        "minirl": [1 / 2] * 8,
        **{name: [1 / 8] * 8 for name in ("cispo", "dppo_tv", "dppo_kl", "ppo")},
    }
    assert expected.keys() | {"gspo_token"} == PRESETS.keys()
    for name, weights in expected.items():
        log_probs = torch.full((8,), -1.0, requires_grad=True)
        loss, _ = call_policy_loss(
            complete_preset(name),
            log_probs=log_probs,
            old_log_probs=log_probs.detach(),
            rollout_log_probs=log_probs.detach(),
            advantages=torch.ones(8),
            loss_mask=torch.ones(8),
            segment_ids=ids,
            num_sequences=2,
            num_tokens=8,
        )
        loss.backward()
        torch.testing.assert_close(-log_probs.grad, torch.tensor(weights))


def test_kl_terms_by_hand():
    # d = log_probs - ref = ln 2: k1 = ln 2, k2 = ln(2)^2 / 2, k3 = 1/2 - 1 + ln 2; gradients 1, ln
    # 2, 1 - 1/2
    ln2 = math.log(2)
    by_hand = {"k1": (ln2, 1.0), "k2": (ln2**2 / 2, ln2), "k3": (ln2 - 0.5, 0.5)}
    for estimator, (value, slope) in by_hand.items():
        log_probs = torch.full((2,), -1.0, requires_grad=True)
        loss, metrics = call_policy_loss(
            preset("gspo", kl_loss_coef=0.1, kl_loss_type=estimator),
            log_probs=log_probs,
            old_log_probs=log_probs.detach(),
            advantages=torch.zeros(2),
            loss_mask=torch.ones(2),
            segment_ids=torch.zeros(2, dtype=torch.long),
            num_sequences=1,
            ref_log_probs=log_probs.detach() - ln2,
        )
        loss.backward()
        assert loss.item() == pytest.approx(0.1 * value, rel=1e-5)
        torch.testing.assert_close(log_probs.grad, torch.full((2,), 0.1 * slope / 2))
        assert metrics["kl/ref"].item() == pytest.approx(ln2 - 0.5, rel=1e-5)


def test_sft_needs_neither_old_policy_nor_advantages():
    log_probs = torch.tensor([-1.0, -2.0, -6.0], requires_grad=True)
    common = dict(
        log_probs=log_probs,
        old_log_probs=None,
        advantages=None,
        loss_mask=torch.tensor([1.0, 1.0, 1.0]),
        segment_ids=torch.tensor([0, 0, 1]),
        num_sequences=2,
        num_tokens=3,
    )
    loss, metrics = call_policy_loss(preset("sft"), **common)
    assert loss.item() == pytest.approx(3)
    assert {k: v.item() for k, v in metrics.items() if k.startswith("clip")} == {
        f"clip_fraction/{what}": 0 for what in ("tokens", "sequences", "lower", "upper")
    }
    loss, _ = call_policy_loss(preset("sft", loss_agg_mode="seq-mean-token-mean"), **common)
    assert loss.item() == pytest.approx((1.5 + 6) / 2)


def test_the_limit_of_log_ratios_is_the_objectives():
    """max_log_ratio = 1: log-ratio 2 counts as 1 in the ratio and both KL figures, and the
    token is frozen.
    """
    log_probs = torch.tensor([-1.0, -1.0], requires_grad=True)
    loss, metrics = call_policy_loss(
        preset("grpo", max_log_ratio=1.0, epsilon_high=5.0, kl_loss_coef=0.1),
        log_probs=log_probs,
        old_log_probs=torch.tensor([-3.0, -1.0]),
        ref_log_probs=torch.tensor([-3.0, -1.0]),
        advantages=torch.ones(2),
        loss_mask=torch.ones(2),
        segment_ids=torch.zeros(2, dtype=torch.long),
        num_sequences=1,
    )
    loss.backward()
    k3_old, k3_ref = math.exp(1) - 2, math.exp(-1)  # exp(d) - 1 - d at d = 1 and d = -1
    final = finish_metrics(metrics)
    assert final["kl/old_policy"] == pytest.approx(k3_old / 2)
    assert final["kl/ref"] == pytest.approx(k3_ref / 2)
    assert final["loss/kl"] == pytest.approx(0.1 * k3_ref / 2)
    assert final["loss/policy"] == pytest.approx(-(math.e + 1) / 2)
    assert loss.item() == pytest.approx(final["loss/policy"] + final["loss/kl"])
    assert final["log_ratio_clamped"] == pytest.approx(1 / 2) and final[
        "ratio_max"
    ] == pytest.approx(math.e)
    assert log_probs.grad[0] == 0 and log_probs.grad[1] == pytest.approx(-1 / 2)


def test_finished_metrics_by_hand():
    """Ratios 1 and 3: mean 2, mean square deviation from 1 is 2, variance 1, sample size 16 /
    10 / 2.
    """
    final = finish_metrics(
        {"ratio/mean": torch.tensor(2.0), "ratio/square_deviation": 2.0, "loss/policy": 1}
    )
    assert final == {
        "ratio/mean": 2.0,
        "loss/policy": 1.0,
        "ratio/std": 1.0,
        "effective_sample_size": 0.8,
    }
    assert all(type(value) is float for value in final.values())
    nothing = finish_metrics({"ratio/mean": 0.0, "ratio/square_deviation": 0.0})
    assert nothing == {"ratio/mean": 0.0, "ratio/std": 0.0, "effective_sample_size": 0.0}
    for mean in (0.25, 0.5):  # shares that fit no ratios: the mean square would be below 0, or 0
        odd = finish_metrics({"ratio/mean": mean, "ratio/square_deviation": 0.0})
        assert odd["effective_sample_size"] == 0.0
    rounded = finish_metrics({"ratio/mean": 1.5, "ratio/square_deviation": 0.25 - 1e-9})
    assert rounded["ratio/std"] == 0.0 and rounded["effective_sample_size"] == 1.0
    nothing_trained = {"ratio_max": -math.inf, "ratio_min": math.inf, "loss/policy": math.inf}
    assert finish_metrics(nothing_trained) == {"loss/policy": math.inf}
    extremes = {"ratio_max": 1.0, "ratio_min": -2.0}
    assert finish_metrics(extremes) == extremes
    assert math.isnan(finish_metrics({"ratio_max": math.nan})["ratio_max"])
    assert finish_metrics({"entropy": 2}) == {"entropy": 2.0}


# One response of two tokens, A = 1 or -1: old probabilities 0.5 and 0.4, current ones 0.7 and 0.1,
# so the ratios are 1.4 and 0.25 and the log-probs -0.3567 and -2.3026.
OLD = (0.5, 0.4)
NEW = (0.7, 0.1)
RATIOS = (1.4, 0.25)
SCORES = (math.log(0.7), math.log(0.1))


def two_tokens(name, advantage, rollout=OLD, **fields):
    """Loss, gradient to both log-probs and metrics.

    advantage: one, or two. rollout: probabilities in the engine.
    """
    old = torch.tensor(OLD, dtype=torch.float64).log()
    log_probs = torch.tensor(NEW, dtype=torch.float64).log().requires_grad_()
    loss, metrics = call_policy_loss(
        complete_preset(name, **fields),
        log_probs=log_probs,
        old_log_probs=old,
        num_sequences=1,
        num_tokens=2,
        advantages=torch.tensor(advantage, dtype=torch.float64).expand(2),
        loss_mask=torch.ones(2),
        segment_ids=torch.zeros(2, dtype=torch.long),
        rollout_log_probs=torch.tensor(rollout, dtype=torch.float64).log(),
    )
    loss.backward()
    return loss.item(), log_probs.grad.tolist(), finish_metrics(metrics)


@pytest.mark.parametrize(
    ("name", "high", "divisor"), [("dr_grpo", 1.2, 8), ("dapo", 1.28, 2), ("ppo", 1.2, 2)]
)
def test_clipped_token_ratios_and_their_divisors(name, high, divisor):
    """A > 0 clips 1.4 and A < 0 clips 0.25 at 0.8.

    A sum over N * 8, over the tokens, over the tokens.
    """
    fields = {"loss_scale_factor": 8.0} if name == "dr_grpo" else {}
    loss, grad, metrics = two_tokens(name, 1.0, **fields)
    assert loss == pytest.approx(-(high + 0.25) / divisor) and grad == pytest.approx(
        [0, -0.25 / divisor]
    )
    assert (metrics["clip_fraction/upper"], metrics["clip_fraction/lower"]) == (0.5, 0)
    loss, grad, metrics = two_tokens(name, -1.0, **fields)
    assert loss == pytest.approx((1.4 + 0.8) / divisor) and grad == pytest.approx(
        [1.4 / divisor, 0]
    )
    assert (metrics["clip_fraction/upper"], metrics["clip_fraction/lower"]) == (0, 0.5)


def test_cispo_truncates_the_weight_and_keeps_every_gradient():
    loss, grad, metrics = two_tokens("cispo", 1.0, max_weight=1.2)
    assert loss == pytest.approx(-(1.2 * SCORES[0] + 0.25 * SCORES[1]) / 2)
    assert grad == pytest.approx([-1.2 / 2, -0.25 / 2])
    assert (metrics["clip_fraction/upper"], metrics["clip_fraction/lower"]) == (0.5, 0)
    # Either sign of the advantage.
    loss, grad, metrics = two_tokens("cispo", -1.0, max_weight=1.2, min_weight=0.8)
    assert grad == pytest.approx([1.2 / 2, 0.8 / 2])
    assert (metrics["clip_fraction/upper"], metrics["clip_fraction/lower"]) == (0.5, 0.5)


@pytest.mark.parametrize(("advantage", "tau"), [(1.0, 1.0), (-1.0, 1.05)])
def test_sapo_gates_softly(advantage, tau):
    """Slope 4 s (1 - s) w with s = sigmoid(tau (w - 1)): of w = 1.4 it is 1.345, not 0 as
    behind a clip.
    """
    loss, grad, metrics = two_tokens("sapo", advantage)
    gates = [1 / (1 + math.exp(-tau * (w - 1))) for w in RATIOS]
    assert loss == pytest.approx(-advantage * sum(4 / tau * s for s in gates) / 2)
    assert grad == pytest.approx(
        [-advantage * 4 * s * (1 - s) * w / 2 for s, w in zip(gates, RATIOS, strict=True)]
    )
    assert metrics["clip_fraction/tokens"] == 0
    if advantage > 0:
        assert -2 * grad[0] == pytest.approx(1.345, abs=5e-4)


def test_dppo_tv_masks_what_has_moved_too_far_with_the_advantage():
    """Probabilities move by +0.2 and -0.3: the first is masked for A > 0, the second for A < 0."""
    loss, grad, metrics = two_tokens("dppo_tv", 1.0)
    assert loss == pytest.approx(-0.25 * SCORES[1] / 2) and grad == pytest.approx([0, -0.25 / 2])
    assert (metrics["clip_fraction/upper"], metrics["clip_fraction/lower"]) == (0.5, 0)
    loss, grad, metrics = two_tokens("dppo_tv", -1.0)
    assert loss == pytest.approx(1.4 * SCORES[0] / 2) and grad == pytest.approx([1.4 / 2, 0])
    assert (metrics["clip_fraction/upper"], metrics["clip_fraction/lower"]) == (0, 0.5)
    _, grad, metrics = two_tokens("dppo_tv", 1.0, divergence_threshold=0.21, max_weight=1.1)
    assert grad == pytest.approx([-1.1 / 2, -0.25 / 2]) and metrics["clip_fraction/tokens"] == 0


def test_dppo_kl_measures_this_token_against_all_others():
    """0.5 ln(0.5 / 0.7) + 0.5 ln(0.5 / 0.3) = 0.0872 and 0.4 ln 4 + 0.6 ln(0.6 / 0.9) = 0.3112."""
    for threshold, masked in ((0.087, True), (0.088, False)):
        _, grad, _ = two_tokens("dppo_kl", 1.0, divergence_threshold=threshold)
        assert grad == pytest.approx([0 if masked else -1.4 / 2, -0.25 / 2])
    for threshold, masked in ((0.311, True), (0.312, False)):
        _, grad, _ = two_tokens("dppo_kl", -1.0, divergence_threshold=threshold)
        assert grad == pytest.approx([1.4 / 2, 0 if masked else 0.25 / 2])


def test_minirl_clips_by_the_old_policy_and_weighs_by_the_rollout_engine():
    """The engine gave both tokens 0.1: their weights are 7, truncated to 5, and 1. Ratios to the
    old policy: 1.4 is clipped for A > 0, 0.25 for A < 0. The response is a sum of its tokens."""
    loss, grad, metrics = two_tokens("minirl", 1.0, (0.1, 0.1))
    assert loss == pytest.approx(-SCORES[1]) and grad == pytest.approx([0, -1])
    assert (metrics["clip_fraction/upper"], metrics["clip_fraction/lower"]) == (0.5, 0)
    loss, grad, metrics = two_tokens("minirl", -1.0, (0.1, 0.1))
    assert loss == pytest.approx(5 * SCORES[0]) and grad == pytest.approx([5, 0])
    assert (metrics["clip_fraction/upper"], metrics["clip_fraction/lower"]) == (0, 0.5)
    assert metrics["ratio_max"] == pytest.approx(1.4), (
        "the ratio of the metrics is that to the old policy"
    )
    _, grad, _ = two_tokens("minirl", 1.0, (0.1, 0.4), epsilon_high=0.5, max_weight=8.0)
    assert grad == pytest.approx([-7, -0.25])


def test_gmpo_clips_inside_the_mean():
    """Log-ratios 0.336 and -1.386, bounds of 0.3: with A > 0 the first counts as 0.3, with A <
    0 the second as -0.3.
    """
    logs = [math.log(w) for w in RATIOS]
    up = math.exp((0.3 + logs[1]) / 2)
    down = math.exp((logs[0] - 0.3) / 2)
    loss, grad, metrics = two_tokens("gmpo", 1.0, epsilon_low=0.3, epsilon_high=0.3)
    assert loss == pytest.approx(-up) and grad == pytest.approx([0, -up / 2])
    assert (
        metrics["clip_fraction/upper"],
        metrics["clip_fraction/lower"],
        metrics["ratio_max"],
    ) == (0.5, 0, pytest.approx(up))
    loss, grad, metrics = two_tokens("gmpo", -1.0, epsilon_low=0.3, epsilon_high=0.3)
    assert loss == pytest.approx(down) and grad == pytest.approx([down / 2, 0])
    assert (metrics["clip_fraction/upper"], metrics["clip_fraction/lower"]) == (0, 0.5)


def test_the_off_policy_mask_drops_bad_responses_that_became_unlikely():
    """mean(old - current) = -ln(1.4 * 0.25) / 2 = 0.525 nats."""
    for name in ("grpo", "gmpo"):
        plain = two_tokens(name, -1.0)
        for threshold, masked in ((0.524, True), (0.526, False)):
            loss, grad, metrics = two_tokens(name, -1.0, off_policy_mask_threshold=threshold)
            assert metrics["off_policy_mask/sequences"] == masked
            assert (loss, grad) == ((0, [0, 0]) if masked else plain[:2])
        # A > 0: not concerned.
        loss, grad, metrics = two_tokens(name, 1.0, off_policy_mask_threshold=0.1)
        assert (loss, grad) == two_tokens(name, 1.0)[:2] and metrics[
            "off_policy_mask/sequences"
        ] == 0


def test_the_squared_log_ratio_by_hand():
    """0.1 (0.336^2 + 1.386^2) / 2, and slope 0.1 * 2 * log-ratio / 2."""
    logs = [math.log(w) for w in RATIOS]
    plain, penalised = (two_tokens("dapo", 1.0, log_ratio_coef=c) for c in (0.0, 0.1))
    assert penalised[0] - plain[0] == pytest.approx(0.1 * sum(d * d for d in logs) / 2)
    assert [a - b for a, b in zip(penalised[1], plain[1], strict=True)] == pytest.approx(
        [0.1 * d for d in logs]
    )
    assert penalised[2]["loss/log_ratio"] == pytest.approx(penalised[0] - plain[0])
