"""A calculator in the hands of an agent of LangGraph (docs/agent_packages.md).

agents:
  function: examples/agents/langgraph_agent.py:run
"""

from __future__ import annotations

import re
from typing import Any, Literal

from langchain_core.messages import SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from openai import BadRequestError

from megatron_gspo.agents.agent_function import AgentTask

INSTRUCTIONS = "Use the tool for each step. End with the number that was asked for."
MAX_STEPS = 16  # of the graph: a reply and its tools' results are two


@tool
def calculate(left: int, operator: Literal["+", "-", "*"], right: int) -> int:
    """Calculate with two whole numbers."""
    if operator == "+":
        return left + right
    if operator == "-":
        return left - right
    return left * right


def run(task: AgentTask) -> float:
    """1 if the last number of the agent's answer is the right one, otherwise 0."""
    model = ChatOpenAI(model=task.model, base_url=task.base_url, api_key=task.key)
    model = model.bind_tools([calculate])

    def reply(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke([SystemMessage(INSTRUCTIONS), *state["messages"]])]}

    graph = StateGraph(MessagesState)
    graph.add_node("reply", reply)
    graph.add_node("tools", ToolNode([calculate]))
    graph.add_edge(START, "reply")
    graph.add_conditional_edges("reply", tools_condition)
    graph.add_edge("tools", "reply")
    try:
        state = graph.compile().invoke(
            {"messages": [("user", task.prompt)]}, {"recursion_limit": MAX_STEPS}
        )
    except (GraphRecursionError, BadRequestError):
        # Too many steps, or a limit of the run: what the policy did earns nothing.
        return 0.0
    return float(re.findall(r"-?\d+", state["messages"][-1].text)[-1:] == [task.answer])
