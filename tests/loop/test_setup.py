"""What a run is built of, by its config, and what closing it ends.

Whole set-ups are in `tests/train`.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_gspo.config import Config
from megatron_gspo.loop.reward_scoring import EpisodeRewards, VerifierRewards
from megatron_gspo.loop.setup import Components, build_rewards
from tests.support.training_runs import base_config

SFT = {
    "algorithm": {"name": "sft"},
    "rollout": {"engine": "sft", "n_samples_per_prompt": 1},
    "training": {"global_batch_size": 4},
}


def config(**sections: Any) -> Config:
    return Config.from_dict(base_config("model", Path("run"), **sections))


class Closes:
    """Notes its end."""

    def __init__(self, name: str, ended: list[str]) -> None:
        self.name = name
        self.ended = ended

    def close(self) -> None:
        self.ended.append(self.name)


def components(
    groups: Any, eval_groups: Any, rewards: Any, made: Config | None = None
) -> Components:
    return Components(
        config=made or config(),
        policy=None,
        reference=None,
        engine=None,
        groups=groups,
        eval_groups=eval_groups,
        rewards=rewards,
        prompts=None,
        eval_prompts=[],
        dropped_prompts=0,
        tokenizer=None,
    )


@pytest.mark.parametrize("held_out", ["none", "the same", "others"])
def test_everything_is_closed_once(held_out: str) -> None:
    ended: list[str] = []
    groups = Closes("groups", ended)
    sources = {"none": None, "the same": groups, "others": Closes("held out", ended)}
    with pytest.raises(KeyError), components(groups, sources[held_out], Closes("rewards", ended)):
        raise KeyError
    assert ended == ["rewards", "groups"] + ["held out"] * (held_out == "others")


def test_supervised_training_samples_are_not_the_policys() -> None:
    assert components(None, None, None).trains_on_rollouts
    assert not components(None, None, None, config(**SFT)).trains_on_rollouts


def test_environments_score_in_place_of_the_verifier() -> None:
    pool = SimpleNamespace(close=lambda: None)
    made = config(
        data={"verifier": None, "verifier_failure_reward": -1.0},
        rollout={"environment": "mine.py:make"},
    )
    rewards = build_rewards(made, pool)
    assert rewards == EpisodeRewards(pool, "environment 'mine.py:make'", -1.0)
    rewards = build_rewards(config(), None)
    assert isinstance(rewards, VerifierRewards) and rewards.name.endswith(
        "spelling_verifier.py:score'"
    )
    rewards.close()
