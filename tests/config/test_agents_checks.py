"""Section `agents`: choices that contradict each other, and what a run's tokens must fit into."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_gspo.config import ConfigError
from megatron_gspo.config.agents_checks import check_agent_files
from megatron_gspo.config.agents_section import AgentsConfig
from tests.config.building import ENVIRONMENT, PPO, SFT, assert_refused, build, refused

AGENT = "agents.command=[python, agent.py]"


@pytest.mark.parametrize(
    ("overrides", "key", "fix"),
    [
        (["agents.max_calls=3"], "agents.max_calls = 3:", "set agents.command"),
        ([ENVIRONMENT, "agents.max_calls=3"], "agents.max_calls = 3:", "set agents.command"),
        (["agents.renderer=qwen3"], 'agents.renderer = "qwen3":', "set agents.command"),
        (["agents.listen=0.0.0.0"], 'agents.listen = "0.0.0.0":', "agents.function"),
        ([AGENT, "agents.function=a.py:run"], 'agents.function = "a.py:run":', "remove one"),
        ([AGENT, "agents.external=true"], "agents.external = true:", "remove one"),
        (["agents.external=true", "agents.env={A: b}"], "agents.env = ", "remove it"),
        ([AGENT, "agents.lease=5"], "agents.lease = 5.0:", "set agents.external: true"),
        ([AGENT, "agents.runner_key_file=key"], "agents.runner_key_file = ", "remove it"),
        (["agents.function=run"], 'agents.function = "run":', "file.py:function"),
        ([AGENT, "agents.python=python3"], 'agents.python = "python3":', "begin the command"),
        (["agents.command=[agent, '--key={key}']"], "agents.command = ", "agents.env"),
        ([AGENT, ENVIRONMENT], "rollout.environment = ", "remove one of them"),
        ([AGENT, *SFT], 'algorithm.name = "sft":', "remove the section agents"),
        ([AGENT, *PPO], 'algorithm.name = "ppo":', "without a value model"),
        (
            [AGENT, "algorithm.truncated=penalize", "algorithm.overlong_buffer_len=4"],
            'algorithm.truncated = "penalize":',
            "set keep or mask",
        ),
        (
            [
                AGENT,
                "data.verifier=judge_ranking",
                "data.verifier_timeout=100",
            ],
            'data.verifier = "judge_ranking":',
            "set judge",
        ),
        ([AGENT, "data.chat_template=true"], "data.chat_template = true:", "set it to false"),
        (
            [AGENT, "algorithm.turn_discount=0.5"],
            "algorithm.turn_discount = 0.5:",
            "algorithm.name: gspo_token",
        ),
    ],
)
def test_contradictions_are_refused(plain: dict, overrides: list[str], key: str, fix: str) -> None:
    assert_refused(plain, overrides, key, fix)


def test_the_rows_of_a_run_fit_a_micro_batch(plain: dict) -> None:
    """Each row may be padded, and a run has at most one row a call."""
    plain["training"]["max_tokens_per_micro_batch"] = 1001
    config = build(plain, AGENT, "agents.max_calls=11", "parallel.context_parallel_size=2")
    assert config.parallel.sequence_multiple == 4
    assert config.max_run_tokens == 1000 - 10 * 3
    assert config.max_context == config.data.max_prompt_length + config.rollout.max_response_length
    limits = ["agents.max_context=90", "agents.max_run_tokens=300"]
    config = build(plain, AGENT, *limits)
    assert (config.max_context, config.max_run_tokens) == (90, 300)


def test_environments_with_tools_write_messages_too(plain: dict) -> None:
    plain["training"]["max_tokens_per_micro_batch"] = 1001
    overrides = ["agents.renderer=qwen3", "agents.thinking=keep", "rollout.max_turns=3"]
    config = build(plain, ENVIRONMENT, "parallel.context_parallel_size=2", *overrides)
    assert config.max_run_tokens == 1000 - 2 * 3


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("agents.max_run_tokens=100000", "agents.max_run_tokens = 100000: a micro-batch holds"),
        ("agents.max_context=100000", "agents.max_context = 100000: a run has at most"),
    ],
)
def test_sizes_that_do_not_fit(plain: dict, override: str, message: str) -> None:
    assert refused(plain, AGENT, override, world_size=1).startswith(message)


def test_what_does_not_exist_is_named(tmp_path: Path) -> None:
    empty = tmp_path / "key"
    empty.write_text("\n")
    for file in ("missing", str(empty)):
        with pytest.raises(ConfigError, match="agents.runner_key_file.* its first line is empty"):
            check_agent_files(AgentsConfig(external=True, runner_key_file=file))
    check_agent_files(AgentsConfig())
    check_agent_files(AgentsConfig(command=("python", "x.py")))
    check_agent_files(AgentsConfig(function="package.module:run"))
    with pytest.raises(ConfigError, match="no such program; give the interpreter"):
        check_agent_files(AgentsConfig(function="package.module:run", python="no/python"))
    with pytest.raises(ConfigError, match="no such program; give a program on the PATH"):
        check_agent_files(AgentsConfig(command=("no-such-agent",)))
    with pytest.raises(ConfigError, match="no such file: missing.py; give its path"):
        check_agent_files(AgentsConfig(function="missing.py:run"))
