"""The published algorithms, each one row of fields of `Objective`."""

from __future__ import annotations

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    # Zheng et al. 2025, arXiv:2507.18071, section 4.1; clip from section 5.1.
    "gspo": dict(
        importance_sampling_level="sequence",
        surrogate="clip",
        loss_agg_mode="seq-mean-token-mean",
        epsilon_low=3e-4,
        epsilon_high=4e-4,
    ),
    # The same paper, section 4.3: an advantage per token, the same ratio.
    "gspo_token": dict(
        importance_sampling_level="sequence_token",
        surrogate="clip",
        loss_agg_mode="seq-mean-token-mean",
        epsilon_low=3e-4,
        epsilon_high=4e-4,
    ),
    # Shao et al. 2024, arXiv:2402.03300; clip as in the comparison of the GSPO paper, section 5.1.
    # No KL term there.
    "grpo": dict(
        importance_sampling_level="token",
        surrogate="clip",
        loss_agg_mode="seq-mean-token-mean",
        epsilon_low=0.2,
        epsilon_high=0.27,
    ),
    # Liu et al. 2025, arXiv:2503.20783: neither length nor std normalisation. loss_scale_factor
    # only scales the loss and is not part of the algorithm: the caller sets it, usually to the
    # longest response allowed. A run's config takes rollout.max_response_length.
    "dr_grpo": dict(
        importance_sampling_level="token",
        surrogate="clip",
        loss_agg_mode="seq-mean-token-sum-norm",
        epsilon_low=0.2,
        epsilon_high=0.2,
        advantage_std="none",
    ),
    # Yu et al. 2025, arXiv:2503.14476: clip-higher and token mean. Its dynamic sampling and
    # overlong penalty are in filters.
    "dapo": dict(
        importance_sampling_level="token",
        surrogate="clip",
        loss_agg_mode="token-mean",
        epsilon_low=0.2,
        epsilon_high=0.28,
    ),
    # Zhao et al. 2025, arXiv:2507.20673: the geometric mean of clipped token ratios; epsilon in
    # nats, section 4.
    "gmpo": dict(
        importance_sampling_level="geometric_mean",
        surrogate="clip",
        loss_agg_mode="seq-mean-token-mean",
        epsilon_low=0.4,
        epsilon_high=0.4,
    ),
    # arXiv:2602.05261: GSPO times the length of the response, so that a token counts the same in
    # all of them. Clip as in GSPO.
    "luspo": dict(
        importance_sampling_level="sequence",
        surrogate="clip",
        loss_agg_mode="seq-mean-token-sum-norm",
        loss_scale_factor=1.0,
        epsilon_low=3e-4,
        epsilon_high=4e-4,
    ),
    # MiniMax 2025, arXiv:2506.13585, eq. 4 and 5: no lower bound. It gives no upper bound; 5 is of
    # ScaleRL, arXiv:2510.13786.
    "cispo": dict(
        importance_sampling_level="token",
        surrogate="cispo",
        loss_agg_mode="token-mean",
        max_weight=5.0,
    ),
    # Gao et al. 2025, arXiv:2511.20347.
    "sapo": dict(
        importance_sampling_level="token",
        surrogate="sapo",
        loss_agg_mode="seq-mean-token-mean",
        tau_pos=1.0,
        tau_neg=1.05,
    ),
    # arXiv:2602.04879; threshold and truncation as in verl.
    "dppo_tv": dict(
        importance_sampling_level="token",
        surrogate="dppo_tv",
        loss_agg_mode="token-mean",
        divergence_threshold=0.15,
        max_weight=20.0,
    ),
    "dppo_kl": dict(
        importance_sampling_level="token",
        surrogate="dppo_kl",
        loss_agg_mode="token-mean",
        divergence_threshold=0.05,
        max_weight=20.0,
    ),
    # Qwen 2025, arXiv:2512.01374, eq. 7 and section 4.2: a sum over tokens, truncated at 5,
    # advantages without std.
    "minirl": dict(
        importance_sampling_level="token",
        surrogate="minirl",
        loss_agg_mode="seq-mean-token-sum-norm",
        loss_scale_factor=1.0,
        epsilon_low=0.2,
        epsilon_high=0.27,
        max_weight=5.0,
        advantage_std="none",
    ),
    # Schulman et al. 2017, arXiv:1707.06347; clip of section 6.1, lambda of table 3. No discount,
    # as in verl.
    "ppo": dict(
        importance_sampling_level="token",
        surrogate="clip",
        loss_agg_mode="token-mean",
        epsilon_low=0.2,
        epsilon_high=0.2,
        advantage_estimator="gae",
        lam=0.95,
    ),
    # Supervised: -log_probs, weighted by advantages (1 where there are none).
    "sft": dict(importance_sampling_level="none", loss_agg_mode="token-mean"),
}

# Named settings of a run's keys rollout_is* and rollout_rs*.
CORRECTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    # Truncated importance sampling, https://fengyao.notion.site/off-policy-rl.
    "token_tis": dict(rollout_is="token", rollout_is_threshold=2.0),
    # The same with a lower bound, as GLM-5.2 was trained.
    "bounded_token_tis": dict(
        rollout_is="token", rollout_is_threshold=2.0, rollout_is_threshold_lower=0.5
    ),
    # arXiv:2510.18855: A * rho where rho is inside the band, else 0; denominators count all tokens.
    "icepop": dict(
        rollout_is="token",
        rollout_is_threshold=5.0,
        rollout_rs="token",
        rollout_rs_threshold=5.0,
        rollout_rs_threshold_lower=0.5,
        rollout_rs_denominator="all",
    ),
    # arXiv:2605.14220.
    "k3_rejection_token_tis": dict(
        rollout_is="token",
        rollout_is_threshold=2.0,
        rollout_rs="sequence_k3",
        rollout_rs_divergence=0.001,
    ),
}
