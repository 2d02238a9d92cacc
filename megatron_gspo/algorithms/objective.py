"""The policy objective as a typed value, and `preset`, which builds that of a published algorithm."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from .advantages import AdvantageBaseline, AdvantageStd
from .objective_checks import check_objective
from .presets import PRESETS

ImportanceSamplingLevel = Literal["token", "sequence", "sequence_token", "geometric_mean", "none"]
SurrogateType = Literal["clip", "cispo", "sapo", "dppo_tv", "dppo_kl", "minirl"]
LossAggMode = Literal["seq-mean-token-mean", "token-mean", "seq-mean-token-sum-norm"]
KLLossType = Literal["k1", "k2", "k3"]
AdvantageEstimator = Literal["group", "gae"]


@dataclass(frozen=True)
class Objective:
    """The objective of an optimizer step. Built by `preset`, or directly for a new algorithm.

    Raises:
        ValueError: invalid fields; one line with the field, its value, the problem and the fix.
    """

    name: str
    """A published algorithm (a key of `PRESETS`), which the other fields must then match, or a name of your own."""

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
    the token's probability has moved too far (DPPO). `minirl`: log-prob times the truncated ratio to the rollout
    engine, 0 where `clip` clips (MiniRL)."""

    epsilon_low: float | None = None
    """Ratios are clipped below 1 - epsilon_low; log-ratios below -epsilon_low at level `geometric_mean`."""

    epsilon_high: float | None = None
    """Ratios are clipped above 1 + epsilon_high; log-ratios above epsilon_high at level `geometric_mean`."""

    max_weight: float | None = None
    """Maximum of the weight of `cispo`, `dppo_tv` and `dppo_kl`, which is the ratio without gradient, and of `minirl`,
    which is that to the rollout engine."""

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

    advantage_estimator: AdvantageEstimator = "group"
    """`group`: the reward less its group's baseline. `gae`: from the values of a value model (PPO)."""

    gamma: float = 1.0
    """Discount of later rewards, with `gae`."""

    lam: float = 1.0
    """Lambda of `gae`: 0 is the one-step estimate, 1 the sum of rewards less the value."""

    advantage_std: AdvantageStd = "sample"
    """Standard deviation that divides a group's rewards, or with `gae` the advantages of all trained tokens: `sample`
    (n - 1), `population` (n) or `none`."""

    advantage_baseline: AdvantageBaseline = "mean"
    """Baseline of a reward: its group's `mean`, or the mean of the others (`leave_one_out`)."""

    allow_nonstandard: bool = False
    """Allow another algorithm than the name, or a clip range of the other ratio level."""

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
    def weighs_log_probs(self) -> bool:
        """Whether the surrogate is a weight without gradient times the log-prob."""
        return self.has_ratio and self.surrogate in ("cispo", "dppo_tv", "dppo_kl", "minirl")

    @property
    def needs_rollout_log_probs(self) -> bool:
        """Whether the loss reads the rollout engine's log-probs."""
        return self.has_ratio and self.surrogate == "minirl"

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
