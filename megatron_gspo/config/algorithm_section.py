"""Section `algorithm`: the objective, and what is done with samples before they are trained on."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le

from megatron_gspo.config.config_error import ConfigError
from megatron_gspo.config.paths import UserPath
from megatron_gspo.objectives.objective import Objective
from megatron_gspo.objectives.presets import CORRECTIONS, PRESETS
from megatron_gspo.objectives.score_centering import ScoreCentering


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig(Objective):
    """The objective of the run. `preset` and the loader fill in the fields of the preset that
    `name` is.

    Raises ValueError where the fields contradict each other or the name (see `Objective`).
    """

    by_preset: ClassVar[frozenset[str]] = frozenset().union(
        *PRESETS.values(), *CORRECTIONS.values(), ["loss_scale_factor"]
    )

    name: str = "gspo"
    """Preset that fills this section (docs/algorithms.md), or a name of your own."""
    surrogate: UserPath = "clip"
    advantage_estimator: UserPath = "group"
    kl_reward_coef: Annotated[float, Ge(0)] = 0.0
    """Weight of the KL to the reference policy in the reward."""
    old_log_probs: Literal["recompute", "rollout"] = "recompute"
    """Recompute old log-probs, or take the rollout engine's."""
    rollout_correction_preset: Literal[
        "none", "token_tis", "bounded_token_tis", "icepop", "k3_rejection_token_tis"
    ] = "none"
    """Published setting of `rollout_is*` and `rollout_rs*` (docs/algorithms.md)."""
    rollout_is: Literal["none", "token", "geometric"] = "none"
    """Importance weights of old policy over rollout engine."""
    rollout_is_threshold: Annotated[float, Ge(1)] = 2.0
    """Maximum of these weights."""
    rollout_is_threshold_lower: Annotated[float, Ge(0), Le(1)] = 0.0
    """Minimum of these weights."""
    rollout_rs: Literal["none", "token", "geometric", "token_binary_kl", "sequence_k3"] = "none"
    """Mask what differs too much between the engines (docs/algorithms.md)."""
    rollout_rs_threshold: Annotated[float, Ge(1)] | None = None
    """Upper threshold; null is 2 with `token`; `geometric` needs one."""
    rollout_rs_threshold_lower: Annotated[float, Gt(0), Le(1)] | None = None
    """Lower threshold; null is 1 / `rollout_rs_threshold`."""
    rollout_rs_divergence: Annotated[float, Gt(0)] | None = None
    """Largest divergence of `token_binary_kl` and `sequence_k3`, in nats."""
    rollout_rs_denominator: Literal["kept", "all"] = "kept"
    """Means divide by what is kept, or by all."""
    score_centering: Annotated[int, Ge(0)] = 0
    """Ids per token of score centering (docs/algorithms.md); 0 is off."""
    turn_discount: Annotated[float, Ge(0), Le(1)] | None = None
    """Discount of later turns' rewards; null is one advantage per episode."""
    dynamic_sampling: bool = False
    """Replace groups with equal rewards by new ones."""
    max_num_gen_batches: Annotated[int, Ge(1)] = 4
    """Maximum generations per step with `dynamic_sampling`."""
    truncated: Literal["keep", "mask", "penalize"] = "keep"
    """Responses at the length limit: keep, mask, or penalise as DAPO does."""
    overlong_buffer_len: Annotated[int, Ge(0)] = 0
    """Last tokens, over which the penalty grows."""
    overlong_penalty_factor: Annotated[float, Gt(0)] = 1.0
    """Penalty at the length limit."""

    @classmethod
    def preset(
        cls, name: str = "gspo", *, max_response_length: int | None = None, **overrides: Any
    ) -> AlgorithmConfig:
        """The section of a published algorithm, with any field replaced. See `with_preset`."""
        return cls(
            **with_preset({"name": name, **overrides}, max_response_length=max_response_length)
        )

    @property
    def rollout_rs_band(self) -> tuple[float, float]:
        """(lower, upper) threshold of `rollout_rs`, nulls resolved."""
        high = self.rollout_rs_threshold or 2.0
        return self.rollout_rs_threshold_lower or 1 / high, high

    @property
    def centering(self) -> ScoreCentering | None:
        """The weight of a token by policy and rollout engine, with `score_centering`."""
        if not self.score_centering:
            return None
        bounds = None
        if self.rollout_is == "token":
            bounds = (self.rollout_is_threshold_lower, self.rollout_is_threshold)
        elif self.weighs_by_rollout:
            bounds = (self.min_weight or 0.0, self.number("max_weight"))
        return ScoreCentering(
            bounds=bounds, kept=self.rollout_rs_band if self.rollout_rs == "token" else None
        )

    @property
    def weighs_by_rollout(self) -> bool:
        """Whether the surrogate's weight is the ratio of a token's probabilities under policy and
        rollout engine, truncated."""
        is_ratio = self.old_log_probs == "rollout" and self.importance_sampling_level == "token"
        return self.surrogate == "minirl" or (self.surrogate == "cispo" and is_ratio)

    @property
    def bounds_weights(self) -> bool:
        """Whether a token of extreme ratio has little weight in the gradient, for either sign of
        its advantage.

        With `rollout_is: token` ratio and weight multiply to that of the trained policy and the
        rollout engine: an old log-prob that is far off cancels."""
        return self.dual_clip is not None or self.rollout_is == "token" or self.surrogate != "clip"

    @property
    def is_supervised(self) -> bool:
        """Whether the samples are reference answers."""
        return self.name == "sft"

    @property
    def needs_critic(self) -> bool:
        """Whether advantages need a value model."""
        return self.advantage_estimator == "gae"

    @property
    def needs_reference(self) -> bool:
        """Whether a KL term needs ref_log_probs, those of the initial weights."""
        return bool(self.kl_loss_coef) or bool(self.kl_reward_coef)


def with_preset(given: dict[str, Any], *, max_response_length: int | None) -> dict[str, Any]:
    """The fields of section `algorithm`: those given, else the preset's.

    Args:
        given: keys of the section; a null counts as not given.
        max_response_length: `loss_scale_factor` of a preset that needs one, in tokens.
    """
    known = {field.name for field in fields(AlgorithmConfig)}
    name = given.get("name") or "gspo"
    preset = PRESETS.get(name, {}) if isinstance(name, str) else PRESETS["gspo"]
    if not preset:
        _check_own_name(name, given)
    chosen = {key: value for key, value in given.items() if value is not None or key not in known}
    correction = given.get("rollout_correction_preset")
    corrected = CORRECTIONS.get(correction, {}) if isinstance(correction, str) else {}  # as above
    filled = {"name": name, **preset, **corrected, **chosen}
    if (
        filled.get("loss_agg_mode") == "seq-mean-token-sum-norm"
        and filled.get("loss_scale_factor") is None
    ):
        filled["loss_scale_factor"] = max_response_length
    return filled


def _check_own_name(name: str, given: dict[str, Any]) -> None:
    """An objective of one's own says what it is; a name without that is a misspelt preset."""
    if given.get("importance_sampling_level") and given.get("loss_agg_mode"):
        return
    close = difflib.get_close_matches(name, PRESETS, n=1)
    hint = f", perhaps {close[0]}" if close else ""
    raise ConfigError(
        "algorithm.name",
        name,
        "is no preset",
        f"set one of {', '.join(PRESETS)}{hint}, or algorithm.importance_sampling_level and"
        " algorithm.loss_agg_mode of an objective of your own",
    )
