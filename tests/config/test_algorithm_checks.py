"""The algorithm, corrections for the rollout engine and routing replay: choices that contradict
each other.
"""

from __future__ import annotations

import pytest

from tests.config.building import PPO, SFT, assert_refused, build


@pytest.mark.parametrize(
    ("overrides", "key", "fix"),
    [
        (["algorithm.name=sft"], 'rollout.engine = "embedded":', "set rollout.engine: sft"),
        (["rollout.engine=sft"], 'rollout.engine = "sft":', "set algorithm.name: sft"),
        (
            [*SFT, "rollout.n_samples_per_prompt=2"],
            "rollout.n_samples_per_prompt = 2:",
            "set it to 1",
        ),
        ([*SFT, "algorithm.dynamic_sampling=true"], "algorithm.dynamic_sampling = ", "remove"),
        (
            ["rollout.n_samples_per_prompt=1"],
            "rollout.n_samples_per_prompt = 1:",
            "set it to 2 or more",
        ),
        (
            [*PPO, "rollout.n_samples_per_prompt=1", "algorithm.dynamic_sampling=true"],
            "algorithm.dynamic_sampling = true: a group of one response",
            "2 or more",
        ),
        (
            ["algorithm.kl_loss_coef=0.1", "algorithm.kl_reward_coef=0.1"],
            "algorithm.kl_reward_coef = 0.1:",
            "set one of the two to 0",
        ),
        (["algorithm.truncated=penalize"], "algorithm.overlong_buffer_len = 0:", "set 1 to 64"),
        (
            ["algorithm.truncated=penalize", "algorithm.overlong_buffer_len=65"],
            "algorithm.overlong_buffer_len = 65:",
            "64",
        ),
        (
            ["algorithm.overlong_buffer_len=8"],
            "algorithm.overlong_buffer_len = 8:",
            "truncated: penalize",
        ),
        *(
            (
                [f"algorithm.{key}=token", "algorithm.old_log_probs=rollout"],
                f'algorithm.{key} = "token": compares the rollout\'s log-probs with themselves',
                "set algorithm.old_log_probs: recompute, or this to none",
            )
            for key in ("rollout_is", "rollout_rs")
        ),
        ([*SFT, "algorithm.rollout_is=token"], "algorithm.rollout_is =", "remove the key"),
        (
            [*SFT, "algorithm.rollout_rs=token"],
            'algorithm.rollout_rs = "token": sft has no',
            "remove the key",
        ),
        (
            ["algorithm.name=minirl", "algorithm.rollout_is=token"],
            'algorithm.rollout_is = "token": weighs by',
            "set it to none",
        ),
        (
            ["algorithm.name=minirl", "algorithm.old_log_probs=rollout"],
            'algorithm.old_log_probs = "rollout": minirl clips',
            "set it to recompute",
        ),
        (
            ["algorithm.rollout_is_threshold=3.0"],
            "algorithm.rollout_is_threshold = 3.0: has no effect",
            "token",
        ),
        (
            ["algorithm.rollout_rs_threshold_lower=0.9"],
            "algorithm.rollout_rs_threshold_lower = 0.9: has no",
            "or geometric",
        ),
        (
            ["algorithm.rollout_rs_threshold=1.1"],
            "algorithm.rollout_rs_threshold = 1.1: has no effect",
            "or geometric",
        ),
        (
            ["algorithm.rollout_rs=geometric"],
            "algorithm.rollout_rs_threshold = null: the ratio of a sequence",
            "1.001",
        ),
        (
            ["algorithm.rollout_is_threshold_lower=0.5"],
            "algorithm.rollout_is_threshold_lower = 0.5: has no",
            "token",
        ),
        (
            ["algorithm.rollout_rs_denominator=all"],
            'algorithm.rollout_rs_denominator = "all": has no',
            "sequence_k3",
        ),
        (
            ["algorithm.rollout_rs=token", "algorithm.rollout_rs_divergence=0.1"],
            (
                "algorithm.rollout_rs_divergence = 0.1: has no effect with algorithm.rollout_rs ="
                " token"
            ),
            "set that to token_binary_kl or sequence_k3",
        ),
        (
            [
                "algorithm.rollout_rs=sequence_k3",
                "algorithm.rollout_rs_divergence=0.1",
                "algorithm.rollout_rs_threshold=2.0",
            ],
            (
                "algorithm.rollout_rs_threshold = 2.0: has no effect with algorithm.rollout_rs ="
                " sequence_k3"
            ),
            "set that to token or geometric",
        ),
        (
            ["algorithm.rollout_rs=sequence_k3"],
            (
                "algorithm.rollout_rs_divergence = null: is the largest divergence of"
                " algorithm.rollout_rs = sequence_k3"
            ),
            "0.001",
        ),
        (
            ["routing.replay=r2", "algorithm.old_log_probs=rollout"],
            (
                'routing.replay = "r2": records the routes in the pass that algorithm.old_log_probs'
                " = rollout leaves out"
            ),
            "set it to r3, or algorithm.old_log_probs: recompute",
        ),
        (
            [*SFT, "routing.replay=r2"],
            'routing.replay = "r2": sft has no old policy',
            "set it to none",
        ),
        (
            [*SFT, "routing.replay=r3"],
            'routing.replay = "r3": sft has no old policy',
            "set it to none",
        ),
        (
            ["routing.missing_routes=live"],
            'routing.missing_routes = "live": has no effect with routing.replay = "none"',
            "r3",
        ),
        (
            ["routing.missing_routes=live", "routing.replay=r2"],
            'routing.missing_routes = "live": has no effect with routing.replay = "r2"',
            "set routing.replay: r3, or remove it",
        ),
        (
            ["routing.compare_rollout=true", "routing.metrics=false"],
            "routing.compare_rollout = true: has no effect with routing.metrics = false",
            "remove it",
        ),
        (
            [*SFT, "routing.compare_rollout=true"],
            "routing.compare_rollout = true: has no effect",
            "remove it",
        ),
        (
            ["routing.perturbation_options={strength: 0.5}"],
            'routing.perturbation_options = {"strength": 0.5}: has no effect with',
            "remove the key",
        ),
        (["router_noise.strength=0.5"], 'router_noise = {"strength": 0.5}: is not', "remove it"),
    ],
)
def test_contradictions_are_refused_at_load(
    plain: dict, overrides: list[str], key: str, fix: str
) -> None:
    assert_refused(plain, overrides, key, fix)


def test_routing_that_goes_together(plain: dict) -> None:
    for overrides in (
        [
            "routing.replay=r3",
            "algorithm.old_log_probs=rollout",
            "routing.missing_routes=live",
            "routing.storage=host",
        ],
        ["routing.replay=r2", "routing.compare_rollout=true", "algorithm.name=grpo"],
        ["routing.replay=r2", "routing.metrics=false"],
        ["routing.perturbation=my.py:noise", "routing.replay=r3"],
        ["routing.perturbation=my.py:noise", "rollout.engine=sglang", "sglang.num_servers=1"],
    ):
        build(plain, *overrides).check(1)
