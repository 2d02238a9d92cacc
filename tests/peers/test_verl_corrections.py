"""verl's importance weights and rejection masks (verl.trainer.ppo.rollout_corr_helper) on the
same log-probs.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_gspo.algorithms import (
    preset,
    sequence_divergence_mask,
    sequence_importance_weights,
    sequence_rejection_mask,
    token_importance_weights,
    token_rejection_mask,
)
from megatron_gspo.algorithms.segments import Segments
from megatron_gspo.objectives.presets import CORRECTIONS

from .batch import Padded, assert_same, make_batch, ours

verl = pytest.importorskip(
    "verl.trainer.ppo.rollout_corr_helper",
    reason="verl is not installed: make test-peers brings it",
    exc_type=ImportError,
)
core_algos = pytest.importorskip("verl.trainer.ppo.core_algos", exc_type=ImportError)
from verl.workers.config import ActorConfig  # noqa: E402

# Standard deviation of old - rollout, so that each setting below keeps some and rejects some.
DRIFT = {"token": 0.7, "sequence": 0.05, "sequence_k3": 0.05}


def engines(kind: str) -> tuple[Padded, Tensor, Segments]:
    """A batch, the rollout engine's log-probs [B, R], and its responses as our packed sequences."""
    batch = make_batch(drift=0.2)
    count, width = batch.mask.shape
    g = torch.Generator().manual_seed(3)
    noise = torch.randn(count, 1, generator=g, dtype=torch.float64) + torch.randn(
        batch.mask.shape, generator=g, dtype=torch.float64
    )
    rollout = batch.old_log_probs + DRIFT[kind] * noise
    ids = torch.arange(count).repeat_interleave(width)
    return batch, rollout, Segments(batch.mask.flatten(), ids, count)


def flat(batch: Padded, rollout: Tensor) -> tuple[Tensor, Tensor]:
    return batch.old_log_probs.flatten(), rollout.flatten()


def verl_kept(batch: Padded, rollout: Tensor, option: str, threshold: str | float) -> Tensor:
    kept, _ = verl.compute_rollout_rejection_mask(
        batch.old_log_probs - rollout, batch.mask, rollout_rs=option, rollout_rs_threshold=threshold
    )
    return kept.bool()


def verl_weights(batch: Padded, rollout: Tensor, level: str, threshold: str | float) -> Tensor:
    weights, _ = verl.compute_rollout_correction_weights(
        batch.old_log_probs - rollout, batch.mask, rollout_is=level, rollout_is_threshold=threshold
    )
    return weights


def assert_weights(theirs: Tensor, our: Tensor, batch: Padded) -> None:
    """At trained tokens; verl has 0 elsewhere, ours 1."""
    torch.testing.assert_close(
        our.view_as(theirs)[batch.mask > 0], theirs[batch.mask > 0], rtol=1e-12, atol=0
    )


def assert_kept(theirs: Tensor, our: Tensor, batch: Padded) -> None:
    assert torch.equal(theirs, our.view_as(theirs))
    assert 0 < theirs.sum() < batch.num_tokens


def test_truncated_weights_by_token_are_equal() -> None:
    batch, rollout, segments = engines("token")
    theirs = verl_weights(batch, rollout, "token", 2.0)
    assert (theirs == 2).any()
    assert_weights(
        theirs, token_importance_weights(*flat(batch, rollout), segments.loss_mask), batch
    )


def test_two_bounds_are_icepop_there_and_a_clamp_here() -> None:
    """verl's `rollout_is_threshold: 0.5_5.0` is our preset `icepop`, in weights, loss and gradient:
    its denominators count the tokens of weight 0."""
    batch, rollout, segments = engines("token")
    fields = CORRECTIONS["icepop"]
    theirs = verl_weights(batch, rollout, "token", "0.5_5.0")
    weights = token_importance_weights(
        *flat(batch, rollout), segments.loss_mask, threshold=fields["rollout_is_threshold"]
    )
    kept = token_rejection_mask(
        *flat(batch, rollout),
        segments.loss_mask,
        lower=fields["rollout_rs_threshold_lower"],
        upper=fields["rollout_rs_threshold"],
    )
    assert_kept((theirs > 0) & (batch.mask > 0), kept, batch)
    assert_weights(theirs, weights * kept, batch)
    clamped = token_importance_weights(
        *flat(batch, rollout), segments.loss_mask, threshold=5.0, lower=0.5
    )
    assert (clamped.view_as(theirs)[(theirs == 0) & (batch.mask > 0)] > 0).all()

    leaf = batch.log_probs.clone().requires_grad_()
    config = ActorConfig(
        strategy="megatron",
        rollout_n=4,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=0.2,
        clip_ratio_high=0.27,
        clip_ratio_c=1e9,
    )
    loss, _ = core_algos.get_policy_loss_fn("vanilla")(
        batch.old_log_probs,
        leaf,
        batch.advantages[:, None] * torch.ones_like(leaf),
        batch.mask,
        loss_agg_mode="seq-mean-token-mean",
        config=config,
        rollout_is_weights=theirs,
    )
    our = ours(
        preset("grpo"),
        replace(batch, advantages=batch.advantages[:, None] * (weights * kept).view_as(theirs)),
    )
    (gradient,) = torch.autograd.grad(loss, leaf)
    assert_same(replace(our, loss=loss.item(), gradient=gradient), our)


def test_the_weight_of_a_sequence_is_the_product_there_and_the_geometric_mean_here() -> None:
    batch, rollout, segments = engines("sequence")
    theirs = verl_weights(batch, rollout, "sequence", 1e6)
    our = sequence_importance_weights(*flat(batch, rollout), segments, threshold=1e6)
    lengths = batch.mask.sum(1, keepdim=True).double()
    assert_weights(theirs, our.view_as(theirs) ** lengths, batch)
    assert ((our.view_as(theirs) - theirs).abs() > 1e-3)[(batch.mask > 0) & (lengths > 1)].all()


@pytest.mark.parametrize("upper", [1.5, 2.0, 4.0])
def test_rejection_by_token_is_token_k1(upper: float) -> None:
    batch, rollout, segments = engines("token")
    our = token_rejection_mask(
        *flat(batch, rollout), segments.loss_mask, lower=1 / upper, upper=upper
    )
    assert_kept(verl_kept(batch, rollout, "token_k1", upper), our, batch)


@pytest.mark.parametrize("upper", [1.02, 1.05])
def test_rejection_by_the_geometric_mean_is_seq_mean_k1(upper: float) -> None:
    batch, rollout, segments = engines("sequence")
    our = sequence_rejection_mask(*flat(batch, rollout), segments, lower=1 / upper, upper=upper)
    assert_kept(verl_kept(batch, rollout, "seq_mean_k1", upper), our, batch)


def test_the_two_bounds_of_k1_are_those_of_the_inverse_ratio_there() -> None:
    """verl compares rollout / old with them, ours old / rollout: the same only where lower is 1
    / upper.
    """
    batch, rollout, segments = engines("token")
    theirs = verl_kept(batch, rollout, "token_k1", "0.5_5.0")
    mirrored = token_rejection_mask(
        *flat(batch, rollout), segments.loss_mask, lower=1 / 5, upper=1 / 0.5
    )
    assert_kept(theirs, mirrored, batch)
    same = token_rejection_mask(*flat(batch, rollout), segments.loss_mask, lower=0.5, upper=5.0)
    assert not torch.equal(theirs, same.view_as(theirs))


@pytest.mark.parametrize("largest", [0.0007, 0.001])
def test_rejection_by_k3_is_seq_mean_k3(largest: float) -> None:
    batch, rollout, segments = engines("sequence_k3")
    our = sequence_divergence_mask(*flat(batch, rollout), segments, largest=largest)
    assert_kept(verl_kept(batch, rollout, "seq_mean_k3", largest), our, batch)


def test_token_truncation_with_k3_rejection() -> None:
    """Our preset `k3_rejection_token_tis` is `rollout_is: token` with `rollout_rs: seq_mean_k3`.
    The weights of what is left are the same, and the denominators, which verl takes from the new
    mask."""
    batch, rollout, segments = engines("sequence_k3")
    fields = CORRECTIONS["k3_rejection_token_tis"]
    theirs, mask, _ = verl.compute_rollout_correction_and_rejection_mask(
        batch.old_log_probs,
        rollout,
        batch.mask,
        rollout_is="token",
        rollout_is_threshold=2.0,
        rollout_rs="seq_mean_k3",
        rollout_rs_threshold=0.001,
    )
    kept = sequence_divergence_mask(
        *flat(batch, rollout), segments, largest=fields["rollout_rs_divergence"]
    )
    weights = token_importance_weights(
        *flat(batch, rollout), segments.loss_mask, threshold=fields["rollout_is_threshold"]
    )
    assert_kept(mask.bool(), kept, batch)
    assert_weights(theirs.batch["rollout_is_weights"], weights, replace(batch, mask=mask))


def test_the_ratio_is_limited_to_20_nats_there() -> None:
    batch, rollout, segments = engines("token")
    rollout[0, 0] = batch.old_log_probs[0, 0] - 25
    theirs = verl_weights(batch, rollout, "token", 1e12)[0, 0].item()
    our = token_importance_weights(*flat(batch, rollout), segments.loss_mask, threshold=1e12)[
        0
    ].item()
    assert theirs == pytest.approx(math.exp(20)) and our == pytest.approx(math.exp(25))
