"""Sampling and environments: choices that contradict each other, and files that are missing."""

from __future__ import annotations

import pytest

from megatron_gspo.config import ConfigError
from megatron_gspo.config.rollout_checks import check_environment_file
from tests.config.building import ENVIRONMENT, SFT, assert_refused, build

TRUNCATED = ["rollout.top_k=8", "rollout.max_support=8"]
SERVERS = ["rollout.engine=sglang", "sglang.num_servers=1"]


@pytest.mark.parametrize(
    ("overrides", "key", "fix"),
    [
        (["rollout.top_p=0.9"], "rollout.top_p = 0.9:", "set 1"),
        (["rollout.top_k=20"], "rollout.top_k = 20:", "set 0"),
        (["rollout.min_p=0.1"], "rollout.min_p = 0.1:", "set 0, or rollout.max_support"),
        (["rollout.max_support=8"], "rollout.max_support = 8:", "set one of them, or remove it"),
        ([*TRUNCATED, *SFT], "rollout.max_support = 8:", "set it to 0"),
        (
            ["rollout.top_p=0.9", "rollout.max_support=8", *SERVERS],
            "rollout.max_support = 8:",
            "set rollout.top_k",
        ),
        ([*TRUNCATED, ENVIRONMENT], "rollout.max_support = 8:", "set it to 0"),
        ([*TRUNCATED, "algorithm.score_centering=8"], "rollout.max_support = 8:", "set it to 0"),
        (["rollout.temperature=0"], "rollout.temperature = 0.0:", "set it above 0"),
        (["evaluation.temperature=0", "evaluation.top_k=3"], "evaluation.top_k = 3:", "remove it"),
        (
            ["evaluation.temperature=0", "evaluation.top_p=0.5"],
            "evaluation.top_p = 0.5:",
            "remove it",
        ),
        (["rollout.offload_trainer=true", *SFT], "rollout.offload_trainer = true:", "remove it"),
        (
            ["rollout.offload_trainer=true", *SERVERS],
            "rollout.offload_trainer = true:",
            "set sglang.colocated: true",
        ),
        (
            [
                "rollout.offload_trainer=true",
                *SERVERS,
                "rollout.overlap=true",
                "rollout.max_staleness=1",
            ],
            "rollout.offload_trainer = true:",
            "set one of the two to false",
        ),
        (["rollout.max_turns=2"], "rollout.max_turns = 2:", "set that"),
        (["rollout.max_turn_length=9"], "rollout.max_turn_length = 9:", "remove this"),
        (["rollout.environment_options={a: 1}"], "rollout.environment_options = ", "remove this"),
        (["algorithm.turn_discount=0.5"], "algorithm.turn_discount = 0.5:", "set that"),
        (["rollout.environment=shell"], 'rollout.environment = "shell":', "file.py:factory"),
        (["rollout.environment=a-b:c"], 'rollout.environment = "a-b:c":', "module:factory"),
        ([ENVIRONMENT, *SFT], "rollout.environment = ", "remove the key"),
        (
            [ENVIRONMENT, "data.verifier=exact_match"],
            'data.verifier = "exact_match":',
            "remove one",
        ),
        (
            [ENVIRONMENT, "algorithm.turn_discount=0.5"],
            "algorithm.turn_discount = 0.5:",
            "algorithm.name: gspo_token",
        ),
        (
            [ENVIRONMENT, "algorithm.name=gmpo", "algorithm.turn_discount=0.5"],
            "algorithm.turn_discount = 0.5: gmpo has one ratio",
            "algorithm.name: gspo_token",
        ),
        (
            [ENVIRONMENT, "algorithm.name=gspo_token", "algorithm.turn_discount=1.5"],
            "algorithm.turn_discount = 1.5:",
            "<= 1",
        ),
    ],
)
def test_contradictions_are_refused_at_load(
    plain: dict, overrides: list[str], key: str, fix: str
) -> None:
    assert_refused(plain, overrides, key, fix)


def test_the_trainer_is_offloaded_for_servers_on_its_gpus_unless_that_is_off(plain: dict) -> None:
    shared = [*SERVERS, "sglang.colocated=true", "sglang.weight_transport=ipc"]
    assert [
        build(plain, *overrides).offloads_trainer
        for overrides in (
            [],
            ["rollout.offload_trainer=true"],
            SERVERS,
            shared,
            [*shared, "rollout.offload_trainer=false"],
        )
    ] == [False, True, False, True, False]


def test_turns_of_an_environment(plain: dict) -> None:
    for name in ("gspo_token", "grpo", "dapo", "dr_grpo"):
        config = build(plain, ENVIRONMENT, f"algorithm.name={name}", "algorithm.turn_discount=0.9")
        assert (config.algorithm.turn_discount, config.rollout.max_turns) == (0.9, 8)
    build(plain, ENVIRONMENT, "rollout.max_turns=2", "rollout.environment_options={tries: 2}")
    check_environment_file(build(plain, "rollout.environment=some.module:factory").rollout)
    with pytest.raises(
        ConfigError, match="rollout.environment = .*: no such file: missing.py; give its path"
    ):
        check_environment_file(build(plain, "rollout.environment=missing.py:factory").rollout)
