"""The table of published settings. What an Objective refuses is in test_objective_checks.py."""

import dataclasses

import pytest

from megatron_gspo.algorithms import PRESETS, preset


def test_published_settings():
    rows = {
        "gspo": ("sequence", "seq-mean-token-mean", 3e-4, 4e-4),
        "gspo_token": ("sequence_token", "seq-mean-token-mean", 3e-4, 4e-4),
        "grpo": ("token", "seq-mean-token-mean", 0.2, 0.27),
        "dr_grpo": ("token", "seq-mean-token-sum-norm", 0.2, 0.2),
        "dapo": ("token", "token-mean", 0.2, 0.28),
        "gmpo": ("geometric_mean", "seq-mean-token-mean", 0.4, 0.4),
        "luspo": ("sequence", "seq-mean-token-sum-norm", 3e-4, 4e-4),
        "cispo": ("token", "token-mean", None, None),
        "sapo": ("token", "seq-mean-token-mean", None, None),
        "dppo_tv": ("token", "token-mean", None, None),
        "dppo_kl": ("token", "token-mean", None, None),
        "minirl": ("token", "seq-mean-token-sum-norm", 0.2, 0.27),
        "ppo": ("token", "token-mean", 0.2, 0.2),
        "sft": ("none", "token-mean", None, None),
    }
    assert set(PRESETS) == set(rows)
    for name, row in rows.items():
        o = preset(name)
        assert (o.importance_sampling_level, o.loss_agg_mode, o.epsilon_low, o.epsilon_high) == row
        assert (o.kl_loss_coef, o.entropy_coef, o.dual_clip) == (0, 0, None)
        assert (o.log_ratio_coef, o.off_policy_mask_threshold, o.unbiased_kl) == (0, None, False)
        assert o.surrogate == (
            name if name in ("cispo", "sapo", "dppo_tv", "dppo_kl", "minirl") else "clip"
        )
    assert preset("luspo").loss_scale_factor == preset("minirl").loss_scale_factor == 1
    assert preset("minirl").max_weight == 5
    assert (preset("cispo").min_weight, preset("cispo").max_weight) == (None, 5)
    assert (preset("sapo").tau_pos, preset("sapo").tau_neg) == (1, 1.05)
    assert (preset("dppo_tv").divergence_threshold, preset("dppo_tv").max_weight) == (0.15, 20)
    assert (preset("dppo_kl").divergence_threshold, preset("dppo_kl").max_weight) == (0.05, 20)
    assert preset("dr_grpo").advantage_std == preset("minirl").advantage_std == "none"
    for name in rows:
        estimator = (preset(name).advantage_estimator, preset(name).gamma, preset(name).lam)
        assert estimator == (("gae", 1, 0.95) if name == "ppo" else ("group", 1, 1))
    assert {preset(name).advantage_std for name in rows if name not in ("dr_grpo", "minirl")} == {
        "sample"
    }


def test_any_field_may_be_overridden_and_the_value_is_frozen():
    o = preset(
        "grpo",
        epsilon_high=0.3,
        kl_loss_coef=0.01,
        kl_loss_type="k2",
        dual_clip=3,
        advantage_std="none",
    )
    assert (o.epsilon_high, o.kl_loss_coef, o.kl_loss_type, o.dual_clip) == (0.3, 0.01, "k2", 3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        o.epsilon_low = 0.1
    for name in ("sft", "dppo_tv", "dppo_kl"):
        assert (
            preset(name, loss_agg_mode="seq-mean-token-mean").loss_agg_mode == "seq-mean-token-mean"
        )
    # a range justified by measured ratios of short answers
    assert preset("gspo", epsilon_low=0.02, epsilon_high=0.03).clip_range == (0.98, 1.03)


def test_the_scale_of_dr_grpo_is_the_callers():
    assert preset("dr_grpo").loss_scale_factor is None
    assert preset("dr_grpo", loss_scale_factor=2048).loss_scale_factor == 2048
