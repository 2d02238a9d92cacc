"""The objective's fields come from the preset unless they are given."""

from __future__ import annotations

import pytest

from megatron_gspo.algorithms import PRESETS, Objective, preset
from megatron_gspo.config import AlgorithmConfig, Config
from megatron_gspo.config.algorithm_section import with_preset


@pytest.mark.parametrize("name", PRESETS)
def test_the_section_is_the_presets_objective(name: str) -> None:
    section, objective = AlgorithmConfig.preset(name), preset(name)
    assert isinstance(section, Objective)
    assert {key: getattr(section, key) for key in vars(objective)} == vars(objective)


def test_given_fields_win_and_nulls_keep_the_preset() -> None:
    assert AlgorithmConfig.preset("grpo", epsilon_low=0.1).epsilon_low == 0.1
    filled = with_preset({"name": "grpo", "epsilon_low": None, "unknown": None}, max_response_length=None)
    assert filled["epsilon_low"] == 0.2 and filled["unknown"] is None


def test_the_divisor_of_dr_grpo_is_the_longest_response(plain: dict) -> None:
    config = Config.from_dict({**plain, "algorithm": {"name": "dr_grpo"}})
    assert config.algorithm.loss_scale_factor == config.rollout.max_response_length == 64
    chosen = Config.from_dict({**plain, "algorithm": {"name": "dr_grpo", "loss_scale_factor": 100}})
    assert chosen.algorithm.loss_scale_factor == 100
    assert Config.from_dict(plain).algorithm.loss_scale_factor is None


def test_the_default_length_counts_where_none_is_given(plain: dict) -> None:
    del plain["rollout"]["max_response_length"]
    config = Config.from_dict({**plain, "algorithm": {"name": "dr_grpo"}})
    assert config.algorithm.loss_scale_factor == config.rollout.max_response_length == 1024


def test_thresholds_of_rejection_sampling() -> None:
    assert AlgorithmConfig.preset(rollout_rs="token").rollout_rs_band == (0.5, 2.0)
    assert AlgorithmConfig.preset(rollout_rs="token", rollout_rs_threshold=4.0).rollout_rs_band == (0.25, 4.0)
