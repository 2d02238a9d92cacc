"""A task of Harbor in the hands of its agent Terminus 2 (docs/agent_packages.md).

agents:
  function: examples/agents/harbor_trial.py:run
  env: {LITELLM_LOCAL_MODEL_COST_MAP: "True"}    # prices are not looked up in the network

A row of the data: {"prompt": "hello-world", "task": "/data/tasks/hello-world"}
"""

from __future__ import annotations

from harbor.models.trial.config import TrialConfig
from harbor.trial.trial import Trial

from megatron_gspo.agents.agent_function import AgentTask

MAX_TURNS = 20


async def run(task: AgentTask) -> float:
    """The reward of the task's verifier."""
    agent = {
        "name": "terminus-2",
        "model_name": f"openai/{task.model}",
        "kwargs": {
            "api_base": task.base_url,  # the key is in the environment
            "max_turns": MAX_TURNS,
            "record_terminal_session": False,
        },
    }
    config = TrialConfig.model_validate(
        {
            "task": {"path": task.metadata["task"]},
            "trials_dir": task.directory,
            "agent": agent,
            "environment": task.metadata.get("environment", {"type": "docker"}),
        }
    )
    trial = await Trial.create(config)
    result = await trial.run()
    if result.verifier_result is None:
        raise RuntimeError(f"the trial has no reward: {result.exception_info}")
    return float((result.verifier_result.rewards or {})["reward"])
