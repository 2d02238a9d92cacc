"""Configs that are built from overrides, and the messages of those that are refused."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_gspo.config import Config, ConfigError, load_config
from megatron_gspo.config.load import apply_overrides

SFT = (
    "algorithm.name=sft",
    "rollout.engine=sft",
    "rollout.n_samples_per_prompt=1",
    "training.global_batch_size=16",
)
PPO = ("algorithm.name=ppo", "algorithm.epsilon_low=0.2", "algorithm.epsilon_high=0.2")
ENVIRONMENT = "rollout.environment=examples/environments/spell_backward.py:spell_backward"


def build(plain: dict, *overrides: str) -> Config:
    return Config.from_dict(apply_overrides(copy.deepcopy(plain), overrides))


def refused(plain: dict, *overrides: str, world_size: int | None = None) -> str:
    """The one-line error of loading the config or, with a world size, of its `check`."""
    with pytest.raises(ConfigError) as caught:
        config = build(plain, *overrides)
        if world_size is not None:
            config.check(world_size)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def assert_refused(plain: dict, overrides: Sequence[str], key: str, fix: str) -> None:
    """Loading fails; the message starts with `key` and its last part has `fix`."""
    message = refused(plain, *overrides)
    assert message.startswith(key), message
    assert fix in message.partition("; ")[2], message


def fault(file: Path, *overrides: str) -> str:
    """The one-line error of loading a file."""
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)
