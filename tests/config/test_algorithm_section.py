"""The objective's fields come from the preset unless they are given."""

from __future__ import annotations

import pytest

from megatron_gspo.algorithms import PRESETS, Objective, preset
from megatron_gspo.config import AlgorithmConfig, Config
from megatron_gspo.config.algorithm_section import with_preset
from megatron_gspo.objectives.presets import CORRECTIONS
from tests.config.building import assert_refused, build


@pytest.mark.parametrize("name", PRESETS)
def test_the_section_is_the_presets_objective(name: str) -> None:
    section = AlgorithmConfig.preset(name)
    objective = preset(name)
    assert isinstance(section, Objective)
    assert {key: getattr(section, key) for key in vars(objective)} == vars(objective)


def test_given_fields_win_and_nulls_keep_the_preset() -> None:
    assert AlgorithmConfig.preset("grpo", epsilon_low=0.1).epsilon_low == 0.1
    filled = with_preset(
        {"name": "grpo", "epsilon_low": None, "unknown": None}, max_response_length=None
    )
    assert filled["epsilon_low"] == 0.2 and filled["unknown"] is None


def test_the_divisor_of_dr_grpo_is_the_longest_response(plain: dict) -> None:
    config = Config.from_dict({**plain, "algorithm": {"name": "dr_grpo"}})
    assert config.algorithm.loss_scale_factor == config.rollout.max_response_length == 64
    chosen = Config.from_dict({**plain, "algorithm": {"name": "dr_grpo", "loss_scale_factor": 100}})
    assert chosen.algorithm.loss_scale_factor == 100
    assert Config.from_dict(plain).algorithm.loss_scale_factor is None


@pytest.mark.parametrize(
    ("overrides", "key", "fix"),
    [
        (["algorithm.epsilon_low=0.2"], "algorithm.epsilon_low = 0.2:", "allow_nonstandard: true"),
        (
            ["algorithm.name=grpo", "algorithm.epsilon_high=4e-4"],
            "algorithm.epsilon_high = 0.0004:",
            "about 0.2",
        ),
        (
            ["algorithm.loss_agg_mode=token-mean"],
            'algorithm.loss_agg_mode = "token-mean":',
            "seq-mean-token-mean",
        ),
        (["algorithm.rollout_is_threshold=0.5"], "algorithm.rollout_is_threshold = 0.5:", ">= 1"),
        (
            ["algorithm.rollout_rs_threshold_lower=1.5"],
            "algorithm.rollout_rs_threshold_lower = 1.5:",
            "<= 1",
        ),
        (["algorithm.rollout_rs_threshold=0.5"], "algorithm.rollout_rs_threshold = 0.5:", ">= 1"),
    ],
)
def test_contradictions_are_refused_at_load(
    plain: dict, overrides: list[str], key: str, fix: str
) -> None:
    assert_refused(plain, overrides, key, fix)


def test_a_published_correction_fills_keys_that_are_not_given(plain: dict) -> None:
    for name in CORRECTIONS:
        section = build(plain, f"algorithm.rollout_correction_preset={name}").algorithm
        assert {key: getattr(section, key) for key in CORRECTIONS[name]} == CORRECTIONS[name]
        assert (section.rollout_is == section.rollout_rs == "none") == (name == "none")
    given = ["algorithm.rollout_correction_preset=icepop", "algorithm.rollout_rs_threshold=4.0"]
    section = build(plain, *given).algorithm
    assert (section.rollout_rs_band, section.rollout_is_threshold) == ((0.5, 4.0), 5.0)
    assert_refused(
        plain,
        ["algorithm.rollout_correction_preset=tis"],
        "algorithm.rollout_correction_preset",
        "icepop",
    )


def test_thresholds_of_rejection_sampling(plain: dict) -> None:
    def band(*overrides: str) -> tuple[float, float]:
        return build(
            plain, *(f"algorithm.rollout_rs{o}" for o in overrides)
        ).algorithm.rollout_rs_band

    assert band("=token") == (0.5, 2.0)
    assert band("=token", "_threshold=4.0") == (0.25, 4.0)
    assert band("=token", "_threshold_lower=0.1") == (0.1, 2.0)
    assert band("=geometric", "_threshold=1.25", "_threshold_lower=0.9") == (0.9, 1.25)
