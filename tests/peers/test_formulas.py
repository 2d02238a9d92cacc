"""prime-rl and slime are on no registry: their formulas, in loops over tokens, against our loss.

Written from their sources at these commits, links that docs/peers.md has too. Both take a
mini-batch in one call here; `sum_of_sample_mean / step_global_batch_size` of slime is the mean over
responses of the mean over tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_gspo.algorithms import (
    Objective,
    preset,
    sequence_importance_weights,
    token_importance_weights,
    token_rejection_mask,
)
from megatron_gspo.algorithms.segments import Segments
from megatron_gspo.objectives.presets import CORRECTIONS

from .batch import Padded, Result, assert_same, make_batch, ours

SLIME = "https://github.com/THUDM/slime/blob/624b824a898ab0ec1fcb4d373004c7f3852bf515/"
PRIME_RL = (
    "https://github.com/PrimeIntellect-ai/prime-rl/blob/559b44772e471d1538537b8805cc77f3824a5e64/"
)
SOURCES = (
    PRIME_RL + "src/prime_rl/trainer/rl/loss.py",
    SLIME + "slime/utils/ppo_utils.py",
    SLIME + "slime/backends/megatron_utils/loss.py",
)
FAR = 1e9  # a bound that no weight reaches

TokenLosses = dict[tuple[int, int], Tensor]
"""What is to be minimised, by response and token."""


def trained(batch: Padded, i: int) -> list[int]:
    return [t for t in range(batch.mask.shape[1]) if batch.mask[i, t] > 0]


def result(batch: Padded, losses_of: Callable[[Tensor], TokenLosses], *, by_token: bool) -> Result:
    """Sum of the token losses over all tokens of the mini-batch, or slime's mean over responses
    of their means.
    """
    leaf = batch.log_probs.clone().requires_grad_()
    total = torch.zeros((), dtype=leaf.dtype)
    for (i, _), loss in losses_of(leaf).items():
        total = total + loss / (
            batch.num_tokens if by_token else len(trained(batch, i)) * len(batch)
        )
    (gradient,) = torch.autograd.grad(total, leaf)
    return Result(total.item(), gradient, {})


def each(batch: Padded, loss: Callable[[int, int], Tensor]) -> TokenLosses:
    return {(i, t): loss(i, t) for i in range(len(batch)) for t in trained(batch, i)}


# prime-rl, default_loss_fn: old_log_probs is the rollout engine's, as with `old_log_probs:
# rollout`.


def prime_rl(batch: Padded, *, low: float = 0.2, high: float = 0.2, kl_tau: float = 1e-3) -> Result:
    def losses(log_probs: Tensor) -> TokenLosses:
        def loss(i: int, t: int) -> Tensor:
            d = log_probs[i, t] - batch.old_log_probs[i, t]
            moved = batch.log_probs[i, t].exp() - batch.old_log_probs[i, t].exp()
            a = batch.advantages[i]
            leaves = moved > high if a > 0 else moved < -low
            return kl_tau * d**2 - (0 if leaves else 1) * a * d.exp()

        return each(batch, loss)

    return result(batch, losses, by_token=True)


def test_prime_rls_default_has_the_gradient_of_dppo_with_the_log_ratio_penalty() -> None:
    """Its term is A times the ratio, ours sg[ratio] A log_prob: other values, one gradient."""
    batch = make_batch(drift=0.5)
    objective = preset("dppo_tv", divergence_threshold=0.2, max_weight=FAR, log_ratio_coef=1e-3)
    theirs = prime_rl(batch)
    our = ours(objective, batch)
    assert 0 < our.metrics["clip_fraction/tokens"] < 1 and our.metrics["loss/log_ratio"] > 0
    assert_same(replace(theirs, loss=our.loss), our)
    counted = 0.0  # the value that ours has with log_prob + 1 - log_prob for log_prob
    for i in range(len(batch)):
        for t in trained(batch, i):
            p = float(batch.log_probs[i, t])
            q = float(batch.old_log_probs[i, t])
            a = float(batch.advantages[i])
            if (math.exp(p) - math.exp(q)) * math.copysign(1, a) <= 0.2:
                counted += a * math.exp(p - q) * (1 - p) / batch.num_tokens
    assert theirs.loss == pytest.approx(our.loss - counted, rel=1e-12) and abs(counted) > 0.01


def one_token(p: float, q: float) -> Padded:
    """Probabilities of the policy and of the engine; advantage 1."""
    single = torch.ones(1, 1, dtype=torch.float64)
    return Padded(
        single * math.log(p),
        single * math.log(q),
        single,
        torch.ones(1, dtype=torch.float64),
        single.float(),
    )


def test_prime_rl_does_not_truncate_the_weight() -> None:
    """Our preset stops at 20, as verl does."""
    batch = one_token(0.0035, 0.0001)  # a ratio of 35, far inside the band
    assert prime_rl(batch, kl_tau=0).gradient.item() == pytest.approx(-35)
    assert ours(preset("dppo_tv"), batch).gradient.item() == pytest.approx(-20)
    assert ours(preset("dppo_tv", max_weight=FAR), batch).gradient.item() == pytest.approx(-35)


def test_prime_rls_threshold_is_0_2_and_ours_0_15() -> None:
    batch = one_token(0.68, 0.5)
    assert prime_rl(batch, kl_tau=0).gradient.item() == pytest.approx(-0.68 / 0.5)
    assert ours(preset("dppo_tv"), batch).gradient.item() == 0
    assert prime_rl(batch, low=0.15, high=0.15, kl_tau=0).gradient.item() == 0


# slime, policy_loss_function.


def slime(
    batch: Padded,
    *,
    estimator: str = "grpo",
    eps: tuple[float, float] = (0.2, 0.2),
    opsm_delta: float | None = None,
    weights: Tensor | None = None,
    by_token: bool = False,
) -> Result:
    """--advantage-estimator, --eps-clip and --eps-clip-high, --use-opsm; `weights` [B, R] of a
    TIS function.
    """
    low = 1 - eps[0]
    high = 1 + eps[1]

    def losses(log_probs: Tensor) -> TokenLosses:
        difference = batch.old_log_probs - log_probs
        mean_kl = [
            (
                sum(difference[i, t] for t in of) / len(of)
                if (of := trained(batch, i))
                else 0 * difference[i, 0]
            )
            for i in range(len(batch))
        ]

        def loss(i: int, t: int) -> Tensor:
            a = batch.advantages[i]
            old = batch.old_log_probs[i, t]
            ratio = torch.exp(-mean_kl[i] if estimator == "gspo" else log_probs[i, t] - old)
            if estimator == "cispo":
                term = -ratio.detach().clamp(low, high) * a * log_probs[i, t]
            else:
                term = torch.maximum(-ratio * a, -ratio.clamp(low, high) * a)
            if opsm_delta is not None and a < 0 and mean_kl[i].item() > opsm_delta:
                term = term * 0
            return term if weights is None else term * weights[i, t]

        return each(batch, loss)

    return result(batch, losses, by_token=by_token)


@pytest.mark.parametrize("opsm_delta", [None, 1e-4])
def test_slimes_gspo(opsm_delta: float | None) -> None:
    batch = make_batch(drift=6e-4)
    our = ours(preset("gspo", off_policy_mask_threshold=opsm_delta), batch)
    assert our.metrics["clip_fraction/lower"] > 0 < our.metrics["clip_fraction/upper"]
    assert opsm_delta is None or 0 < our.metrics["off_policy_mask/sequences"] < 1
    assert_same(slime(batch, estimator="gspo", eps=(3e-4, 4e-4), opsm_delta=opsm_delta), our)


def test_slimes_clip_range_is_0_2_for_gspo_too() -> None:
    """--eps-clip's default, and --eps-clip-high is the same unless set: no sequence is clipped."""
    batch = make_batch(drift=6e-4)
    with pytest.raises(ValueError, match="allow_nonstandard"):
        preset("gspo", epsilon_low=0.2, epsilon_high=0.2)
    our = ours(preset("gspo", epsilon_low=0.2, epsilon_high=0.2, allow_nonstandard=True), batch)
    assert our.metrics["clip_fraction/tokens"] == 0
    assert_same(slime(batch, estimator="gspo"), our)


@pytest.mark.parametrize("opsm_delta", [None, 0.05])
def test_slimes_grpo(opsm_delta: float | None) -> None:
    batch = make_batch(drift=0.2)
    our = ours(preset("grpo", epsilon_high=0.28, off_policy_mask_threshold=opsm_delta), batch)
    assert our.metrics["clip_fraction/lower"] > 0 < our.metrics["clip_fraction/upper"]
    assert opsm_delta is None or 0 < our.metrics["off_policy_mask/sequences"] < 1
    assert_same(slime(batch, eps=(0.2, 0.28), opsm_delta=opsm_delta), our)


@pytest.mark.parametrize(("eps", "bounds"), [((1.0, 4.0), (None, 5.0)), ((0.2, 0.28), (0.8, 1.28))])
def test_slimes_cispo_has_epsilons_for_bounds(
    eps: tuple[float, float], bounds: tuple[float | None, float]
) -> None:
    """With --calculate-per-token-loss; without it the mean is that over responses, another
    objective.
    """
    batch = make_batch(drift=1.0)
    objective = preset("cispo", min_weight=bounds[0], max_weight=bounds[1])
    our = ours(objective, batch)
    assert our.metrics["clip_fraction/tokens"] > 0
    assert_same(slime(batch, estimator="cispo", eps=eps, by_token=True), our)
    by_response = Objective(
        **{**vars(objective), "name": "own", "loss_agg_mode": "seq-mean-token-mean"}
    )
    default = slime(batch, estimator="cispo", eps=eps)
    assert_same(default, ours(by_response, batch))
    assert abs(default.loss - our.loss) > 0.01 * abs(our.loss)


def test_a_response_without_a_trained_token_counts_in_slimes_mean() -> None:
    batch = make_batch(drift=0.2)
    batch.mask[4] = 0
    our = ours(preset("grpo"), batch)
    theirs = slime(batch, eps=(0.2, 0.27))
    assert_same(Result(theirs.loss * 8 / 7, theirs.gradient * 8 / 7, {}), our)


def slime_kl(batch: Padded, *, unbiased: bool, cast: bool, limit: float | None = None) -> Result:
    """--kl-loss-type k3, or low_var_kl with a `limit`; --use-unbiased-kl.

    compute_approx_kl casts to float32.
    """

    def losses(log_probs: Tensor) -> TokenLosses:
        def loss(i: int, t: int) -> Tensor:
            p = log_probs[i, t]
            ref = batch.ref_log_probs[i, t]
            d = ref.float() - p.float() if cast else ref - p
            kl = d.exp() - 1 - d
            if unbiased:
                kl = torch.exp(p - batch.old_log_probs[i, t]) * kl
            return 0.04 * (kl if limit is None else kl.clamp(-limit, limit))

        return each(batch, loss)

    return result(batch, losses, by_token=False)


def our_kl(batch: Padded, **fields: bool) -> Result:
    return ours(
        preset("grpo", kl_loss_coef=0.04, **fields),
        replace(batch, advantages=0 * batch.advantages),
        with_ref=True,
    )


@pytest.mark.parametrize("unbiased", [False, True])
def test_slimes_kl_but_for_its_cast_to_float32(unbiased: bool) -> None:
    batch = make_batch(drift=0.2)
    our = our_kl(batch, unbiased_kl=unbiased)
    assert_same(slime_kl(batch, unbiased=unbiased, cast=False), our)
    rounded = slime_kl(batch, unbiased=unbiased, cast=True)
    assert 1e-9 < abs(rounded.loss / our.loss - 1) < 1e-5
    assert_same(rounded, our, tolerance=1e-5)


def test_slimes_low_var_kl_is_cut_at_10() -> None:
    batch = make_batch(drift=0.2)
    batch.ref_log_probs[0, 0] = batch.log_probs[0, 0] + 4  # e^4 - 5 = 49.6
    whole = our_kl(batch)
    cut = slime_kl(batch, unbiased=False, cast=False, limit=10)
    assert whole.loss - cut.loss == pytest.approx(0.04 * (math.exp(4) - 5 - 10) / 8, rel=1e-9)
    assert cut.gradient[0, 0] == 0 != whole.gradient[0, 0]


# Corrections for the rollout engine.


def engines(drift: float = 0.7) -> tuple[Padded, Tensor, Tensor]:
    """A batch, the rollout engine's log-probs, and exp(old - rollout), [B, R]."""
    batch = make_batch(drift=0.2)
    noise = torch.randn(
        batch.mask.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64
    )
    rollout = batch.old_log_probs + drift * noise
    return batch, rollout, (batch.old_log_probs - rollout).exp()


def weighted(batch: Padded, weights: Tensor) -> Result:
    """Ours: the advantages times the weights [B, R]."""
    return ours(preset("grpo"), replace(batch, advantages=batch.advantages[:, None] * weights))


@pytest.mark.parametrize(("name", "low"), [("token_tis", 0.0), ("bounded_token_tis", 0.5)])
def test_slimes_tis(name: str, low: float) -> None:
    """--use-tis, --tis-clip 2 and --tis-clip-low; GLM-5.2 with 0.5."""
    batch, rollout, rho = engines()
    weights = rho.clamp(low, 2.0)
    assert (weights == 2).any() and (low == 0 or (weights == low).any())
    fields = CORRECTIONS[name]
    our = token_importance_weights(
        batch.old_log_probs.flatten(),
        rollout.flatten(),
        batch.mask.flatten(),
        threshold=fields["rollout_is_threshold"],
        lower=fields.get("rollout_is_threshold_lower", 0.0),
    ).view_as(rho)
    assert_same(slime(batch, eps=(0.2, 0.27), weights=weights), weighted(batch, our))


def test_slimes_icepop_keeps_its_denominators() -> None:
    """icepop_function with the paper's 0.5 and 5: ours with `rollout_rs_denominator: all`. The
    default bounds of its flags are 0 and 2."""
    batch, rollout, rho = engines(drift=1.2)
    inside = (rho >= 0.5) & (rho <= 5)
    kept = batch.mask.bool() & inside
    assert 0 < kept.sum() < batch.num_tokens
    fields = CORRECTIONS["icepop"]
    flat = batch.old_log_probs.flatten(), rollout.flatten(), batch.mask.flatten()
    our_kept = token_rejection_mask(
        *flat, lower=fields["rollout_rs_threshold_lower"], upper=fields["rollout_rs_threshold"]
    ).view_as(rho)
    our = token_importance_weights(*flat, threshold=fields["rollout_is_threshold"]).view_as(rho)
    assert torch.equal(our_kept, kept) and fields["rollout_rs_denominator"] == "all"
    theirs = slime(batch, eps=(0.2, 0.27), weights=torch.where(inside, rho, 0))
    assert_same(theirs, weighted(batch, our * our_kept))
    shrunk = weighted(replace(batch, mask=kept.float()), our)  # `rollout_rs_denominator: kept`
    assert abs(shrunk.loss - theirs.loss) > 0.01 * abs(theirs.loss)
    default = slime(batch, eps=(0.2, 0.27), weights=torch.where(rho <= 2, rho, 0))
    assert abs(default.loss - theirs.loss) > 0.01 * abs(theirs.loss)


def test_slimes_geometric_level_is_our_sequence_weight_and_its_sequence_level_is_not() -> None:
    """--custom-tis-function-path with mis.py, tis_level `geometric` and `sequence`."""
    batch, rollout, _ = engines(drift=0.1)
    count, width = batch.mask.shape
    ids = torch.arange(count).repeat_interleave(width)
    our = sequence_importance_weights(
        batch.old_log_probs.flatten(),
        rollout.flatten(),
        Segments(batch.mask.flatten(), ids, count),
        threshold=5.0,
    ).view(count, width)
    for i in range(count):
        d = [float(batch.old_log_probs[i, t] - rollout[i, t]) for t in trained(batch, i)]
        assert our[i, 0].item() == pytest.approx(math.exp(sum(d) / len(d)), rel=1e-12)
        assert len(d) == 1 or abs(our[i, 0].item() - math.exp(sum(d))) > 1e-3


def test_the_page_links_the_sources() -> None:
    page = (Path(__file__).parents[2] / "docs" / "peers.md").read_text(encoding="utf-8")
    assert [source for source in SOURCES if source not in page] == []
