"""verl's policy losses, advantages and KL (verl.trainer.ppo.core_algos) on the same batch as
ours.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_gspo.algorithms import (
    Objective,
    gae_advantages,
    group_advantages,
    kl_penalty,
    preset,
    value_loss,
)

from .batch import Padded, Result, assert_same, cuts, make_batch, ours

core_algos = pytest.importorskip(
    "verl.trainer.ppo.core_algos",
    reason="verl is not installed: make test-peers brings it",
    exc_type=ImportError,
)
from verl.workers.config import ActorConfig  # noqa: E402

SEQUENCE_MEAN = "seq-mean-token-mean"
TOKEN_MEAN = "token-mean"
CONSTANT = "seq-mean-token-sum-norm"
FAR = 1e9  # a dual clip that no ratio reaches: verl can't turn it off
# So that the published clip binds for some and not for others.
DRIFT = {"gspo": 6e-4, "vanilla": 0.2}
LENGTH = 100  # of dr_grpo


def verl(
    name: str,
    batch: Padded,
    *,
    mode: str,
    clip: tuple[float, float],
    dual_clip: float = FAR,
    micro_batch: int | None = None,
    global_batch_info: dict[str, Any] | None = None,
    **settings: Any,
) -> Result:
    """verl's loss, summed over micro-batches, its gradient, and its metrics of the last
    micro-batch.
    """
    config = ActorConfig(
        strategy="megatron",
        rollout_n=4,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=clip[0],
        clip_ratio_high=clip[1],
        clip_ratio_c=dual_clip,
        global_batch_info=global_batch_info or {},
        **settings,
    )
    losses = []
    gradients = []
    metrics = {}
    for cut in cuts(batch, micro_batch or len(batch)):
        piece = batch.rows(cut)
        leaf = piece.log_probs.clone().requires_grad_()
        advantages = piece.advantages[:, None] * torch.ones_like(leaf)
        loss, metrics = core_algos.get_policy_loss_fn(name)(
            piece.old_log_probs, leaf, advantages, piece.mask, loss_agg_mode=mode, config=config
        )
        losses.append(loss.item())
        gradients.append(torch.autograd.grad(loss, leaf)[0])
    return Result(math.fsum(losses), torch.cat(gradients), metrics)


def global_batch(batch: Padded) -> dict[str, Any]:
    """What verl's actor may pass with each micro-batch; a constant length for dr_grpo."""
    counts = {"batch_num_tokens": batch.num_tokens, "global_batch_size": batch.num_sequences}
    return {"dp_size": 1, **counts, "loss_scale_factor": LENGTH}


def clip_of(objective: Objective) -> tuple[float, float]:
    assert objective.epsilon_low is not None and objective.epsilon_high is not None
    return objective.epsilon_low, objective.epsilon_high


PAIRS = {
    "gspo": (preset("gspo"), "gspo", SEQUENCE_MEAN),
    "gspo_token": (preset("gspo_token"), "gspo", SEQUENCE_MEAN),
    "grpo": (preset("grpo"), "vanilla", SEQUENCE_MEAN),
    "dapo": (preset("dapo"), "vanilla", TOKEN_MEAN),
    "dr_grpo": (preset("dr_grpo", loss_scale_factor=LENGTH), "vanilla", CONSTANT),
    "ppo": (preset("ppo"), "vanilla", TOKEN_MEAN),
}


@pytest.mark.parametrize("micro_batch", [8, 2, 3])
@pytest.mark.parametrize("pair", PAIRS)
def test_equal_where_the_global_counts_are_given(pair: str, micro_batch: int) -> None:
    objective, name, mode = PAIRS[pair]
    batch = make_batch(drift=DRIFT[name])
    theirs = verl(
        name,
        batch,
        mode=mode,
        clip=clip_of(objective),
        micro_batch=micro_batch,
        global_batch_info=global_batch(batch),
    )
    our = ours(objective, batch, micro_batch=micro_batch)
    assert our.metrics["clip_fraction/lower"] > 0 < our.metrics["clip_fraction/upper"]
    assert_same(theirs, our)


@pytest.mark.parametrize("pair", PAIRS)
def test_equal_with_a_response_of_no_trained_token(pair: str) -> None:
    objective, name, mode = PAIRS[pair]
    batch = make_batch(drift=DRIFT[name], lengths=(4, 7, 9, 12, 0, 3))
    batch.mask[4] = 0
    info = {"loss_scale_factor": LENGTH}
    theirs = verl(name, batch, mode=mode, clip=clip_of(objective), global_batch_info=info)
    assert batch.num_sequences == 5
    assert_same(theirs, ours(objective, batch))


@pytest.mark.parametrize("pair", PAIRS)
def test_clip_fraction_is_equal(pair: str) -> None:
    objective, name, mode = PAIRS[pair]
    batch = make_batch(drift=DRIFT[name])
    theirs = verl(
        name,
        batch,
        mode=mode,
        clip=clip_of(objective),
        global_batch_info={"loss_scale_factor": LENGTH},
    )
    assert theirs.metrics["actor/pg_clipfrac"] == pytest.approx(
        ours(objective, batch).metrics["clip_fraction/tokens"], rel=1e-6
    )


NONE = (0.2, 0.2)  # a clip range that the loss does not read
# objective, verl's name, aggregation, (clip_ratio_low, clip_ratio_high), clip_ratio_c, drift
NEWER = {
    "cispo": (preset("cispo"), "cispo", TOKEN_MEAN, (1.0, 4.0), FAR, 1.0),
    "cispo_with_both_bounds": (
        preset("cispo", min_weight=0.8, max_weight=1.28),
        "cispo",
        TOKEN_MEAN,
        (0.2, 0.28),
        FAR,
        0.2,
    ),
    "sapo": (preset("sapo"), "sapo", SEQUENCE_MEAN, NONE, FAR, 0.5),
    "dppo_tv": (preset("dppo_tv"), "dppo_tv", TOKEN_MEAN, (0.15, 0.15), 20.0, 0.5),
    "dppo_tv_truncated": (
        preset("dppo_tv", max_weight=1.5),
        "dppo_tv",
        TOKEN_MEAN,
        (0.15, 0.15),
        1.5,
        0.5,
    ),
    "dppo_kl": (preset("dppo_kl"), "dppo_kl", TOKEN_MEAN, (0.05, 0.05), 20.0, 0.5),
    "gmpo": (preset("gmpo"), "geo_mean", TOKEN_MEAN, (0.4, 0.4), FAR, 0.5),
}


@pytest.mark.parametrize("pair", NEWER)
def test_newer_objectives_are_equal(pair: str) -> None:
    objective, name, mode, clip, dual_clip, drift = NEWER[pair]
    batch = make_batch(drift=drift)
    our = ours(objective, batch)
    assert_same(
        verl(name, batch, mode=mode, clip=clip, dual_clip=dual_clip, tau_pos=1.0, tau_neg=1.05), our
    )
    if pair != "sapo":
        assert our.metrics["clip_fraction/tokens"] > 0
    if pair.startswith(("cispo", "dppo")):
        theirs = verl(name, batch, mode=mode, clip=clip, dual_clip=dual_clip)
        clipped = theirs.metrics["actor/pg_clipfrac"]
        assert clipped == pytest.approx(our.metrics["clip_fraction/tokens"], rel=1e-6)


def test_the_geometric_mean_has_1e_8_in_its_length_where_the_mask_is_in_float64() -> None:
    """In float32, as verl's masks are, a length plus 1e-8 is the length. Each response: mean and
    advantage both divided by it."""
    batch = make_batch(drift=0.5)
    wide = replace(batch, mask=batch.mask.double())
    theirs = verl("geo_mean", wide, mode=TOKEN_MEAN, clip=(0.4, 0.4))
    leaf = batch.log_probs.clone().requires_grad_()
    lengths = wide.mask.sum(1)
    d = leaf - batch.old_log_probs
    sign = batch.advantages.sign()[:, None]
    clipped = sign * torch.minimum(sign * d, sign * d.clamp(-0.4, 0.4))
    ratio = torch.exp((clipped * wide.mask).sum(1) / (lengths + 1e-8))
    loss = -(ratio * batch.advantages * lengths / (lengths + 1e-8)).mean()
    expected = Result(loss.item(), torch.autograd.grad(loss, leaf)[0], {})
    assert_same(theirs, expected)
    assert 1e-10 < abs(theirs.loss / ours(preset("gmpo"), batch).loss - 1) < 1e-7


def test_the_geometric_mean_is_divided_by_the_rows_of_a_micro_batch() -> None:
    """Whatever the global counts: a micro-batch of 2 rows weighs as much as one of 3."""
    batch = make_batch(drift=0.5)
    info = global_batch(batch)
    cut = verl(
        "geo_mean", batch, mode=TOKEN_MEAN, clip=(0.4, 0.4), micro_batch=3, global_batch_info=info
    )
    parts = [ours(preset("gmpo"), batch.rows(piece)).loss for piece in cuts(batch, 3)]
    assert cut.loss == pytest.approx(math.fsum(parts), rel=1e-6)
    assert abs(cut.loss / 3 - ours(preset("gmpo"), batch).loss) > 1e-3


@pytest.mark.parametrize("pair", ["gspo", "grpo", "dapo"])
def test_differs_by_micro_batch_without_the_global_counts(pair: str) -> None:
    """verl then means over each micro-batch: summing them, divided by their number, is another
    objective.
    """
    objective, name, mode = PAIRS[pair]
    batch = make_batch(drift=DRIFT[name])
    whole, by_three = (
        verl(name, batch, mode=mode, clip=clip_of(objective), micro_batch=n) for n in (8, 3)
    )
    assert_same(whole, ours(objective, batch))  # one call is right
    # Ours doesn't depend on the cut.
    assert_same(ours(objective, batch, micro_batch=3), ours(objective, batch))
    # Each of the 3 micro-batches counts the same, the last one of 2 rows as well.
    parts = [batch.rows(cut) for cut in cuts(batch, 3)]
    assert by_three.loss == pytest.approx(
        sum(ours(objective, piece).loss for piece in parts), rel=1e-12
    )
    assert abs(by_three.loss / 3 - whole.loss) > 1e-3 * abs(whole.loss)


def test_gspo_by_default_weighs_sequences_by_their_tokens() -> None:
    """The actor's loss_agg_mode is token-mean unless set; ours refuses that for a sequence
    ratio.
    """
    assert ActorConfig.loss_agg_mode == TOKEN_MEAN
    with pytest.raises(ValueError, match="not gspo"):
        preset("gspo", loss_agg_mode="token-mean")
    batch = make_batch(drift=6e-4)
    theirs = verl("gspo", batch, mode=ActorConfig.loss_agg_mode, clip=(3e-4, 4e-4))
    published = ours(preset("gspo"), batch)
    assert abs(theirs.loss - published.loss) > 0.1 * abs(published.loss)
    assert_same(
        theirs, ours(preset("gspo", loss_agg_mode="token-mean", allow_nonstandard=True), batch)
    )


def test_vanilla_has_a_dual_clip_that_the_published_objective_lacks() -> None:
    assert ActorConfig.clip_ratio_c == 3.0
    batch = make_batch(drift=1.5)
    objective = preset("grpo")
    default = verl(
        "vanilla",
        batch,
        mode=SEQUENCE_MEAN,
        clip=clip_of(objective),
        dual_clip=ActorConfig.clip_ratio_c,
    )
    with_dual_clip = ours(replace(objective, dual_clip=3.0), batch)
    assert with_dual_clip.metrics["clip_fraction/dual"] > 0
    assert default.metrics["actor/pg_clipfrac_lower"] == pytest.approx(
        with_dual_clip.metrics["clip_fraction/dual"], rel=1e-6
    )
    assert_same(default, with_dual_clip)
    assert abs(default.loss - ours(objective, batch).loss) > 0.1 * abs(default.loss)
    assert_same(
        verl("vanilla", batch, mode=SEQUENCE_MEAN, clip=clip_of(objective)), ours(objective, batch)
    )


def one_response(log_ratio: float, advantage: float) -> Padded:
    old = torch.full((1, 4), -30.0, dtype=torch.float64)
    return Padded(
        old + log_ratio, old, old, torch.tensor([advantage], dtype=torch.float64), torch.ones(1, 4)
    )


def test_gspo_stops_a_log_ratio_at_10_and_ours_at_20() -> None:
    """Only A < 0 gets there unclipped.

    Past its limit either has a constant value and no gradient.
    """
    batch = one_response(15.0, -1.0)
    theirs = verl("gspo", batch, mode=SEQUENCE_MEAN, clip=(3e-4, 4e-4))
    our = ours(preset("gspo"), batch)
    assert theirs.loss == pytest.approx(math.exp(10)) and not theirs.gradient.any()
    assert our.loss == pytest.approx(math.exp(15)) and our.gradient.sum().item() == pytest.approx(
        math.exp(15)
    )
    assert_same(
        theirs_at_9 := verl("gspo", one_response(9.0, -1.0), mode=SEQUENCE_MEAN, clip=(3e-4, 4e-4)),
        ours(preset("gspo"), one_response(9.0, -1.0)),
    )
    assert theirs_at_9.loss == pytest.approx(math.exp(9))


def test_gspo_reads_what_is_masked_and_ours_does_not() -> None:
    """verl multiplies by the mask, and NaN * 0 is NaN."""
    batch = make_batch(drift=6e-4)
    clean = ours(preset("gspo"), batch)
    batch.log_probs[batch.mask == 0] = math.nan
    theirs = verl("gspo", batch, mode=SEQUENCE_MEAN, clip=(3e-4, 4e-4))
    assert math.isnan(theirs.loss)
    assert_same(ours(preset("gspo"), batch), clean)


# Reward -> advantage.

REWARDS = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.5, 2.0, -1.0, 0.25])
GROUPS = torch.tensor([3, 3, 5, 5, 5, 3, 3, 5])


def verl_advantages(rewards: Tensor, groups: Tensor, **options: Any) -> Tensor:
    """verl's, [N]: its rewards lie on the last of 3 tokens."""
    by_token = torch.zeros(len(rewards), 3, dtype=rewards.dtype)
    by_token[:, -1] = rewards
    advantages, _ = core_algos.compute_grpo_outcome_advantage(
        by_token, torch.ones_like(by_token), np.asarray(groups), **options
    )
    assert (advantages == advantages[:, :1]).all()
    return advantages[:, 0]


def test_group_advantages_differ_by_an_epsilon_in_the_std() -> None:
    theirs = verl_advantages(REWARDS.double(), GROUPS)
    our = group_advantages(REWARDS, GROUPS)
    torch.testing.assert_close(theirs.float(), our, rtol=3e-6, atol=1e-7)
    std = torch.stack([REWARDS[GROUPS == g].double().std() for g in GROUPS])
    exact = group_advantages(REWARDS, GROUPS, std="none").double() / std
    torch.testing.assert_close(theirs, exact * std / (std + 1e-6), rtol=1e-7, atol=1e-9)
    vectorized, _ = core_algos.compute_grpo_vectorized_outcome_advantage(
        REWARDS[:, None], torch.ones(len(REWARDS), 1), np.asarray(GROUPS)
    )
    torch.testing.assert_close(vectorized[:, 0], our, rtol=3e-6, atol=1e-6)


def test_group_advantages_without_std_are_equal() -> None:
    theirs = verl_advantages(REWARDS.double(), GROUPS, norm_adv_by_std_in_grpo=False)
    torch.testing.assert_close(
        theirs.float(), group_advantages(REWARDS, GROUPS, std="none"), rtol=1e-6, atol=1e-7
    )


def test_leave_one_out_is_equal_to_rloo() -> None:
    by_token = REWARDS.double()[:, None]
    theirs, _ = core_algos.compute_rloo_outcome_advantage(
        by_token, torch.ones_like(by_token), np.asarray(GROUPS)
    )
    our = group_advantages(REWARDS, GROUPS, std="none", baseline="leave_one_out")
    torch.testing.assert_close(theirs[:, 0].float(), our, rtol=1e-6, atol=1e-7)


def test_a_group_of_one_gets_its_reward_there_and_nothing_here() -> None:
    alone = torch.tensor([0.75])
    assert verl_advantages(alone, torch.tensor([0])).item() == pytest.approx(0.75)
    assert group_advantages(alone, torch.tensor([0])).item() == 0


def test_equal_rewards_get_rounding_errors_there_and_zero_here() -> None:
    """In float32 the mean of eight 0.9 is not 0.9, and 1e-6 doesn't hide it: all eight get the
    same push.
    """
    equal = torch.full((8,), 0.9)
    groups = torch.zeros(8, dtype=torch.long)
    assert verl_advantages(equal.clone(), groups).abs().min() > 0.05
    assert (group_advantages(equal, groups) == 0).all()


# KL to the reference.


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_loss_types_and_their_gradients_are_equal(estimator: str) -> None:
    batch = make_batch(drift=0.2)
    results = []
    for function in (
        lambda x: core_algos.kl_penalty(x, batch.ref_log_probs, estimator),
        lambda x: kl_penalty(x, batch.ref_log_probs, estimator),
    ):
        leaf = batch.log_probs.clone().requires_grad_()
        value = function(leaf)
        results.append((value.detach(), torch.autograd.grad(value.sum(), leaf)[0]))
    for theirs, our in zip(*results, strict=True):
        torch.testing.assert_close(theirs, our, rtol=0, atol=1e-12)


def test_kl_in_the_loss_is_equal() -> None:
    """GSPO and k3 in verl's two calls, in ours the coefficient."""
    batch = make_batch(drift=6e-4)
    theirs = verl("gspo", batch, mode=SEQUENCE_MEAN, clip=(3e-4, 4e-4))
    leaf = batch.log_probs.clone().requires_grad_()
    kl = core_algos.agg_loss(
        core_algos.kl_penalty(leaf, batch.ref_log_probs, "low_var_kl"), batch.mask, SEQUENCE_MEAN
    )
    (gradient,) = torch.autograd.grad(kl, leaf)
    both = Result(theirs.loss + 0.04 * kl.item(), theirs.gradient + 0.04 * gradient, {})
    assert_same(both, ours(preset("gspo", kl_loss_coef=0.04), batch, with_ref=True))


def test_k3_is_cut_at_10_there_and_grows_here() -> None:
    log_probs = torch.tensor([-5.0], dtype=torch.float64)
    ref = torch.tensor([-1.0], dtype=torch.float64)
    assert core_algos.kl_penalty(log_probs, ref, "k3").item() == 10
    assert kl_penalty(log_probs, ref, "k3").item() == pytest.approx(math.exp(4) - 5)


def test_the_kl_to_the_old_policy_is_k1_there_and_k3_here() -> None:
    batch = make_batch(drift=0.2)
    theirs = verl("vanilla", batch, mode=SEQUENCE_MEAN, clip=(0.2, 0.27))
    d = (batch.log_probs - batch.old_log_probs)[batch.mask > 0]
    assert theirs.metrics["actor/ppo_kl"] == pytest.approx(float(-d.mean()), rel=1e-6)
    our = ours(preset("grpo"), batch).metrics["kl/old_policy"]
    assert our == pytest.approx(float((d.exp() - 1 - d).mean()), rel=1e-9)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.5)])
def test_gae_with_observations_inside(gamma: float, lam: float) -> None:
    """verl's returns, and its advantages before it normalises them, at trained tokens."""
    g = torch.Generator().manual_seed(0)
    mask = (torch.rand(6, 90, generator=g) < 0.8).double()
    rewards, values = (torch.randn(6, 90, generator=g, dtype=torch.float64) for _ in range(2))
    rewards = rewards * mask
    advantages, returns = core_algos.compute_gae_advantage_return(rewards, values, mask, gamma, lam)
    actual = [
        gae_advantages(row[kept], value[kept], gamma=gamma, lam=lam)
        for row, value, kept in zip(rewards, values, mask.bool(), strict=True)
    ]
    torch.testing.assert_close(
        torch.cat([r for _, r in actual]), returns[mask.bool()], rtol=0, atol=1e-12
    )
    flat = torch.cat([a for a, _ in actual])
    count, added = len(flat), 1e-8  # verl adds it to the count and to the variance
    mean = flat.sum() / (count + added)
    variance = (flat - mean).square().sum() / (count + added) * count / (count - 1)
    torch.testing.assert_close(
        (flat - mean) / (variance + added).sqrt(), advantages[mask.bool()], rtol=0, atol=1e-12
    )
    torch.testing.assert_close(
        (flat - flat.mean()) / flat.std(), advantages[mask.bool()], rtol=0, atol=1e-7
    )


def test_the_value_loss_and_its_gradient() -> None:
    g = torch.Generator().manual_seed(1)
    mask = (torch.rand(5, 12, generator=g) < 0.7).double()
    values, old, returns = (torch.randn(5, 12, generator=g, dtype=torch.float64) for _ in range(3))
    values.requires_grad_()
    expected, clipped = core_algos.compute_value_loss(
        values, returns, old, mask, cliprange_value=0.3
    )
    loss, metrics = value_loss(
        values.flatten(),
        old_values=old.flatten(),
        returns=returns.flatten(),
        loss_mask=mask.flatten(),
        num_tokens=int(mask.sum()),
        value_clip=0.3,
    )
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert float(metrics["critic/clip_fraction"]) == pytest.approx(float(clipped), rel=1e-6)
    ours_gradient, verls = (
        torch.autograd.grad(x, values, retain_graph=True)[0] for x in (loss, expected)
    )
    torch.testing.assert_close(ours_gradient, verls, rtol=1e-12, atol=0)
