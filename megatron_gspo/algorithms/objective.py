"""The policy objective as a typed value, and the checks of its fields."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from .advantages import AdvantageBaseline, AdvantageStd

ImportanceSamplingLevel = Literal["token", "sequence", "sequence_token", "none"]
LossAggMode = Literal["seq-mean-token-mean", "token-mean", "seq-mean-token-sum-norm"]
KLLossType = Literal["k1", "k2", "k3"]

# The clip range depends on the ratio level. A token ratio changes by tens of percent within one rollout batch
# (published clip 0.2 / 0.27). A sequence ratio is a geometric mean over |y| tokens and changes about sqrt(|y|)
# times less (published clip 3e-4 / 4e-4). With the two exchanged, 0.2 never clips a sequence and 3e-4 clips
# nearly every token. The bounds leave room on both sides: 0.1 is the token clip of 0.2 for a response of only
# 4 tokens, 0.01 is a twentieth of the usual token clip, and near a ratio of 1 float32 has about ten steps
# within 1e-6.
MAX_SEQUENCE_EPSILON = 0.1
MIN_SEQUENCE_EPSILON = 1e-6
MIN_TOKEN_EPSILON = 0.01

# The fields that define each published algorithm, with the allowed values.
IDENTITY: dict[str, dict[str, tuple[str, ...]]] = {
    "gspo": {"importance_sampling_level": ("sequence",), "loss_agg_mode": ("seq-mean-token-mean",)},
    "gspo_token": {"importance_sampling_level": ("sequence_token",), "loss_agg_mode": ("seq-mean-token-mean",)},
    "grpo": {"importance_sampling_level": ("token",), "loss_agg_mode": ("seq-mean-token-mean",)},
    "dr_grpo": {
        "importance_sampling_level": ("token",),
        "loss_agg_mode": ("seq-mean-token-sum-norm",),
        "advantage_std": ("none",),
    },
    "dapo": {"importance_sampling_level": ("token",), "loss_agg_mode": ("token-mean",)},
    "sft": {"importance_sampling_level": ("none",), "loss_agg_mode": ("token-mean", "seq-mean-token-mean")},
}

_CHOICES = {
    "importance_sampling_level": get_args(ImportanceSamplingLevel),
    "loss_agg_mode": get_args(LossAggMode),
    "kl_loss_type": get_args(KLLossType),
    "advantage_std": get_args(AdvantageStd),
    "advantage_baseline": get_args(AdvantageBaseline),
}
_OVERRIDE = "or set allow_nonstandard=True"


@dataclass(frozen=True)
class Objective:
    """The objective of an optimizer step. Built by `preset`, or directly for a new algorithm.

    Raises:
        ValueError: invalid fields; one line with the field, its value, the problem and the fix.
    """

    name: str
    """A published algorithm (a key of IDENTITY), which the other fields must then match, or a name of your own."""

    importance_sampling_level: ImportanceSamplingLevel
    """Importance ratio. `token`: per token. `sequence`: length-normalised, per response, as the advantage.
    `sequence_token`: the same ratio with an advantage per token (GSPO-token). `none`: the objective is
    advantage * log-prob."""

    loss_agg_mode: LossAggMode
    """Aggregation of token losses. `seq-mean-token-mean`: mean over a response's trained tokens, then over responses.
    `token-mean`: over all trained tokens. `seq-mean-token-sum-norm`: sum over tokens / (responses *
    loss_scale_factor)."""

    loss_scale_factor: float | None = None
    """Divisor of `seq-mean-token-sum-norm` in tokens, usually the longest response."""

    epsilon_low: float | None = None
    """Ratios are clipped below 1 - epsilon_low."""

    epsilon_high: float | None = None
    """Ratios are clipped above 1 + epsilon_high."""

    dual_clip: float | None = None
    """c > 1: the objective is at least c * A where A < 0 (arXiv:1912.09729)."""

    kl_loss_coef: float = 0.0
    """Weight of the KL to the reference policy in the loss."""

    kl_loss_type: KLLossType = "k3"
    """Estimator of that KL: k1, k2 or k3."""

    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""

    max_log_ratio: float = 20.0
    """Log-ratios are clamped to +-this before exp, in nats."""

    advantage_std: AdvantageStd = "sample"
    """Standard deviation that divides a group's rewards: `sample` (n - 1), `population` (n) or `none`."""

    advantage_baseline: AdvantageBaseline = "mean"
    """Baseline of a reward: its group's `mean`, or the mean of the others (`leave_one_out`)."""

    allow_nonstandard: bool = False
    """Allow another algorithm than the name, or a clip range of the other ratio level."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"name = {self.name!r}: must be a non-empty string, such as one of {', '.join(IDENTITY)}")
        if not isinstance(self.allow_nonstandard, bool):
            raise ValueError(f"allow_nonstandard = {self.allow_nonstandard!r}: must be True or False")
        for key, choices in _CHOICES.items():
            if getattr(self, key) not in choices:
                raise ValueError(f"{key} = {getattr(self, key)!r}: must be one of {', '.join(choices)}")
        _check_numbers(self)
        if not self.allow_nonstandard:
            _check_identity(self)
        _check_fields_fit(self)
        if not self.allow_nonstandard:
            _check_clip_scale(self)

    @property
    def has_ratio(self) -> bool:
        """Whether old log-probs are needed."""
        return self.importance_sampling_level != "none"

    @property
    def sequence_level(self) -> bool:
        """Whether all tokens of a response share one ratio."""
        return self.importance_sampling_level in ("sequence", "sequence_token")

    @property
    def clip_range(self) -> tuple[float, float]:
        """`(1 - epsilon_low, 1 + epsilon_high)`; ValueError where there is no ratio."""
        if self.epsilon_low is None or self.epsilon_high is None:
            raise ValueError(f"importance_sampling_level = 'none' ({self.name}) has no clip range")
        return 1 - self.epsilon_low, 1 + self.epsilon_high


# key: (accepts, requirement)
_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "loss_scale_factor": (lambda v: 0 < v < math.inf, "a positive number of tokens"),
    "epsilon_low": (lambda v: 0 < v <= 1, "above 0 and at most 1"),
    "epsilon_high": (lambda v: v > 0, "above 0"),
    "dual_clip": (lambda v: 1 < v < math.inf, "above 1, or None to turn it off"),
    "kl_loss_coef": (lambda v: 0 <= v < math.inf, "0 or above"),
    "entropy_coef": (lambda v: 0 <= v < math.inf, "0 or above"),
    "max_log_ratio": (lambda v: 0 < v <= 80, "above 0 and at most 80 (exp overflows float32 at 88)"),
}
_OPTIONAL = ("loss_scale_factor", "epsilon_low", "epsilon_high", "dual_clip")


def _check_numbers(o: Objective) -> None:
    """Types and ranges that hold for every algorithm."""
    for key, (accepts, requirement) in _RANGES.items():
        value = getattr(o, key)
        if value is None and key in _OPTIONAL:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not accepts(value):
            raise ValueError(f"{key} = {value!r}: must be {requirement}")


def _check_fields_fit(o: Objective) -> None:
    """Fields that contradict each other, or that another field requires."""
    if o.loss_agg_mode != "seq-mean-token-sum-norm" and o.loss_scale_factor is not None:
        raise ValueError(
            f"loss_scale_factor = {o.loss_scale_factor!r} has no effect with loss_agg_mode = {o.loss_agg_mode!r}: "
            "remove it, or use 'seq-mean-token-sum-norm'"
        )
    for key in ("epsilon_low", "epsilon_high"):
        if o.has_ratio and getattr(o, key) is None:
            raise ValueError(
                f"{key} = None with importance_sampling_level = {o.importance_sampling_level!r}: set a clip range"
            )
    for key in ("epsilon_low", "epsilon_high", "dual_clip"):
        if not o.has_ratio and getattr(o, key) is not None:
            raise ValueError(
                f"{key} = {getattr(o, key)!r} has no effect with importance_sampling_level = 'none': remove it, "
                "there is no ratio to clip"
            )


def _check_identity(o: Objective) -> None:
    """A published name keeps its meaning, and no sequence ratio is weighted by its tokens."""
    for key, allowed in IDENTITY.get(o.name, {}).items():
        if getattr(o, key) not in allowed:
            raise ValueError(
                f"{key} = {getattr(o, key)!r} is not {o.name}: use {' or '.join(map(repr, allowed))}, "
                f"another name, {_OVERRIDE}"
            )
    if o.sequence_level and o.loss_agg_mode != "seq-mean-token-mean":
        raise ValueError(
            f"loss_agg_mode = {o.loss_agg_mode!r} weights a sequence ratio by response length, which is not GSPO: "
            f"use 'seq-mean-token-mean', {_OVERRIDE}"
        )


def _check_clip_scale(o: Objective) -> None:
    """The clip range has the scale of its ratio level."""
    for key, published in (("epsilon_low", "3e-4"), ("epsilon_high", "4e-4")):
        value = getattr(o, key)
        if o.sequence_level and not MIN_SEQUENCE_EPSILON <= value <= MAX_SEQUENCE_EPSILON:
            raise ValueError(
                f"{key} = {value!r} is outside the clip range of a sequence ratio ({o.name}, {MIN_SEQUENCE_EPSILON:g} "
                f"to {MAX_SEQUENCE_EPSILON:g}): use about {published}, {_OVERRIDE}"
            )
        if o.importance_sampling_level == "token" and value < MIN_TOKEN_EPSILON:
            raise ValueError(
                f"{key} = {value!r} is outside the clip range of a token ratio ({o.name}, {MIN_TOKEN_EPSILON:g} or "
                f"more): use about 0.2, {_OVERRIDE}"
            )
