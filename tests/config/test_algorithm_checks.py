"""The algorithm, corrections for the rollout engine and routing replay: choices that contradict
each other.
"""

from __future__ import annotations

import pytest

from megatron_gspo.algorithms import ScoreCentering
from megatron_gspo.config import ConfigError
from megatron_gspo.config.algorithm_checks import check_top_ids
from tests.config.building import ENVIRONMENT, PPO, SFT, assert_refused, build


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
            "algorithm.dynamic_sampling = true:",
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
        ([*SFT, "algorithm.rollout_rs=token"], 'algorithm.rollout_rs = "token":', "remove the key"),
        (
            ["algorithm.name=minirl", "algorithm.rollout_is=token"],
            'algorithm.rollout_is = "token":',
            "set it to none",
        ),
        (
            ["algorithm.name=minirl", "algorithm.old_log_probs=rollout"],
            'algorithm.old_log_probs = "rollout":',
            "set it to recompute",
        ),
        (["algorithm.rollout_is_threshold=3.0"], "algorithm.rollout_is_threshold = 3.0:", "token"),
        (
            ["algorithm.rollout_rs_threshold_lower=0.9"],
            "algorithm.rollout_rs_threshold_lower = 0.9:",
            "or geometric",
        ),
        (
            ["algorithm.rollout_rs_threshold=1.1"],
            "algorithm.rollout_rs_threshold = 1.1:",
            "or geometric",
        ),
        (["algorithm.rollout_rs=geometric"], "algorithm.rollout_rs_threshold = null:", "1.001"),
        (
            ["algorithm.rollout_is_threshold_lower=0.5"],
            "algorithm.rollout_is_threshold_lower = 0.5:",
            "token",
        ),
        (
            ["algorithm.rollout_rs_denominator=all"],
            'algorithm.rollout_rs_denominator = "all":',
            "sequence_k3",
        ),
        (
            ["algorithm.rollout_rs=token", "algorithm.rollout_rs_divergence=0.1"],
            "algorithm.rollout_rs_divergence = 0.1:",
            "to token_binary_kl or sequence_k3",
        ),
        (
            [
                "algorithm.rollout_rs=sequence_k3",
                "algorithm.rollout_rs_divergence=0.1",
                "algorithm.rollout_rs_threshold=2.0",
            ],
            "algorithm.rollout_rs_threshold = 2.0:",
            "set that to token or geometric",
        ),
        (["algorithm.rollout_rs=sequence_k3"], "algorithm.rollout_rs_divergence = null:", "0.001"),
        (
            ["routing.replay=r2", "algorithm.old_log_probs=rollout"],
            'routing.replay = "r2":',
            "set it to r3",
        ),
        ([*SFT, "routing.replay=r2"], 'routing.replay = "r2":', "set it to none"),
        ([*SFT, "routing.replay=r3"], 'routing.replay = "r3":', "set it to none"),
        (["routing.missing_routes=live"], 'routing.missing_routes = "live":', "r3"),
        (
            ["routing.missing_routes=live", "routing.replay=r2"],
            'routing.missing_routes = "live":',
            "set routing.replay: r3",
        ),
        (
            ["routing.compare_rollout=true", "routing.metrics=false"],
            "routing.compare_rollout = true:",
            "remove it",
        ),
        ([*SFT, "routing.compare_rollout=true"], "routing.compare_rollout = true:", "remove it"),
        (
            ["routing.perturbation_options={strength: 0.5}"],
            'routing.perturbation_options = {"strength": 0.5}:',
            "remove the key",
        ),
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


ON = ("algorithm.score_centering=8", "algorithm.name=grpo")
CENTERING = "algorithm.score_centering = 8"
BY_TOKEN = "algorithm.rollout_is=token"
REJECTED = "algorithm.rollout_rs=token"


@pytest.mark.parametrize(
    ("overrides", "fix"),
    [
        ((*SFT, ON[0]), "set it to 0"),
        ((*ON, ENVIRONMENT), "set it to 0"),
        ((*ON, "algorithm.old_log_probs=rollout"), "or algorithm.name: cispo"),
        ((ON[0], BY_TOKEN), "set algorithm.rollout_is: geometric"),
        ((ON[0], REJECTED), "set algorithm.rollout_rs: geometric"),
        ((*ON, REJECTED), "set algorithm.rollout_rs_denominator: all"),
        (
            (*ON, "algorithm.rollout_rs=token_binary_kl", "algorithm.rollout_rs_divergence=0.1"),
            "set algorithm.rollout_rs: token",
        ),
    ],
)
def test_centering_needs_the_weight_of_every_token(
    plain: dict, overrides: tuple[str, ...], fix: str
) -> None:
    assert_refused(plain, overrides, CENTERING, fix)


@pytest.mark.parametrize(
    ("overrides", "bounds", "kept"),
    [
        (ON, None, None),
        ((*ON, BY_TOKEN), (0.0, 2.0), None),
        ((*ON, "algorithm.rollout_correction_preset=icepop"), (0.0, 5.0), (0.5, 5.0)),
        ((ON[0], "algorithm.name=minirl"), (0.0, 5.0), None),
        ((ON[0], "algorithm.name=cispo"), None, None),
        (
            (ON[0], "algorithm.name=cispo", "algorithm.old_log_probs=rollout"),
            (0.0, 5.0),
            None,
        ),
        ((ON[0], "algorithm.name=gspo", "algorithm.rollout_is=geometric"), None, None),
    ],
)
def test_the_weight_of_a_token(
    plain: dict,
    overrides: tuple[str, ...],
    bounds: tuple[float, float] | None,
    kept: tuple[float, float] | None,
) -> None:
    assert build(plain, *overrides).algorithm.centering == ScoreCentering(bounds=bounds, kept=kept)
    assert build(plain, "algorithm.name=grpo").algorithm.centering is None


def test_centering_has_no_more_ids_than_the_model(plain: dict) -> None:
    algorithm = build(plain, *ON).algorithm
    check_top_ids(algorithm, {"vocab_size": 8})
    with pytest.raises(ConfigError, match="score_centering = 8: the model has 7 ids; lower it"):
        check_top_ids(algorithm, {"vocab_size": 7})
