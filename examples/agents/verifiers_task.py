"""A task and a harness of verifiers (docs/agent_packages.md).

agents:
  function: examples/agents/verifiers_task.py:run
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import verifiers.v1 as vf
from openai import OpenAI
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.client import EvalClientConfig
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.harness import Harness
from verifiers.v1.runtimes import ProgramResult, Runtime

from megatron_gspo.agents.agent_function import AgentTask

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Calculate with two whole numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "left": {"type": "integer"},
                "operator": {"enum": ["+", "-", "*"]},
                "right": {"type": "integer"},
            },
        },
    },
}
MAX_TURNS = 8


class Question(vf.TaskData):
    answer: str


class LastNumber(vf.Task[Question]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        """1 if the last number of the agent's answer is the right one, otherwise 0."""
        return float(re.findall(r"-?\d+", trace.last_reply or "")[-1:] == [self.data.answer])


class CalculatorHarness(Harness[HarnessConfig]):
    """Runs this file as the agent's program."""

    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: ModelContext,
        trace: vf.Trace,
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Question,
    ) -> ProgramResult:
        client = {"OPENAI_BASE_URL": endpoint, "OPENAI_API_KEY": secret}
        return await runtime.run_program(
            [sys.executable, __file__, ctx.model, str(data.prompt)], client
        )


async def run(task: AgentTask) -> float:
    """The reward of one rollout."""
    client = EvalClientConfig(base_url=task.base_url, api_key_var="OPENAI_API_KEY")
    config = vf.AgentConfig(
        model=task.model, client=client, runtime={"type": "subprocess"}, max_turns=MAX_TURNS
    )
    agent = vf.make_agent(config)
    agent.harness = CalculatorHarness(HarnessConfig(id="calculator"))
    question = Question(idx=task.index, prompt=task.prompt, answer=task.answer)
    async with agent:
        trace = await agent.run(LastNumber(question))
    return trace.reward


def main() -> None:
    """The agent's program: calls tools until the model answers."""
    client = OpenAI()
    messages: list[Any] = [{"role": "user", "content": sys.argv[2]}]
    while True:
        completion = client.chat.completions.create(
            model=sys.argv[1], messages=messages, tools=[TOOL]
        )
        reply = completion.choices[0].message
        messages.append(reply.model_dump(exclude_none=True))
        if not reply.tool_calls:
            break
        for call in reply.tool_calls:
            assert call.type == "function"
            result = calculate(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def calculate(name: str, arguments: str) -> str:
    """The result of a tool call, or what is wrong with it."""
    try:
        values = json.loads(arguments)
        left = int(values["left"])
        right = int(values["right"])
        results = {"+": left + right, "-": left - right, "*": left * right}
        return str({"calculate": results}[name][values["operator"]])
    except (ValueError, TypeError, KeyError) as error:
        return f"error: {error!r}"


if __name__ == "__main__":
    main()
