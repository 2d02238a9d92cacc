"""Checks of the section `agents`. Each raises ConfigError."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from megatron_gspo.config.agents_section import AgentsConfig
from megatron_gspo.config.algorithm_section import AlgorithmConfig
from megatron_gspo.config.config_error import ConfigError
from megatron_gspo.config.data_sections import DataConfig
from megatron_gspo.config.key_files import check_key_file
from megatron_gspo.config.rollout_checks import check_import_file
from megatron_gspo.config.rollout_sections import RolloutConfig
from megatron_gspo.user_code import is_import_path

_OF_MESSAGES = ("thinking", "renderer")  # also those of environments with tools


def check_agents(
    agents: AgentsConfig, rollout: RolloutConfig, algorithm: AlgorithmConfig, data: DataConfig
) -> None:
    """The agent is named once, and the other sections support runs."""
    if not agents.is_on:
        _check_off(agents, has_environment=rollout.environment is not None)
        return
    ways = [key for key in ("command", "function", "external") if getattr(agents, key)]
    for key in ways[1:]:
        problem = f"agents.{ways[0]} is set too"
        raise ConfigError(f"agents.{key}", getattr(agents, key), problem, "remove one of the two")
    if agents.external:
        problem = "runners have an environment of their own"
        _refuse_changes(agents, ["env"], problem, "remove it")
    else:
        fix = "set agents.external: true, or remove it"
        _refuse_changes(agents, ["lease", "runner_key_file"], "has no effect without runners", fix)
    if agents.function is not None and not is_import_path(agents.function):
        fix = "set path/to/file.py:function or package.module:function"
        raise ConfigError("agents.function", agents.function, "names no function", fix)
    if agents.command and agents.python is not None:
        problem = "has no effect with agents.command"
        fix = "begin the command with it, or remove it"
        raise ConfigError("agents.python", agents.python, problem, fix)
    if any("{key}" in argument for argument in agents.command):
        problem = "every user of the machine could read {key} there"
        raise ConfigError("agents.command", list(agents.command), problem, "pass it in agents.env")
    if rollout.environment is not None:
        problem = "agents are set too, and each makes the samples"
        raise ConfigError("rollout.environment", rollout.environment, problem, "remove one of them")
    if algorithm.is_supervised:
        problem = "sft trains on reference answers"
        raise ConfigError("algorithm.name", algorithm.name, problem, "remove the section agents")
    if algorithm.needs_critic:
        problem = "the values of one sequence say nothing of a run's branches"
        fix = "use an objective without a value model, or remove the section agents"
        raise ConfigError("algorithm.name", algorithm.name, problem, fix)
    if algorithm.truncated == "penalize":
        problem = "rollout.max_response_length is the limit of a reply, not of a run"
        raise ConfigError("algorithm.truncated", "penalize", problem, "set keep or mask")
    for source in data.sources:
        if source.verifier is not None:
            problem = "runs of agents have one verifier"
            fix = "set data.verifier, which can read prompt.source"
            raise ConfigError(f"data.sources.{source.name}.verifier", source.verifier, problem, fix)
    if data.verifier == "judge_ranking":
        problem = "runs of agents are scored as they end, not beside those of their prompt"
        raise ConfigError("data.verifier", data.verifier, problem, "set judge")
    if any(source.chat_template for source in data.by_source.values()):
        problem = "the agent writes the messages, and gets the prompt as it is in the data"
        fix = "set it to false, and for rows of chat messages data.prompt_key: prompt.0.content"
        raise ConfigError("data.chat_template", True, problem, fix)


def _check_off(agents: AgentsConfig, *, has_environment: bool) -> None:
    fix = "set agents.command, agents.function or agents.external"
    keys = [key for key in vars(agents) if not (has_environment and key in _OF_MESSAGES)]
    _refuse_changes(agents, keys, "has no effect without an agent", fix)


def _refuse_changes(agents: AgentsConfig, keys: Sequence[str], problem: str, fix: str) -> None:
    """Raise ConfigError for the first of the keys that is not at its default."""
    defaults = AgentsConfig()
    for key in keys:
        value = getattr(agents, key)
        if value != getattr(defaults, key):
            raise ConfigError(f"agents.{key}", value, problem, fix)


def check_run_sizes(agents: AgentsConfig, max_context: int, max_run_tokens: int, room: int) -> None:
    """A run fits a micro-batch, and a call fits a run.

    room: tokens of runs that a micro-batch holds.
    """
    if max_run_tokens > room:
        problem = f"a micro-batch holds {room} tokens of a run"
        fix = "lower it, or raise training.max_tokens_per_micro_batch"
        raise ConfigError("agents.max_run_tokens", max_run_tokens, problem, fix)
    if max_context > max_run_tokens:
        key = "agents.max_context"
        if agents.max_context is None:
            key = "data.max_prompt_length + rollout.max_response_length"
        problem = f"a run has at most {max_run_tokens} tokens (agents.max_run_tokens)"
        fix = "lower it, or raise training.max_tokens_per_micro_batch and agents.max_run_tokens"
        raise ConfigError(key, max_context, problem, fix)


def check_agent_files(agents: AgentsConfig) -> None:
    """The program, the file of the function and that of the runners' key exist."""
    if agents.command:
        program = agents.command[0]
        if "{" not in program and shutil.which(program) is None:
            fix = "give a program on the PATH, or its path"
            raise ConfigError("agents.command", program, "no such program", fix)
    if agents.python is not None and shutil.which(agents.python) is None:
        fix = "give the interpreter of an environment, such as .venv-agents/bin/python"
        raise ConfigError("agents.python", agents.python, "no such program", fix)
    if agents.function is not None:
        check_import_file("agents.function", agents.function, "function")
    if agents.runner_key_file is not None:
        check_key_file("agents.runner_key_file", agents.runner_key_file)
