"""Bash in the hands of mini-swe-agent (docs/agent_packages.md).

agents:
  function: examples/agents/mini_swe_agent.py:run
  env: {LITELLM_LOCAL_MODEL_COST_MAP: "True"}    # prices are not looked up in the network

A row of the data: {"prompt": "Write 42 to answer.txt.", "test": "grep -qx 42 answer.txt"}, and a
command "setup" if there is something to prepare.
"""

from __future__ import annotations

import subprocess

from litellm.exceptions import ContextWindowExceededError
from minisweagent.agents.default import DefaultAgent
from minisweagent.config import get_config_from_spec
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

from megatron_gspo.agents.agent_function import AgentTask

MAX_STEPS = 20
TEST_SECONDS = 60.0


def run(task: AgentTask) -> float:
    """1 if the row's test ends without an error where the agent has worked, otherwise 0."""
    if "setup" in task.metadata:
        subprocess.run(task.metadata["setup"], shell=True, cwd=task.directory, check=True)
    settings = get_config_from_spec("mini.yaml")
    model = LitellmModel(
        model_name=f"openai/{task.model}",
        cost_tracking="ignore_errors",
        **settings["model"]
        | {"model_kwargs": {"api_base": task.base_url, "api_key": task.key, "drop_params": True}},
    )
    agent = DefaultAgent(
        model,
        LocalEnvironment(cwd=task.directory, **settings["environment"]),
        system_template=settings["agent"]["system_template"],
        instance_template=settings["agent"]["instance_template"],
        step_limit=MAX_STEPS,
    )
    try:
        agent.run(task.prompt)
    except ContextWindowExceededError:
        pass  # a limit of the run: what the agent has done until now counts
    return float(passes(task.metadata["test"], task.directory))


def passes(command: str, directory: str) -> bool:
    """Whether a shell command ends without an error in time."""
    try:
        test = subprocess.run(command, shell=True, cwd=directory, timeout=TEST_SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return test.returncode == 0
