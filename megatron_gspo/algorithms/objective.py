"""The policy objective as a typed value, and the checks of its fields."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from .advantages import AdvantageBaseline, AdvantageStd

ImportanceSamplingLevel = Literal["token", "sequence", "sequence_token", "geometric_mean", "none"]
SurrogateType = Literal["clip", "cispo", "sapo", "dppo_tv", "dppo_kl"]
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
    "gspo": {
        "surrogate": ("clip",),
        "importance_sampling_level": ("sequence",),
        "loss_agg_mode": ("seq-mean-token-mean",),
    },
    "gspo_token": {
        "surrogate": ("clip",),
        "importance_sampling_level": ("sequence_token",),
        "loss_agg_mode": ("seq-mean-token-mean",),
    },
    "grpo": {
        "surrogate": ("clip",),
        "importance_sampling_level": ("token",),
        "loss_agg_mode": ("seq-mean-token-mean",),
    },
    "dr_grpo": {
        "surrogate": ("clip",),
        "importance_sampling_level": ("token",),
        "loss_agg_mode": ("seq-mean-token-sum-norm",),
        "advantage_std": ("none",),
    },
    "dapo": {"surrogate": ("clip",), "importance_sampling_level": ("token",), "loss_agg_mode": ("token-mean",)},
    "gmpo": {
        "surrogate": ("clip",),
        "importance_sampling_level": ("geometric_mean",),
        "loss_agg_mode": ("seq-mean-token-mean",),
    },
    "luspo": {
        "surrogate": ("clip",),
        "importance_sampling_level": ("sequence",),
        "loss_agg_mode": ("seq-mean-token-sum-norm",),
    },
    "cispo": {
        "importance_sampling_level": ("token",),
        "surrogate": ("cispo",),
        "loss_agg_mode": ("token-mean",),
    },
    "sapo": {
        "importance_sampling_level": ("token",),
        "surrogate": ("sapo",),
        "loss_agg_mode": ("seq-mean-token-mean",),
    },
    "dppo_tv": {"importance_sampling_level": ("token",), "surrogate": ("dppo_tv",)},
    "dppo_kl": {"importance_sampling_level": ("token",), "surrogate": ("dppo_kl",)},
    "sft": {"importance_sampling_level": ("none",), "loss_agg_mode": ("token-mean", "seq-mean-token-mean")},
}

# The fields that each surrogate reads: those that it needs, and those that may be None.
SURROGATE_FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "clip": (("epsilon_low", "epsilon_high"), ("dual_clip",)),
    "cispo": (("max_weight",), ("min_weight",)),
    "sapo": (("tau_pos", "tau_neg"), ()),
    "dppo_tv": (("divergence_threshold", "max_weight"), ()),
    "dppo_kl": (("divergence_threshold", "max_weight"), ()),
}

_CHOICES = {
    "importance_sampling_level": get_args(ImportanceSamplingLevel),
    "surrogate": get_args(SurrogateType),
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
    `sequence_token`: the same ratio with an advantage per token (GSPO-token). `geometric_mean`: per response, of token
    ratios that are clipped first (GMPO). `none`: the objective is advantage * log-prob."""

    loss_agg_mode: LossAggMode
    """Aggregation of token losses. `seq-mean-token-mean`: mean over a response's trained tokens, then over responses.
    `token-mean`: over all trained tokens. `seq-mean-token-sum-norm`: sum over tokens / (responses *
    loss_scale_factor)."""

    loss_scale_factor: float | None = None
    """Divisor of `seq-mean-token-sum-norm` in tokens, usually the longest response."""

    surrogate: SurrogateType = "clip"
    """What becomes of ratio and advantage. `clip`: PPO's clipped product. `cispo`: log-prob times a truncated weight
    (CISPO). `sapo`: a soft gate of the ratio (SAPO). `dppo_tv`, `dppo_kl`: log-prob times a truncated weight, 0 where
    the token's probability has moved too far (DPPO)."""

    epsilon_low: float | None = None
    """Ratios are clipped below 1 - epsilon_low; log-ratios below -epsilon_low at level `geometric_mean`."""

    epsilon_high: float | None = None
    """Ratios are clipped above 1 + epsilon_high; log-ratios above epsilon_high at level `geometric_mean`."""

    max_weight: float | None = None
    """Maximum of the weight of `cispo`, `dppo_tv` and `dppo_kl`, which is the ratio without gradient."""

    min_weight: float | None = None
    """Minimum of the weight of `cispo`; None is 0."""

    tau_pos: float | None = None
    """Temperature of the gate of `sapo` where A > 0."""

    tau_neg: float | None = None
    """Temperature of the gate of `sapo` where A <= 0."""

    divergence_threshold: float | None = None
    """Largest change of a token's probability (`dppo_tv`), or binary KL in nats (`dppo_kl`), in the direction of the
    advantage."""

    dual_clip: float | None = None
    """c > 1: the objective is at least c * A where A < 0 (arXiv:1912.09729)."""

    off_policy_mask_threshold: float | None = None
    """Tokens with A < 0 don't count if mean(old log-prob - log-prob) of their sequence is above this, in nats
    (arXiv:2512.02556). Denominators are unchanged."""

    log_ratio_coef: float = 0.0
    """Weight of the squared token log-ratio in the loss (arXiv:2602.02276)."""

    kl_loss_coef: float = 0.0
    """Weight of the KL to the reference policy in the loss."""

    kl_loss_type: KLLossType = "k3"
    """Estimator of that KL: k1, k2 or k3."""

    unbiased_kl: bool = False
    """Multiply k3 by the token ratio, so that its gradient is that of the KL (arXiv:2512.02556)."""

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
        for key in ("allow_nonstandard", "unbiased_kl"):
            if not isinstance(getattr(self, key), bool):
                raise ValueError(f"{key} = {getattr(self, key)!r}: must be True or False")
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
        return self.importance_sampling_level in ("sequence", "sequence_token", "geometric_mean")

    @property
    def weighs_log_probs(self) -> bool:
        """Whether the surrogate is a weight without gradient times the log-prob."""
        return self.has_ratio and self.surrogate in ("cispo", "dppo_tv", "dppo_kl")

    def number(self, key: str) -> float:
        """A field that its surrogate needs. ValueError where it is None."""
        value = getattr(self, key)
        if value is None:
            raise ValueError(f"{self.name} has no {key}")
        return float(value)

    @property
    def clip_range(self) -> tuple[float, float]:
        """`(1 - epsilon_low, 1 + epsilon_high)`; ValueError where the ratio is not clipped."""
        return 1 - self.number("epsilon_low"), 1 + self.number("epsilon_high")


# key: (accepts, requirement)
_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "loss_scale_factor": (lambda v: 0 < v < math.inf, "a positive number of tokens"),
    "epsilon_low": (lambda v: 0 < v <= 1, "above 0 and at most 1"),
    "epsilon_high": (lambda v: v > 0, "above 0"),
    "max_weight": (lambda v: 1 <= v < math.inf, "1 or above"),
    "min_weight": (lambda v: 0 <= v <= 1, "0 to 1"),
    "tau_pos": (lambda v: 0 < v < math.inf, "above 0"),
    "tau_neg": (lambda v: 0 < v < math.inf, "above 0"),
    "divergence_threshold": (lambda v: 0 < v < math.inf, "above 0"),
    "dual_clip": (lambda v: 1 < v < math.inf, "above 1, or None to turn it off"),
    "off_policy_mask_threshold": (lambda v: 0 <= v < math.inf, "0 or above, or None to turn it off"),
    "log_ratio_coef": (lambda v: 0 <= v < math.inf, "0 or above"),
    "kl_loss_coef": (lambda v: 0 <= v < math.inf, "0 or above"),
    "entropy_coef": (lambda v: 0 <= v < math.inf, "0 or above"),
    "max_log_ratio": (lambda v: 0 < v <= 80, "above 0 and at most 80 (exp overflows float32 at 88)"),
}
_OF_SURROGATES = tuple(dict.fromkeys(key for needed, others in SURROGATE_FIELDS.values() for key in needed + others))
_OPTIONAL = ("loss_scale_factor", "off_policy_mask_threshold", *_OF_SURROGATES)
_NEED_A_RATIO = ("off_policy_mask_threshold", "log_ratio_coef", "unbiased_kl")
# What a user of another framework may mean by a clip range of CISPO.
_CISPO_BOUND = (
    "is 1 + epsilon_high as the largest weight in verl and slime, and the largest weight itself in TRL and ms-swift: "
    "set max_weight to the largest weight"
)


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
    needed, others = SURROGATE_FIELDS[o.surrogate] if o.has_ratio else ((), ())
    for key in needed:
        if getattr(o, key) is None:
            raise ValueError(f"{key} = None with surrogate = {o.surrogate!r}: set it")
    for key in _OF_SURROGATES:
        if key in needed + others or (value := getattr(o, key)) is None:
            continue
        if o.has_ratio and o.surrogate == "cispo" and key == "epsilon_high":
            raise ValueError(f"{key} = {value!r} {_CISPO_BOUND}")
        where = f"surrogate = {o.surrogate!r}" if o.has_ratio else "importance_sampling_level = 'none'"
        raise ValueError(f"{key} = {value!r} has no effect with {where}: remove it")
    if not o.has_ratio and o.surrogate != "clip":
        raise ValueError(
            f"surrogate = {o.surrogate!r} has no effect with importance_sampling_level = 'none': remove it"
        )
    for key in _NEED_A_RATIO:
        if not o.has_ratio and getattr(o, key) not in (None, 0):
            raise ValueError(
                f"{key} = {getattr(o, key)!r} has no effect with importance_sampling_level = 'none': remove it"
            )
    _check_level(o)
    if o.unbiased_kl and o.kl_loss_type != "k3":
        raise ValueError(f"kl_loss_type = {o.kl_loss_type!r} does not go with unbiased_kl = True: use 'k3'")


def _check_level(o: Objective) -> None:
    """The surrogate exists at this ratio level."""
    if o.importance_sampling_level == "geometric_mean" and (o.surrogate != "clip" or o.dual_clip is not None):
        key = "surrogate" if o.surrogate != "clip" else "dual_clip"
        raise ValueError(
            f"{key} = {getattr(o, key)!r} does not go with importance_sampling_level = 'geometric_mean', which clips "
            "token ratios in the mean: remove it"
        )
    if o.surrogate in ("dppo_tv", "dppo_kl") and o.importance_sampling_level != "token":
        raise ValueError(
            f"importance_sampling_level = {o.importance_sampling_level!r} with surrogate = {o.surrogate!r}, which "
            "compares probabilities of tokens: use 'token'"
        )


def _check_identity(o: Objective) -> None:
    """A published name keeps its meaning, and no sequence ratio is weighted by its tokens."""
    for key, allowed in IDENTITY.get(o.name, {}).items():
        if getattr(o, key) not in allowed:
            raise ValueError(
                f"{key} = {getattr(o, key)!r} is not {o.name}: use {' or '.join(map(repr, allowed))}, "
                f"another name, {_OVERRIDE}"
            )
    by_length = o.loss_agg_mode not in ("seq-mean-token-mean", *IDENTITY.get(o.name, {}).get("loss_agg_mode", ()))
    if o.sequence_level and by_length:
        raise ValueError(
            f"loss_agg_mode = {o.loss_agg_mode!r} weights a sequence ratio by response length, which is not GSPO: "
            f"use 'seq-mean-token-mean', {_OVERRIDE}"
        )


def _check_clip_scale(o: Objective) -> None:
    """The clip range has the scale of its ratio level."""
    if o.surrogate != "clip":
        return
    of_sequences = o.sequence_level and o.importance_sampling_level != "geometric_mean"
    for key, published in (("epsilon_low", "3e-4"), ("epsilon_high", "4e-4")):
        value = getattr(o, key)
        if of_sequences and not MIN_SEQUENCE_EPSILON <= value <= MAX_SEQUENCE_EPSILON:
            raise ValueError(
                f"{key} = {value!r} is outside the clip range of a sequence ratio ({o.name}, {MIN_SEQUENCE_EPSILON:g} "
                f"to {MAX_SEQUENCE_EPSILON:g}): use about {published}, {_OVERRIDE}"
            )
        if o.importance_sampling_level in ("token", "geometric_mean") and value < MIN_TOKEN_EPSILON:
            raise ValueError(
                f"{key} = {value!r} is outside the clip range of a token ratio ({o.name}, {MIN_TOKEN_EPSILON:g} or "
                f"more): use about 0.2, {_OVERRIDE}"
            )
