"""The published algorithms, each one row of fields."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from .objective import Objective

PRESETS: dict[str, dict[str, Any]] = {
    # Zheng et al. 2025, arXiv:2507.18071, section 4.1; clip from section 5.1.
    "gspo": dict(
        importance_sampling_level="sequence", aggregation="sequence_mean", epsilon_low=3e-4, epsilon_high=4e-4
    ),
    # The same paper, section 4.3: an advantage per token, the same ratio.
    "gspo_token": dict(
        importance_sampling_level="sequence_token",
        aggregation="sequence_mean",
        epsilon_low=3e-4,
        epsilon_high=4e-4,
    ),
    # Shao et al. 2024, arXiv:2402.03300; clip as in the comparison of the GSPO paper, section 5.1. No KL term
    # there.
    "grpo": dict(
        importance_sampling_level="token", aggregation="sequence_mean", epsilon_low=0.2, epsilon_high=0.27
    ),
    # Liu et al. 2025, arXiv:2503.20783: neither length nor std normalisation. constant_length only scales the
    # loss; set it to the longest response that you allow.
    "dr_grpo": dict(
        importance_sampling_level="token",
        aggregation="constant",
        constant_length=1024,
        epsilon_low=0.2,
        epsilon_high=0.2,
        advantage_std="none",
    ),
    # Yu et al. 2025, arXiv:2503.14476: clip-higher and token mean. Its dynamic sampling and overlong penalty
    # are in filters.
    "dapo": dict(
        importance_sampling_level="token", aggregation="token_mean", epsilon_low=0.2, epsilon_high=0.28
    ),
    # Supervised: -log_probs, weighted by advantages (1 where there are none).
    "sft": dict(importance_sampling_level="none", aggregation="token_mean"),
}


def preset(name: str, **overrides: Any) -> Objective:
    """The objective of a published algorithm, with any field replaced.

    Args:
        name: gspo, gspo_token, grpo, dr_grpo, dapo or sft.
        overrides: fields of `Objective`; also `research_override=True`.

    Raises:
        ValueError: unknown name or field, or a field that makes another algorithm of it; one line with the
            fix.
    """
    if name not in PRESETS:
        raise ValueError(f"preset name = {name!r}: choose one of {', '.join(PRESETS)}")
    known = [f.name for f in fields(Objective) if f.name != "name"]
    for key, value in overrides.items():
        if key not in known:
            raise ValueError(
                f"{key} = {value!r} is no field of an objective: choose among {', '.join(known)}"
            )
    return Objective(name=name, **{**PRESETS[name], **overrides})
