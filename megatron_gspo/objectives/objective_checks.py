"""What an `Objective` refuses.

Every error is one line with the field, its value, the problem and the fix.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, get_args, get_origin, get_type_hints

from megatron_gspo.user_code import is_import_path

from .presets import PRESETS

# objective.py imports this module; that a field has its type is checked here.
Objective: TypeAlias = Any

# The clip range depends on the ratio level. A token ratio changes by tens of percent within one
# rollout batch (published clip 0.2 / 0.27). A sequence ratio is a geometric mean over |y| tokens
# and changes about sqrt(|y|) times less (published clip 3e-4 / 4e-4). With the two exchanged, 0.2
# never clips a sequence and 3e-4 clips nearly every token. The bounds leave room on both sides: 0.1
# is the token clip of 0.2 for a response of only 4 tokens, 0.01 is a twentieth of the usual token
# clip, and near a ratio of 1 float32 has about ten steps within 1e-6.
MAX_SEQUENCE_EPSILON = 0.1
MIN_SEQUENCE_EPSILON = 1e-6
MIN_TOKEN_EPSILON = 0.01

# The fields that make a preset the published algorithm, where its row in `PRESETS` has them.
_IDENTITY = (
    "surrogate",
    "importance_sampling_level",
    "loss_agg_mode",
    "advantage_estimator",
    "advantage_std",
)
# Published without an aggregation of their own.
_ANY_AGGREGATION = ("dppo_tv", "dppo_kl", "sft")

# The fields that each surrogate reads: those that it needs, and those that may be None.
SURROGATE_FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "clip": (("epsilon_low", "epsilon_high"), ("dual_clip",)),
    "cispo": (("max_weight",), ("min_weight",)),
    "sapo": (("tau_pos", "tau_neg"), ()),
    "dppo_tv": (("divergence_threshold", "max_weight"), ()),
    "dppo_kl": (("divergence_threshold", "max_weight"), ()),
    "minirl": (("epsilon_low", "epsilon_high", "max_weight"), ()),
}
ADVANTAGE_ESTIMATORS = ("group", "gae")
_OVERRIDE = "or set allow_nonstandard=True"

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
    "off_policy_mask_threshold": (
        lambda v: 0 <= v < math.inf,
        "0 or above, or None to turn it off",
    ),
    "log_ratio_coef": (lambda v: 0 <= v < math.inf, "0 or above"),
    "kl_loss_coef": (lambda v: 0 <= v < math.inf, "0 or above"),
    "entropy_coef": (lambda v: 0 <= v < math.inf, "0 or above"),
    "gamma": (lambda v: 0 <= v <= 1, "0 to 1"),
    "lam": (lambda v: 0 <= v <= 1, "0 to 1"),
    "max_log_ratio": (
        lambda v: 0 < v <= 80,
        "above 0 and at most 80 (exp overflows float32 at 88)",
    ),
}
_OF_SURROGATES = tuple(
    dict.fromkeys(key for needed, others in SURROGATE_FIELDS.values() for key in needed + others)
)
_OPTIONAL = ("loss_scale_factor", "off_policy_mask_threshold", *_OF_SURROGATES)
_NEED_A_RATIO = ("off_policy_mask_threshold", "log_ratio_coef", "unbiased_kl")
# What a user of another framework may mean by a clip range of CISPO.
_CISPO_BOUND = (
    "is 1 + epsilon_high as the largest weight in verl and slime, and the largest weight itself in"
    " TRL and ms-swift: set max_weight to the largest weight"
)


def check_objective(objective: Objective) -> None:
    """ValueError where a field is not valid."""
    if not isinstance(objective.name, str) or not objective.name:
        raise ValueError(
            f"name = {objective.name!r}: must be a non-empty string, such as one of {', '.join(PRESETS)}"
        )
    _check_choices(objective)
    _check_numbers(objective)
    if not objective.allow_nonstandard:
        _check_identity(objective)
    _check_fields_fit(objective)
    if not objective.allow_nonstandard:
        _check_clip_scale(objective)


def _check_choices(objective: Objective) -> None:
    """Fields that take one of a few values."""
    for key, hint in get_type_hints(type(objective)).items():
        value = getattr(objective, key)
        if hint is bool and not isinstance(value, bool):
            raise ValueError(f"{key} = {value!r}: must be True or False")
        if get_origin(hint) is Literal and value not in get_args(hint):
            raise ValueError(f"{key} = {value!r}: must be one of {', '.join(get_args(hint))}")
    _check_own_code("surrogate", objective.surrogate, tuple(SURROGATE_FIELDS))
    _check_own_code("advantage_estimator", objective.advantage_estimator, ADVANTAGE_ESTIMATORS)
    for key, options, used in (
        ("surrogate", "surrogate_options", objective.has_own_surrogate),
        ("advantage_estimator", "advantage_options", objective.has_own_advantages),
    ):
        if getattr(objective, options) and not used:
            raise ValueError(
                f"{options} = {getattr(objective, options)!r} has no effect with {key} ="
                f" {getattr(objective, key)!r}: remove it"
            )


def _check_own_code(key: str, value: object, names: tuple[str, ...]) -> None:
    """A name, a function, or the import path of one."""
    if callable(value) or (isinstance(value, str) and (value in names or is_import_path(value))):
        return
    raise ValueError(
        f"{key} = {value!r}: must be one of {', '.join(names)}, or file.py:function or"
        " module:function"
    )


def _check_numbers(objective: Objective) -> None:
    """Types and ranges that hold for every algorithm."""
    for key, (accepts, requirement) in _RANGES.items():
        value = getattr(objective, key)
        if value is None and key in _OPTIONAL:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not accepts(value):
            raise ValueError(f"{key} = {value!r}: must be {requirement}")


def _check_fields_fit(objective: Objective) -> None:
    """Fields that contradict each other, or that another field requires."""
    if (
        objective.loss_agg_mode != "seq-mean-token-sum-norm"
        and objective.loss_scale_factor is not None
    ):
        raise ValueError(
            f"loss_scale_factor = {objective.loss_scale_factor!r} has no effect with loss_agg_mode ="
            f" {objective.loss_agg_mode!r}: remove it, or use 'seq-mean-token-sum-norm'"
        )
    needed, others = _surrogate_fields(objective)
    for key in needed:
        if getattr(objective, key) is None:
            raise ValueError(f"{key} = None with surrogate = {objective.surrogate!r}: set it")
    for key in _OF_SURROGATES:
        if key in needed + others or (value := getattr(objective, key)) is None:
            continue
        if objective.has_ratio and objective.surrogate == "cispo" and key == "epsilon_high":
            raise ValueError(f"{key} = {value!r} {_CISPO_BOUND}")
        where = "importance_sampling_level = 'none'"
        if objective.has_ratio:
            where = f"surrogate = {objective.surrogate!r}"
        raise ValueError(f"{key} = {value!r} has no effect with {where}: remove it")
    if not objective.has_ratio and objective.surrogate != "clip":
        raise ValueError(
            f"surrogate = {objective.surrogate!r} has no effect with importance_sampling_level = 'none':"
            " remove it"
        )
    for key in _NEED_A_RATIO:
        if not objective.has_ratio and getattr(objective, key) not in (None, 0):
            raise ValueError(
                f"{key} = {getattr(objective, key)!r} has no effect with importance_sampling_level ="
                " 'none': remove it"
            )
    _check_level(objective)
    _check_estimator(objective)
    if objective.unbiased_kl and objective.kl_loss_type != "k3":
        raise ValueError(
            f"kl_loss_type = {objective.kl_loss_type!r} does not go with unbiased_kl = True: use 'k3'"
        )


def _surrogate_fields(objective: Objective) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The fields that the surrogate needs, and those that it may read; one of the user's any."""
    if not objective.has_ratio:
        return (), ()
    if objective.has_own_surrogate:
        return (), _OF_SURROGATES
    return SURROGATE_FIELDS[objective.surrogate]


def _check_level(objective: Objective) -> None:
    """The surrogate exists at this ratio level."""
    if objective.importance_sampling_level == "geometric_mean" and (
        objective.surrogate != "clip" or objective.dual_clip is not None
    ):
        key = "surrogate" if objective.surrogate != "clip" else "dual_clip"
        raise ValueError(
            f"{key} = {getattr(objective, key)!r} does not go with importance_sampling_level ="
            " 'geometric_mean', which clips token ratios in the mean: remove it"
        )
    if (
        objective.surrogate in ("dppo_tv", "dppo_kl", "minirl")
        and objective.importance_sampling_level != "token"
    ):
        raise ValueError(
            f"importance_sampling_level = {objective.importance_sampling_level!r} with surrogate ="
            f" {objective.surrogate!r}, which compares probabilities of tokens: use 'token'"
        )


def _check_estimator(objective: Objective) -> None:
    """The fields of the advantages have an effect."""
    if objective.has_own_advantages:
        return  # it may read them all
    unused = {"group": (("gamma", 1), ("lam", 1)), "gae": (("advantage_baseline", "mean"),)}
    for key, default in unused[objective.advantage_estimator]:
        if getattr(objective, key) != default:
            raise ValueError(
                f"{key} = {getattr(objective, key)!r} has no effect with advantage_estimator ="
                f" {objective.advantage_estimator!r}: remove it"
            )


def _check_identity(objective: Objective) -> None:
    """A published name keeps its meaning, and no sequence ratio is weighted by its tokens."""
    published: dict[str, Any] = {}
    if objective.name in PRESETS:
        fields = {"advantage_estimator": "group", **PRESETS[objective.name]}
        published = {key: value for key, value in fields.items() if key in _IDENTITY}
    for key, value in published.items():
        if getattr(objective, key) != value and not (
            key == "loss_agg_mode" and objective.name in _ANY_AGGREGATION
        ):
            raise ValueError(
                f"{key} = {getattr(objective, key)!r} is not {objective.name}: use {value!r}, another name,"
                f" {_OVERRIDE}"
            )
    by_length = objective.loss_agg_mode not in (
        "seq-mean-token-mean",
        published.get("loss_agg_mode"),
    )
    if objective.sequence_level and by_length:
        raise ValueError(
            f"loss_agg_mode = {objective.loss_agg_mode!r} weights a sequence ratio by response length,"
            f" which is not GSPO: use 'seq-mean-token-mean', {_OVERRIDE}"
        )


def _check_clip_scale(objective: Objective) -> None:
    """The clip range has the scale of its ratio level."""
    if objective.surrogate not in ("clip", "minirl"):
        return
    of_sequences = (
        objective.sequence_level and objective.importance_sampling_level != "geometric_mean"
    )
    for key, published in (("epsilon_low", "3e-4"), ("epsilon_high", "4e-4")):
        value = getattr(objective, key)
        if of_sequences and not MIN_SEQUENCE_EPSILON <= value <= MAX_SEQUENCE_EPSILON:
            raise ValueError(
                f"{key} = {value!r} is outside the clip range of a sequence ratio ({objective.name},"
                f" {MIN_SEQUENCE_EPSILON:g} to {MAX_SEQUENCE_EPSILON:g}): use about {published},"
                f" {_OVERRIDE}"
            )
        if (
            objective.importance_sampling_level in ("token", "geometric_mean")
            and value < MIN_TOKEN_EPSILON
        ):
            raise ValueError(
                f"{key} = {value!r} is outside the clip range of a token ratio ({objective.name},"
                f" {MIN_TOKEN_EPSILON:g} or more): use about 0.2, {_OVERRIDE}"
            )
