"""The policy objective as a typed value, and `preset`, which builds that of a published
algorithm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from .objective_checks import ADVANTAGE_ESTIMATORS, SURROGATE_FIELDS, check_objective
from .presets import PRESETS

ImportanceSamplingLevel = Literal["token", "sequence", "sequence_token", "geometric_mean", "none"]
LossAggMode = Literal["seq-mean-token-mean", "token-mean", "seq-mean-token-sum-norm"]
KLLossType = Literal["k1", "k2", "k3"]
AdvantageStd = Literal["sample", "population", "none"]
AdvantageBaseline = Literal["mean", "leave_one_out"]


@dataclass(frozen=True)
class Objective:
    """The objective of an optimizer step. Built by `preset`, or directly for a new algorithm.

    Raises:
        ValueError: invalid fields; one line with the field, its value, the problem and the fix.
    """

    name: str
    """A published algorithm (a key of `PRESETS`), which the other fields must then match, or a
    name of your own.
    """

    importance_sampling_level: ImportanceSamplingLevel
    """What a ratio covers (docs/algorithms.md)."""

    loss_agg_mode: LossAggMode
    """How token losses are averaged (docs/algorithms.md)."""

    loss_scale_factor: float | None = None
    """Divisor of `seq-mean-token-sum-norm`, in tokens."""

    surrogate: str | Callable[..., Any] = "clip"
    """`clip`, `cispo`, `sapo`, `dppo_tv`, `dppo_kl`, `minirl` (docs/algorithms.md), or the import
    path of your own (docs/extending.md)."""

    surrogate_options: dict[str, Any] = field(default_factory=dict, hash=False)
    """Keyword arguments of your surrogate."""

    epsilon_low: float | None = None
    """Ratios are clipped below 1 - epsilon_low, with `geometric_mean` log-ratios below
    -epsilon_low."""

    epsilon_high: float | None = None
    """Ratios are clipped above 1 + epsilon_high, with `geometric_mean` log-ratios above
    epsilon_high."""

    max_weight: float | None = None
    """Maximum weight of `cispo`, `dppo_tv`, `dppo_kl` and `minirl`."""

    min_weight: float | None = None
    """Minimum weight of `cispo`; null is 0."""

    tau_pos: float | None = None
    """Temperature of `sapo` where A > 0."""

    tau_neg: float | None = None
    """Temperature of `sapo` where A <= 0."""

    divergence_threshold: float | None = None
    """Largest divergence: of probability (`dppo_tv`), or in nats (`dppo_kl`)."""

    dual_clip: float | None = None
    """c > 1: the objective is at least c * A where A < 0."""

    off_policy_mask_threshold: float | None = None
    """Threshold of the off-policy mask (docs/algorithms.md), in nats."""

    log_ratio_coef: float = 0.0
    """Weight of squared token log-ratios in the loss."""

    kl_loss_coef: float = 0.0
    """Weight of the KL to the reference policy in the loss."""

    kl_loss_type: KLLossType = "k3"
    """Estimator of that KL."""

    unbiased_kl: bool = False
    """Multiply k3 by the token ratio."""

    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""

    max_log_ratio: float = 20.0
    """Log-ratios are clamped to +-this before exp, in nats."""

    advantage_estimator: str | Callable[..., Any] = "group"
    """`group`, `gae` (of a value model), or the import path of your own (docs/extending.md)."""

    advantage_options: dict[str, Any] = field(default_factory=dict, hash=False)
    """Keyword arguments of your estimator."""

    gamma: float = 1.0
    """Discount of later rewards, with `gae`."""

    lam: float = 1.0
    """Lambda of `gae`, from 0 to 1."""

    advantage_std: AdvantageStd = "sample"
    """Standard deviation that divides rewards, or advantages with `gae`."""

    advantage_baseline: AdvantageBaseline = "mean"
    """Baseline: the group's mean, or that of the others."""

    allow_nonstandard: bool = False
    """Allow another algorithm than that of `name`, or the clip range of another level."""

    def __post_init__(self) -> None:
        check_objective(self)

    @property
    def has_ratio(self) -> bool:
        """Whether old log-probs are needed."""
        return self.importance_sampling_level != "none"

    @property
    def sequence_level(self) -> bool:
        """Whether all tokens of a response share one ratio."""
        return self.importance_sampling_level in ("sequence", "sequence_token", "geometric_mean")

    @property
    def has_own_surrogate(self) -> bool:
        """Whether the surrogate is a function of the user's, or names one."""
        return not isinstance(self.surrogate, str) or self.surrogate not in SURROGATE_FIELDS

    @property
    def has_own_advantages(self) -> bool:
        """Whether the advantages are of a function of the user's."""
        given = self.advantage_estimator
        return not isinstance(given, str) or given not in ADVANTAGE_ESTIMATORS

    @property
    def needs_rollout_log_probs(self) -> bool:
        """Whether there is no loss without the rollout engine's log-probs."""
        return self.has_ratio and self.surrogate == "minirl"

    @property
    def reads_rollout_log_probs(self) -> bool:
        """Whether the surrogate gets the rollout engine's log-probs, where the engine gives any."""
        return self.needs_rollout_log_probs or self.has_own_surrogate

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


def preset(name: str, **overrides: Any) -> Objective:
    """The objective of a published algorithm, with any field replaced.

    Args:
        name: a key of `PRESETS`.
        overrides: fields of `Objective`. `dr_grpo` needs loss_scale_factor before its loss is
            computed.

    Raises:
        ValueError: unknown name or field, or a value that makes it another algorithm; one line with
            the fix.
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
