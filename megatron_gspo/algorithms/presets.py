"""The published algorithms, each one row of fields."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from .objective import Objective

PRESETS: dict[str, dict[str, Any]] = {
    # Zheng et al. 2025, arXiv:2507.18071, section 4.1; clip from section 5.1.
    "gspo": dict(
        importance_sampling_level="sequence", loss_agg_mode="seq-mean-token-mean", epsilon_low=3e-4, epsilon_high=4e-4
    ),
    # The same paper, section 4.3: an advantage per token, the same ratio.
    "gspo_token": dict(
        importance_sampling_level="sequence_token",
        loss_agg_mode="seq-mean-token-mean",
        epsilon_low=3e-4,
        epsilon_high=4e-4,
    ),
    # Shao et al. 2024, arXiv:2402.03300; clip as in the comparison of the GSPO paper, section 5.1. No KL term
    # there.
    "grpo": dict(
        importance_sampling_level="token", loss_agg_mode="seq-mean-token-mean", epsilon_low=0.2, epsilon_high=0.27
    ),
    # Liu et al. 2025, arXiv:2503.20783: neither length nor std normalisation. loss_scale_factor only scales the
    # loss and is not part of the algorithm: the caller sets it, usually to the longest response allowed. A run's
    # config takes rollout.max_response_length.
    "dr_grpo": dict(
        importance_sampling_level="token",
        loss_agg_mode="seq-mean-token-sum-norm",
        epsilon_low=0.2,
        epsilon_high=0.2,
        advantage_std="none",
    ),
    # Yu et al. 2025, arXiv:2503.14476: clip-higher and token mean. Its dynamic sampling and overlong penalty
    # are in filters.
    "dapo": dict(
        importance_sampling_level="token", loss_agg_mode="token-mean", epsilon_low=0.2, epsilon_high=0.28
    ),
    # Supervised: -log_probs, weighted by advantages (1 where there are none).
    "sft": dict(importance_sampling_level="none", loss_agg_mode="token-mean"),
}


def preset(name: str, **overrides: Any) -> Objective:
    """The objective of a published algorithm, with any field replaced.

    Args:
        name: gspo, gspo_token, grpo, dr_grpo, dapo or sft.
        overrides: fields of `Objective`. `dr_grpo` needs loss_scale_factor before its loss is computed.

    Raises:
        ValueError: unknown name or field, or a value that makes it another algorithm; one line with the fix.
    """
    if name not in PRESETS:
        raise ValueError(f"preset name = {name!r}: must be one of {', '.join(PRESETS)}")
    known = [f.name for f in fields(Objective) if f.name != "name"]
    for key, value in overrides.items():
        if key not in known:
            raise ValueError(
                f"{key} = {value!r} is not a field of Objective: must be one of {', '.join(known)}"
            )
    return Objective(name=name, **{**PRESETS[name], **overrides})
