"""A calculator in the hands of an agent of smolagents (docs/agent_packages.md).

agents:
  function: examples/agents/smolagents_tools.py:run
"""

from __future__ import annotations

import re

from smolagents import OpenAIServerModel, ToolCallingAgent, tool
from smolagents.utils import AgentError

from megatron_gspo.agents.agent_function import AgentTask

MAX_STEPS = 8


@tool
def calculate(left: int, operator: str, right: int) -> int:
    """Calculate with two whole numbers.

    Args:
        left: The first number.
        operator: "+", "-" or "*".
        right: The second number.
    """
    if operator == "+":
        return left + right
    if operator == "-":
        return left - right
    return left * right


def run(task: AgentTask) -> float:
    """1 if the last number of the agent's answer is the right one, otherwise 0."""
    model = OpenAIServerModel(task.model, api_base=task.base_url, api_key=task.key)
    agent = ToolCallingAgent([calculate], model, max_steps=MAX_STEPS, verbosity_level=0)
    try:
        answer = agent.run(task.prompt)
    except AgentError:
        return 0.0  # a limit of the run
    return float(re.findall(r"-?\d+", str(answer))[-1:] == [task.answer])
