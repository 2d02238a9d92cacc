"""What a run is built of, by its config, and what closing it ends.

Whole set-ups are in `tests/train`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_gspo.config import Config
from megatron_gspo.loop.setup import Components
from tests.support.training_runs import base_config


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
    groups: Any,
    eval_groups: Any,
    rewards: Any,
    made: Config | None = None,
    eval_rewards: Any = None,
) -> Components:
    return Components(
        config=made or config(),
        policy=None,
        reference=None,
        engine=None,
        groups=groups,
        eval_groups=eval_groups,
        rewards=rewards,
        eval_rewards=rewards if eval_rewards is None else eval_rewards,
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


def test_a_verifier_of_held_out_responses_is_closed_too() -> None:
    ended: list[str] = []
    rewards, own, groups = (Closes(name, ended) for name in ("rewards", "own", "groups"))
    components(groups, None, rewards, eval_rewards=own).close()
    assert ended == ["rewards", "own", "groups"]
