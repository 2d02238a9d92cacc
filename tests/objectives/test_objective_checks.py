"""What an `Objective` refuses, and the last values that it takes."""

from math import inf, nan
from typing import Any

import pytest

from megatron_gspo.algorithms import Objective, preset

# (preset, field, the last value at each end, the first value beyond it)
RANGES = [
    ("grpo", "epsilon_low", (0.01, 1), (0.0099, 1.001)),
    ("grpo", "epsilon_high", (0.01, 50.0), (0.0099, 0)),
    ("gspo", "epsilon_low", (1e-6, 0.1), (0.9e-6, 0.1001)),
    ("gmpo", "epsilon_low", (0.01,), (0.0099,)),
    ("grpo", "dual_clip", (1.0001,), (1, inf)),
    ("grpo", "kl_loss_coef", (0,), (-0.1, inf)),
    ("grpo", "entropy_coef", (0,), (-0.1, inf)),
    ("grpo", "max_log_ratio", (1e-3, 80), (0, 80.1)),
    ("grpo", "off_policy_mask_threshold", (0,), (-1e-6, inf)),
    ("grpo", "log_ratio_coef", (0,), (-1e-6, inf)),
    ("cispo", "max_weight", (1,), (0.999, inf)),
    ("cispo", "min_weight", (0, 1), (-0.001, 1.001)),
    ("sapo", "tau_pos", (1e-3,), (0, inf)),
    ("sapo", "tau_neg", (1e-3,), (0, inf)),
    ("dppo_tv", "divergence_threshold", (1e-3,), (0, inf)),
    ("dr_grpo", "loss_scale_factor", (1e-3,), (0, inf)),
    ("ppo", "gamma", (0, 1), (-0.01, 1.01)),
    ("ppo", "lam", (0, 1), (-0.01, 1.01)),
]


@pytest.mark.parametrize(("name", "field", "accepted", "refused"), RANGES)
def test_the_ends_of_each_range(name, field, accepted, refused):
    for value in accepted:
        preset(name, **{field: value})
    for value in refused:
        with pytest.raises(ValueError, match=f"{field} = "):
            preset(name, **{field: value})


# The first field of each row is the one that makes it another algorithm.
ANOTHER_ALGORITHM: list[tuple[str, dict[str, Any]]] = [
    ("gspo", {"loss_agg_mode": "token-mean"}),
    ("gspo", {"epsilon_low": 0.2}),
    ("gspo", {"epsilon_high": inf}),
    ("grpo", {"epsilon_low": 3e-4}),
    ("gspo", {"importance_sampling_level": "token"}),
    ("gspo_token", {"importance_sampling_level": "sequence"}),
    ("dr_grpo", {"advantage_std": "sample"}),
    ("luspo", {"loss_agg_mode": "seq-mean-token-mean", "loss_scale_factor": None}),
    ("dppo_tv", {"surrogate": "dppo_kl"}),
    ("ppo", {"advantage_estimator": "group", "lam": 1}),
    ("grpo", {"advantage_estimator": "gae"}),
]


@pytest.mark.parametrize(("name", "fields"), ANOTHER_ALGORITHM)
def test_another_algorithm_is_refused_in_one_line_unless_overridden(name, fields):
    with pytest.raises(ValueError) as error:
        preset(name, **fields)
    message = str(error.value)
    key, value = next(iter(fields.items()))
    assert f"{key} = {value!r}" in message and "allow_nonstandard=True" in message
    assert "use " in message and "\n" not in message
    objective = preset(name, **fields, allow_nonstandard=True)
    assert all(getattr(objective, key) == value for key, value in fields.items())


def test_refusals_follow_the_ratio_level_whatever_the_name():
    with pytest.raises(ValueError, match="token-mean"):
        Objective("mine", "sequence", "token-mean", epsilon_low=3e-4, epsilon_high=4e-4)
    with pytest.raises(ValueError, match="sequence ratio"):
        Objective("mine", "sequence", "seq-mean-token-mean", epsilon_low=0.2, epsilon_high=0.2)
    with pytest.raises(ValueError, match="token ratio"):
        Objective("mine", "token", "seq-mean-token-mean", epsilon_low=3e-4, epsilon_high=4e-4)
    Objective("own_ppo", "token", "token-mean", epsilon_low=0.2, epsilon_high=0.2)


IMPOSSIBLE: list[tuple[str, dict[str, Any], str]] = [
    ("grpo", {"epsilon_high": nan}, "epsilon_high = nan"),
    ("grpo", {"epsilon_high": "0.2"}, "epsilon_high = '0.2'"),
    ("grpo", {"epsilon_high": None}, "epsilon_high = None"),
    ("grpo", {"entropy_coef": True}, "entropy_coef = True"),
    ("grpo", {"kl_loss_type": "k4"}, "k1, k2, k3"),
    ("grpo", {"loss_scale_factor": 100}, "loss_scale_factor = 100"),
    ("grpo", {"allow_nonstandard": 1}, "allow_nonstandard = 1"),
    ("grpo", {"unbiased_kl": True, "kl_loss_type": "k2"}, "'k2' does not go with unbiased"),
    ("grpo", {"surrogate": "ppo"}, "must be one of clip, cispo, sapo, dppo_tv, dppo_kl"),
    ("grpo", {"gamma": 0.9}, "has no effect with advantage_estimator = 'group': remove it"),
    (
        "ppo",
        {"advantage_baseline": "leave_one_out"},
        "has no effect with advantage_estimator = 'gae': remove it",
    ),
    ("cispo", {"max_weight": None}, "max_weight = None with surrogate = 'cispo': set it"),
    ("cispo", {"dual_clip": 3.0}, "dual_clip = 3.0 has no effect with surrogate = 'cispo'"),
    ("grpo", {"max_weight": 2.0}, "max_weight = 2.0 has no effect with surrogate = 'clip'"),
    (
        "gmpo",
        {"dual_clip": 3.0},
        "dual_clip = 3.0 does not go with importance_sampling_level = 'geometric_mean'",
    ),
    (
        "minirl",
        {"importance_sampling_level": "sequence_token"},
        "importance_sampling_level = 'sequence_token'",
    ),
    ("sft", {"surrogate": "cispo"}, "has no effect with importance_sampling_level = 'none'"),
    ("sft", {"epsilon_low": 0.2}, "epsilon_low = 0.2"),
    ("sft", {"log_ratio_coef": 0.1}, "log_ratio_coef = 0.1 has no effect"),
]


@pytest.mark.parametrize(("name", "fields", "words"), IMPOSSIBLE)
def test_impossible_values_are_refused_even_for_researchers(name, fields, words):
    for override in ({}, {"allow_nonstandard": True}):
        with pytest.raises(ValueError) as error:
            preset(name, **{**override, **fields})
        assert words in str(error.value) and "\n" not in str(error.value)


def test_a_clip_range_of_cispo_is_refused_because_it_means_two_things():
    with pytest.raises(ValueError) as error:
        preset("cispo", epsilon_high=5.0)
    assert (
        str(error.value)
        == "epsilon_high = 5.0 is 1 + epsilon_high as the largest weight in verl and slime, and the"
        " largest weight itself in TRL and ms-swift: set max_weight to the largest weight"
    )
