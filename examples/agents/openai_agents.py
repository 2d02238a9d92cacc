"""A calculator in the hands of an agent of the OpenAI Agents SDK (docs/agent_packages.md).

agents:
  function: examples/agents/openai_agents.py:run
"""

from __future__ import annotations

import re
from typing import Literal

from agents import (
    Agent,
    AgentsException,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI, BadRequestError

from megatron_gspo.agents.agent_function import AgentTask

MAX_TURNS = 8


@function_tool
def calculate(left: int, operator: Literal["+", "-", "*"], right: int) -> int:
    """Calculate with two whole numbers."""
    if operator == "+":
        return left + right
    if operator == "-":
        return left - right
    return left * right


async def run(task: AgentTask) -> float:
    """1 if the last number of the agent's answer is the right one, otherwise 0."""
    set_tracing_disabled(True)  # traces would be sent to OpenAI
    client = AsyncOpenAI(base_url=task.base_url, api_key=task.key)
    agent = Agent(
        name="calculator",
        instructions="Use the tool for each step. End with the number that was asked for.",
        model=OpenAIResponsesModel(task.model, client),
        tools=[calculate],
    )
    try:
        result = await Runner.run(agent, task.prompt, max_turns=MAX_TURNS)
    except (AgentsException, BadRequestError):
        # No such tool, too many turns, or a limit of the run: what the policy did earns nothing.
        return 0.0
    return float(re.findall(r"-?\d+", str(result.final_output))[-1:] == [task.answer])
