"""The policy objective as one typed value; what it refuses to be called is decided here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from .advantages import AdvantageBaseline, AdvantageStd

ImportanceSamplingLevel = Literal["token", "sequence", "sequence_token", "none"]
Aggregation = Literal["sequence_mean", "token_mean", "constant"]
KLEstimator = Literal["k1", "k2", "k3"]

# The clip range belongs to the ratio level. A token ratio moves by tens of percent in one rollout batch
# (published clip 0.2 / 0.27); a sequence ratio is a geometric mean over |y| tokens and moves about sqrt(|y|)
# times less or better (published clip 3e-4 / 4e-4). Exchange them and the algorithm is gone: 0.2 never clips
# a sequence, 3e-4 clips nearly every token. The bounds leave room on both sides: 0.1 is the token clip of 0.2
# for a response of only 4 tokens, 0.01 is a twentieth of the usual token clip, 1e-6 is where a float32 ratio
# near 1 has about ten steps left.
MAX_SEQUENCE_EPSILON = 0.1
MIN_SEQUENCE_EPSILON = 1e-6
MIN_TOKEN_EPSILON = 0.01

# What each published name stands for. A field outside its row makes another algorithm.
IDENTITY: dict[str, dict[str, tuple[str, ...]]] = {
    "gspo": {"importance_sampling_level": ("sequence",), "aggregation": ("sequence_mean",)},
    "gspo_token": {"importance_sampling_level": ("sequence_token",), "aggregation": ("sequence_mean",)},
    "grpo": {"importance_sampling_level": ("token",), "aggregation": ("sequence_mean",)},
    "dr_grpo": {
        "importance_sampling_level": ("token",),
        "aggregation": ("constant",),
        "advantage_std": ("none",),
    },
    "dapo": {"importance_sampling_level": ("token",), "aggregation": ("token_mean",)},
    "sft": {"importance_sampling_level": ("none",), "aggregation": ("token_mean", "sequence_mean")},
}

_CHOICES = {
    "importance_sampling_level": get_args(ImportanceSamplingLevel),
    "aggregation": get_args(Aggregation),
    "kl_estimator": get_args(KLEstimator),
    "advantage_std": get_args(AdvantageStd),
    "advantage_baseline": get_args(AdvantageBaseline),
}
_OVERRIDE = "or say research_override=True to run it all the same"


@dataclass(frozen=True)
class Objective:
    """What an optimizer step maximises. Built by `preset`, or directly for an algorithm of one's own.

    Attributes:
        name: a published name (a key of IDENTITY), which the other fields must then fit, or one's own.
        importance_sampling_level: what one ratio covers. `token`: exp(log-ratio) of each token. `sequence`:
            one ratio a response, length-normalised; wants one advantage a response. `sequence_token`: the
            same value with an advantage per token (GSPO-token). `none`: advantage * log-prob, no ratio.
        aggregation: `sequence_mean`: mean over a response's trained tokens, then over responses.
            `token_mean`: over all trained tokens. `constant`: token sum / (responses * constant_length).
        constant_length: tokens; only with `constant`, where it usually is the longest response allowed.
        epsilon_low, epsilon_high: clip to [1 - epsilon_low, 1 + epsilon_high]; None without a ratio.
        dual_clip: c > 1; with A < 0 the objective is at least c * A (arXiv:1912.09729). None: off.
        kl_loss_coef: weight of the KL to the reference policy in the loss; above 0 it needs ref_log_probs.
        kl_estimator: k1, k2 or k3 (see `kl.kl_penalty`).
        entropy_coef: weight of the entropy bonus; above 0 it needs entropy.
        max_log_ratio: nats; log-ratios are clamped to +-this before exp.
        advantage_std, advantage_baseline: for `group_advantages`; kept here so that a preset is one value.
        research_override: allow what is refused for being another algorithm than it says.

    Raises:
        ValueError: one line with the field, its value and the fix.
    """

    name: str
    importance_sampling_level: ImportanceSamplingLevel
    aggregation: Aggregation
    constant_length: float | None = None
    epsilon_low: float | None = None
    epsilon_high: float | None = None
    dual_clip: float | None = None
    kl_loss_coef: float = 0.0
    kl_estimator: KLEstimator = "k3"
    entropy_coef: float = 0.0
    max_log_ratio: float = 20.0
    advantage_std: AdvantageStd = "sample"
    advantage_baseline: AdvantageBaseline = "mean"
    research_override: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"name = {self.name!r}: give a word, such as one of {', '.join(IDENTITY)}")
        if not isinstance(self.research_override, bool):
            raise ValueError(f"research_override = {self.research_override!r}: give True or False")
        for key, choices in _CHOICES.items():
            if getattr(self, key) not in choices:
                raise ValueError(f"{key} = {getattr(self, key)!r}: choose one of {', '.join(choices)}")
        _check_numbers(self)
        if not self.research_override:
            _check_identity(self)
        _check_fields_fit(self)
        if not self.research_override:
            _check_clip_scale(self)

    @property
    def has_ratio(self) -> bool:
        """Whether old log-probs are needed."""
        return self.importance_sampling_level != "none"

    @property
    def sequence_level(self) -> bool:
        """Whether one ratio covers a response."""
        return self.importance_sampling_level in ("sequence", "sequence_token")

    @property
    def clip_range(self) -> tuple[float, float]:
        """`(1 - epsilon_low, 1 + epsilon_high)`; ValueError where there is no ratio."""
        if self.epsilon_low is None or self.epsilon_high is None:
            raise ValueError(f"importance_sampling_level = 'none' ({self.name}) has no clip range")
        return 1 - self.epsilon_low, 1 + self.epsilon_high


def _check_numbers(o: Objective) -> None:
    """Types and ranges that no algorithm leaves."""
    ranges = {  # key: (accepts, said in words)
        "constant_length": (lambda v: 0 < v < math.inf, "a positive number of tokens"),
        "epsilon_low": (lambda v: 0 < v <= 1, "a number above 0 and at most 1"),
        "epsilon_high": (lambda v: v > 0, "a number above 0"),
        "dual_clip": (lambda v: 1 < v < math.inf, "a number above 1, or None to turn it off"),
        "kl_loss_coef": (lambda v: 0 <= v < math.inf, "a number of 0 or above"),
        "entropy_coef": (lambda v: 0 <= v < math.inf, "a number of 0 or above"),
        "max_log_ratio": (
            lambda v: 0 < v <= 80,
            "a number above 0 and at most 80 (exp overflows float32 at 88)",
        ),
    }
    optional = ("constant_length", "epsilon_low", "epsilon_high", "dual_clip")
    for key, (accepts, words) in ranges.items():
        value = getattr(o, key)
        if value is None and key in optional:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not accepts(value):
            raise ValueError(f"{key} = {value!r}: give {words}")


def _check_fields_fit(o: Objective) -> None:
    """Fields that contradict each other, or that another one needs."""
    if o.aggregation == "constant" and o.constant_length is None:
        raise ValueError(
            "constant_length = None with aggregation = 'constant': give the longest response in tokens"
        )
    if o.aggregation != "constant" and o.constant_length is not None:
        raise ValueError(
            f"constant_length = {o.constant_length!r} with aggregation = {o.aggregation!r}: leave it out, "
            "only aggregation = 'constant' reads it"
        )
    for key in ("epsilon_low", "epsilon_high"):
        if o.has_ratio and getattr(o, key) is None:
            raise ValueError(
                f"{key} = None with importance_sampling_level = {o.importance_sampling_level!r}: give a clip"
            )
    for key in ("epsilon_low", "epsilon_high", "dual_clip"):
        if not o.has_ratio and getattr(o, key) is not None:
            raise ValueError(
                f"{key} = {getattr(o, key)!r} with importance_sampling_level = 'none': leave it out, "
                "there is no ratio to clip"
            )


def _check_identity(o: Objective) -> None:
    """A name keeps its published meaning, and no sequence ratio is weighted by tokens."""
    for key, allowed in IDENTITY.get(o.name, {}).items():
        if getattr(o, key) not in allowed:
            raise ValueError(
                f"{key} = {getattr(o, key)!r} is not {o.name}: use {' or '.join(map(repr, allowed))}, "
                f"another name, {_OVERRIDE}"
            )
    if o.sequence_level and o.aggregation != "sequence_mean":
        raise ValueError(
            f"aggregation = {o.aggregation!r} weighs a sequence ratio by response length, which is not GSPO: "
            f"use 'sequence_mean', {_OVERRIDE}"
        )


def _check_clip_scale(o: Objective) -> None:
    """The clip range has the scale of its ratio level."""
    for key, published in (("epsilon_low", "3e-4"), ("epsilon_high", "4e-4")):
        value = getattr(o, key)
        if o.sequence_level and not MIN_SEQUENCE_EPSILON <= value <= MAX_SEQUENCE_EPSILON:
            raise ValueError(
                f"{key} = {value!r} is no clip for a sequence ratio ({o.name}, {MIN_SEQUENCE_EPSILON:g} to "
                f"{MAX_SEQUENCE_EPSILON:g}): use about {published}, {_OVERRIDE}"
            )
        if o.importance_sampling_level == "token" and value < MIN_TOKEN_EPSILON:
            raise ValueError(
                f"{key} = {value!r} is no clip for a token ratio ({o.name}, {MIN_TOKEN_EPSILON:g} or more): "
                f"use about 0.2, {_OVERRIDE}"
            )
