"""What an `Objective` refuses, and the last values that it takes."""

import pytest

from megatron_gspo.algorithms import Objective, preset


def test_the_ends_of_each_range():
    """The last value that passes, on both sides; one step further is refused."""
    plain = dict(name="x", importance_sampling_level="token", loss_agg_mode="token-mean")
    passing = [
        {"epsilon_low": 1, "epsilon_high": 50.0},
        {"epsilon_low": 0.01, "epsilon_high": 0.01},
        {"dual_clip": 1.0001},
        {"kl_loss_coef": 0, "entropy_coef": 0},
        {"max_log_ratio": 80},
        {"max_log_ratio": 1e-3},
    ]
    for fields in passing:
        Objective(**{**plain, "epsilon_low": 0.2, "epsilon_high": 0.2, **fields})
    for fields in (
        {"epsilon_low": 1.001},
        {"epsilon_low": 0.0099},
        {"epsilon_high": 0.0099},
        {"epsilon_high": 0},
        {"dual_clip": 1},
        {"dual_clip": float("inf")},
        {"kl_loss_coef": float("inf")},
        {"entropy_coef": float("inf")},
        {"entropy_coef": -0.1},
        {"max_log_ratio": 80.1},
        {"max_log_ratio": 0},
    ):
        with pytest.raises(ValueError):
            Objective(**{**plain, "epsilon_low": 0.2, "epsilon_high": 0.2, **fields})
    for name, fields in (
        ("cispo", {"max_weight": 1, "min_weight": 1}),
        ("cispo", {"min_weight": 0}),
        ("sapo", {"tau_pos": 1e-3}),
        ("sapo", {"tau_neg": 1e-3}),
        ("dppo_tv", {"divergence_threshold": 1e-3}),
        ("gmpo", {"epsilon_low": 0.01}),
        ("grpo", {"off_policy_mask_threshold": 0}),
        ("grpo", {"log_ratio_coef": 0}),
        ("ppo", {"gamma": 0, "lam": 0}),
        ("ppo", {"gamma": 1, "lam": 1}),
    ):
        preset(name, **fields)
    for name, fields in (
        ("cispo", {"max_weight": 0.999}),
        ("cispo", {"max_weight": float("inf")}),
        ("cispo", {"min_weight": 1.001}),
        ("cispo", {"min_weight": -0.001}),
        ("sapo", {"tau_pos": 0}),
        ("sapo", {"tau_neg": 0}),
        ("sapo", {"tau_pos": float("inf")}),
        ("sapo", {"tau_neg": float("inf")}),
        ("dppo_tv", {"divergence_threshold": 0}),
        ("dppo_kl", {"divergence_threshold": float("inf")}),
        ("gmpo", {"epsilon_low": 0.0099}),
        ("gmpo", {"epsilon_high": 0.0099}),
        ("grpo", {"off_policy_mask_threshold": -1e-6}),
        ("grpo", {"off_policy_mask_threshold": float("inf")}),
        ("grpo", {"log_ratio_coef": -1e-6}),
        ("grpo", {"log_ratio_coef": float("inf")}),
    ):
        with pytest.raises(ValueError):
            preset(name, **fields)
    for value in (1e-6, 0.1):
        preset("gspo", epsilon_low=value, epsilon_high=value)
    for value in (0.9e-6, 0.1001):
        with pytest.raises(ValueError):
            preset("gspo", epsilon_low=value)
    preset("dr_grpo", loss_scale_factor=1e-3)
    with pytest.raises(ValueError):
        preset("dr_grpo", loss_scale_factor=float("inf"))
    assert preset("gspo", epsilon_high=float("inf"), allow_nonstandard=True).clip_range[1] == float(
        "inf"
    )


ANOTHER_ALGORITHM = [
    ("gspo", {"loss_agg_mode": "token-mean"}, "loss_agg_mode = 'token-mean'"),
    ("gspo_token", {"loss_agg_mode": "token-mean"}, "loss_agg_mode = 'token-mean'"),
    (
        "gspo",
        {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 8},
        "loss_agg_mode = 'seq-mean-token-sum-norm'",
    ),
    ("gspo", {"epsilon_low": 0.2}, "epsilon_low = 0.2"),
    ("gspo", {"epsilon_high": float("inf")}, "epsilon_high = inf"),
    ("gspo_token", {"epsilon_high": 0.27}, "epsilon_high = 0.27"),
    ("gspo", {"epsilon_low": 1e-9}, "epsilon_low = 1e-09"),
    ("grpo", {"epsilon_low": 3e-4}, "epsilon_low = 0.0003"),
    ("grpo", {"epsilon_high": 4e-4}, "epsilon_high = 0.0004"),
    ("gspo", {"importance_sampling_level": "token"}, "importance_sampling_level = 'token'"),
    (
        "gspo",
        {"importance_sampling_level": "sequence_token"},
        "importance_sampling_level = 'sequence_token'",
    ),
    (
        "gspo_token",
        {"importance_sampling_level": "sequence"},
        "importance_sampling_level = 'sequence'",
    ),
    ("grpo", {"importance_sampling_level": "sequence"}, "importance_sampling_level = 'sequence'"),
    ("grpo", {"loss_agg_mode": "token-mean"}, "loss_agg_mode = 'token-mean'"),
    ("dapo", {"loss_agg_mode": "seq-mean-token-mean"}, "loss_agg_mode = 'seq-mean-token-mean'"),
    ("dr_grpo", {"advantage_std": "sample"}, "advantage_std = 'sample'"),
    (
        "luspo",
        {"loss_agg_mode": "seq-mean-token-mean", "loss_scale_factor": None},
        "loss_agg_mode = 'seq-mean-token-mean'",
    ),
    ("luspo", {"epsilon_low": 0.2}, "epsilon_low = 0.2"),
    (
        "gmpo",
        {"importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
        "importance_sampling_level = 'sequence'",
    ),
    ("gmpo", {"loss_agg_mode": "token-mean"}, "loss_agg_mode = 'token-mean'"),
    ("gmpo", {"epsilon_high": 3e-4}, "epsilon_high = 0.0003"),
    ("cispo", {"loss_agg_mode": "seq-mean-token-mean"}, "loss_agg_mode = 'seq-mean-token-mean'"),
    (
        "cispo",
        {"importance_sampling_level": "sequence_token"},
        "importance_sampling_level = 'sequence_token'",
    ),
    ("cispo", {"surrogate": "dppo_tv", "divergence_threshold": 0.1}, "surrogate = 'dppo_tv'"),
    ("sapo", {"loss_agg_mode": "token-mean"}, "loss_agg_mode = 'token-mean'"),
    ("dppo_tv", {"surrogate": "dppo_kl"}, "surrogate = 'dppo_kl'"),
    ("ppo", {"advantage_estimator": "group", "lam": 1}, "advantage_estimator = 'group'"),
    ("grpo", {"advantage_estimator": "gae"}, "advantage_estimator = 'gae'"),
    (
        "grpo",
        {
            "surrogate": "sapo",
            "tau_pos": 1.0,
            "tau_neg": 1.0,
            "epsilon_low": None,
            "epsilon_high": None,
        },
        "surrogate = 'sapo'",
    ),
]


@pytest.mark.parametrize(("name", "fields", "words"), ANOTHER_ALGORITHM)
def test_another_algorithm_is_refused_in_one_line_unless_overridden(name, fields, words):
    with pytest.raises(ValueError) as error:
        preset(name, **fields)
    message = str(error.value)
    assert words in message and "allow_nonstandard=True" in message and "use " in message
    assert "\n" not in message
    o = preset(name, **fields, allow_nonstandard=True)
    assert all(getattr(o, key) == value for key, value in fields.items())


def test_refusals_follow_the_ratio_level_whatever_the_name():
    with pytest.raises(ValueError, match="token-mean"):
        Objective("mine", "sequence", "token-mean", epsilon_low=3e-4, epsilon_high=4e-4)
    with pytest.raises(ValueError, match="sequence ratio"):
        Objective("mine", "sequence", "seq-mean-token-mean", epsilon_low=0.2, epsilon_high=0.2)
    with pytest.raises(ValueError, match="token ratio"):
        Objective("mine", "token", "seq-mean-token-mean", epsilon_low=3e-4, epsilon_high=4e-4)
    Objective("own_ppo", "token", "token-mean", epsilon_low=0.2, epsilon_high=0.2)


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("grpo", {"epsilon_low": 0}, "epsilon_low = 0"),
        ("grpo", {"epsilon_high": -0.1}, "epsilon_high = -0.1"),
        ("grpo", {"epsilon_high": float("nan")}, "epsilon_high = nan"),
        ("grpo", {"epsilon_high": "0.2"}, "epsilon_high = '0.2'"),
        ("grpo", {"epsilon_high": None}, "epsilon_high = None"),
        ("grpo", {"kl_loss_coef": -1}, "kl_loss_coef = -1"),
        ("grpo", {"kl_loss_type": "k4"}, "k1, k2, k3"),
        ("grpo", {"entropy_coef": True}, "entropy_coef = True"),
        ("grpo", {"advantage_baseline": "critic"}, "mean, leave_one_out"),
        ("grpo", {"loss_scale_factor": 100}, "loss_scale_factor = 100"),
        ("dr_grpo", {"loss_scale_factor": 0}, "loss_scale_factor = 0"),
        (
            "cispo",
            {"epsilon_low": 1.0},
            "epsilon_low = 1.0 has no effect with surrogate = 'cispo': remove it",
        ),
        ("cispo", {"max_weight": None}, "max_weight = None with surrogate = 'cispo': set it"),
        ("cispo", {"dual_clip": 3.0}, "dual_clip = 3.0 has no effect with surrogate = 'cispo'"),
        ("cispo", {"max_weight": True}, "max_weight = True: must be 1 or above"),
        ("sapo", {"tau_pos": None}, "tau_pos = None with surrogate = 'sapo': set it"),
        ("sapo", {"max_weight": 2.0}, "max_weight = 2.0 has no effect with surrogate = 'sapo'"),
        (
            "dppo_tv",
            {"divergence_threshold": None},
            "divergence_threshold = None with surrogate = 'dppo_tv'",
        ),
        (
            "dppo_kl",
            {"min_weight": 0.5},
            "min_weight = 0.5 has no effect with surrogate = 'dppo_kl'",
        ),
        ("grpo", {"max_weight": 2.0}, "max_weight = 2.0 has no effect with surrogate = 'clip'"),
        (
            "gmpo",
            {"dual_clip": 3.0},
            "dual_clip = 3.0 does not go with importance_sampling_level = 'geometric_mean'",
        ),
        (
            "gmpo",
            {
                "surrogate": "sapo",
                "tau_pos": 1.0,
                "tau_neg": 1.0,
                "epsilon_low": None,
                "epsilon_high": None,
            },
            "surrogate = 'sapo'",
        ),
        (
            "dppo_tv",
            {"importance_sampling_level": "sequence_token"},
            "importance_sampling_level = 'sequence_token'",
        ),
        (
            "minirl",
            {"importance_sampling_level": "sequence_token"},
            "importance_sampling_level = 'sequence_token'",
        ),
        (
            "grpo",
            {"unbiased_kl": True, "kl_loss_type": "k2"},
            "kl_loss_type = 'k2' does not go with unbiased",
        ),
        ("grpo", {"unbiased_kl": 1}, "unbiased_kl = 1: must be True or False"),
        (
            "grpo",
            {"surrogate": "ppo"},
            "surrogate = 'ppo': must be one of clip, cispo, sapo, dppo_tv, dppo_kl",
        ),
        (
            "sft",
            {"surrogate": "cispo"},
            "surrogate = 'cispo' has no effect with importance_sampling_level = 'none'",
        ),
        (
            "sft",
            {"max_weight": 2.0},
            "max_weight = 2.0 has no effect with importance_sampling_level = 'none'",
        ),
        (
            "sft",
            {"off_policy_mask_threshold": 0.1},
            "off_policy_mask_threshold = 0.1 has no effect",
        ),
        ("sft", {"log_ratio_coef": 0.1}, "log_ratio_coef = 0.1 has no effect"),
        ("sft", {"unbiased_kl": True, "kl_loss_coef": 0.1}, "unbiased_kl = True has no effect"),
        (
            "grpo",
            {"gamma": 0.9},
            "gamma = 0.9 has no effect with advantage_estimator = 'group': remove it",
        ),
        (
            "grpo",
            {"lam": 0.9},
            "lam = 0.9 has no effect with advantage_estimator = 'group': remove it",
        ),
        (
            "ppo",
            {"advantage_baseline": "leave_one_out"},
            (
                "advantage_baseline = 'leave_one_out' has no effect with advantage_estimator ="
                " 'gae': remove it"
            ),
        ),
        ("ppo", {"lam": 1.01}, "lam = 1.01: must be 0 to 1"),
        ("ppo", {"gamma": -0.01}, "gamma = -0.01: must be 0 to 1"),
        ("ppo", {"gamma": 1.01}, "gamma = 1.01: must be 0 to 1"),
        ("sft", {"epsilon_low": 0.2}, "epsilon_low = 0.2"),
        ("grpo", {"allow_nonstandard": 1}, "allow_nonstandard = 1"),
    ],
)
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
