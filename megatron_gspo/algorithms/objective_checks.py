"""What an `Objective` refuses.

Every error is one line with the field, its value, the problem and the fix.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, get_args, get_origin, get_type_hints

from megatron_gspo.user_code import is_import_path

from .presets import PRESETS

Objective: TypeAlias = (
    Any  # objective.py imports this module; that a field has its type is checked here
)

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


def check_objective(o: Objective) -> None:
    """ValueError where a field is not valid."""
    if not isinstance(o.name, str) or not o.name:
        raise ValueError(
            f"name = {o.name!r}: must be a non-empty string, such as one of {', '.join(PRESETS)}"
        )
    _check_choices(o)
    _check_numbers(o)
    if not o.allow_nonstandard:
        _check_identity(o)
    _check_fields_fit(o)
    if not o.allow_nonstandard:
        _check_clip_scale(o)


def _check_choices(o: Objective) -> None:
    """Fields that take one of a few values."""
    for key, hint in get_type_hints(type(o)).items():
        value = getattr(o, key)
        if hint is bool and not isinstance(value, bool):
            raise ValueError(f"{key} = {value!r}: must be True or False")
        if get_origin(hint) is Literal and value not in get_args(hint):
            raise ValueError(f"{key} = {value!r}: must be one of {', '.join(get_args(hint))}")
    _check_own_code("surrogate", o.surrogate, tuple(SURROGATE_FIELDS))
    _check_own_code("advantage_estimator", o.advantage_estimator, ADVANTAGE_ESTIMATORS)
    for key, options, used in (
        ("surrogate", "surrogate_options", o.has_own_surrogate),
        ("advantage_estimator", "advantage_options", o.has_own_advantages),
    ):
        if getattr(o, options) and not used:
            raise ValueError(
                f"{options} = {getattr(o, options)!r} has no effect with {key} ="
                f" {getattr(o, key)!r}: remove it"
            )


def _check_own_code(key: str, value: object, names: tuple[str, ...]) -> None:
    """A name, a function, or the import path of one."""
    if callable(value) or (isinstance(value, str) and (value in names or is_import_path(value))):
        return
    raise ValueError(
        f"{key} = {value!r}: must be one of {', '.join(names)}, or file.py:function or"
        " module:function"
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
            f"loss_scale_factor = {o.loss_scale_factor!r} has no effect with loss_agg_mode ="
            f" {o.loss_agg_mode!r}: remove it, or use 'seq-mean-token-sum-norm'"
        )
    needed, others = _surrogate_fields(o)
    for key in needed:
        if getattr(o, key) is None:
            raise ValueError(f"{key} = None with surrogate = {o.surrogate!r}: set it")
    for key in _OF_SURROGATES:
        if key in needed + others or (value := getattr(o, key)) is None:
            continue
        if o.has_ratio and o.surrogate == "cispo" and key == "epsilon_high":
            raise ValueError(f"{key} = {value!r} {_CISPO_BOUND}")
        where = (
            f"surrogate = {o.surrogate!r}" if o.has_ratio else "importance_sampling_level = 'none'"
        )
        raise ValueError(f"{key} = {value!r} has no effect with {where}: remove it")
    if not o.has_ratio and o.surrogate != "clip":
        raise ValueError(
            f"surrogate = {o.surrogate!r} has no effect with importance_sampling_level = 'none':"
            " remove it"
        )
    for key in _NEED_A_RATIO:
        if not o.has_ratio and getattr(o, key) not in (None, 0):
            raise ValueError(
                f"{key} = {getattr(o, key)!r} has no effect with importance_sampling_level ="
                " 'none': remove it"
            )
    _check_level(o)
    _check_estimator(o)
    if o.unbiased_kl and o.kl_loss_type != "k3":
        raise ValueError(
            f"kl_loss_type = {o.kl_loss_type!r} does not go with unbiased_kl = True: use 'k3'"
        )


def _surrogate_fields(o: Objective) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The fields that the surrogate needs, and those that it may read; one of the user's any."""
    if not o.has_ratio:
        return (), ()
    return ((), _OF_SURROGATES) if o.has_own_surrogate else SURROGATE_FIELDS[o.surrogate]


def _check_level(o: Objective) -> None:
    """The surrogate exists at this ratio level."""
    if o.importance_sampling_level == "geometric_mean" and (
        o.surrogate != "clip" or o.dual_clip is not None
    ):
        key = "surrogate" if o.surrogate != "clip" else "dual_clip"
        raise ValueError(
            f"{key} = {getattr(o, key)!r} does not go with importance_sampling_level ="
            " 'geometric_mean', which clips token ratios in the mean: remove it"
        )
    if o.surrogate in ("dppo_tv", "dppo_kl", "minirl") and o.importance_sampling_level != "token":
        raise ValueError(
            f"importance_sampling_level = {o.importance_sampling_level!r} with surrogate ="
            f" {o.surrogate!r}, which compares probabilities of tokens: use 'token'"
        )


def _check_estimator(o: Objective) -> None:
    """The fields of the advantages have an effect."""
    if o.has_own_advantages:
        return  # it may read them all
    unused = {"group": (("gamma", 1), ("lam", 1)), "gae": (("advantage_baseline", "mean"),)}
    for key, default in unused[o.advantage_estimator]:
        if getattr(o, key) != default:
            raise ValueError(
                f"{key} = {getattr(o, key)!r} has no effect with advantage_estimator ="
                f" {o.advantage_estimator!r}: remove it"
            )


def _check_identity(o: Objective) -> None:
    """A published name keeps its meaning, and no sequence ratio is weighted by its tokens."""
    row = {"advantage_estimator": "group", **PRESETS[o.name]} if o.name in PRESETS else {}
    row = {key: value for key, value in row.items() if key in _IDENTITY}
    for key, value in row.items():
        if getattr(o, key) != value and not (key == "loss_agg_mode" and o.name in _ANY_AGGREGATION):
            raise ValueError(
                f"{key} = {getattr(o, key)!r} is not {o.name}: use {value!r}, another name,"
                f" {_OVERRIDE}"
            )
    by_length = o.loss_agg_mode not in ("seq-mean-token-mean", row.get("loss_agg_mode"))
    if o.sequence_level and by_length:
        raise ValueError(
            f"loss_agg_mode = {o.loss_agg_mode!r} weights a sequence ratio by response length,"
            f" which is not GSPO: use 'seq-mean-token-mean', {_OVERRIDE}"
        )


def _check_clip_scale(o: Objective) -> None:
    """The clip range has the scale of its ratio level."""
    if o.surrogate not in ("clip", "minirl"):
        return
    of_sequences = o.sequence_level and o.importance_sampling_level != "geometric_mean"
    for key, published in (("epsilon_low", "3e-4"), ("epsilon_high", "4e-4")):
        value = getattr(o, key)
        if of_sequences and not MIN_SEQUENCE_EPSILON <= value <= MAX_SEQUENCE_EPSILON:
            raise ValueError(
                f"{key} = {value!r} is outside the clip range of a sequence ratio ({o.name},"
                f" {MIN_SEQUENCE_EPSILON:g} to {MAX_SEQUENCE_EPSILON:g}): use about {published},"
                f" {_OVERRIDE}"
            )
        if o.importance_sampling_level in ("token", "geometric_mean") and value < MIN_TOKEN_EPSILON:
            raise ValueError(
                f"{key} = {value!r} is outside the clip range of a token ratio ({o.name},"
                f" {MIN_TOKEN_EPSILON:g} or more): use about 0.2, {_OVERRIDE}"
            )
