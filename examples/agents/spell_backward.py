"""Spell a word backward in up to three tries: an agent without any package.

agents:
  function: examples/agents/spell_backward.py:spell_backward
"""

from __future__ import annotations

import json
import urllib.request

from megatron_gspo.agents.agent_function import AgentTask

TRIES = 3


def spell_backward(task: AgentTask) -> float:
    """1 for the right word in the first try, half for each try more; without it little, for the
    most letters in their right place."""
    messages = [{"role": "user", "content": task.prompt}]
    most_right = 0.0
    for number in range(TRIES):
        reply = chat(task, messages)
        answer = reply["content"].strip()
        if answer == task.answer:
            return 0.5**number
        right = sum(a == b for a, b in zip(answer, task.answer, strict=False))
        most_right = max(most_right, right / len(task.answer))
        messages += [reply, {"role": "user", "content": f"\nnot {answer}\n{task.prompt}"}]
    return 0.1 * most_right


def chat(task: AgentTask, messages: list[dict[str, str]]) -> dict[str, str]:
    """The policy's message; `openai.OpenAI(base_url=task.base_url, api_key=task.key)` does the
    same."""
    body = json.dumps({"model": task.model, "messages": messages}).encode()
    headers = {"Authorization": f"Bearer {task.key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{task.base_url}/chat/completions", body, headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request) as answer:
        return json.load(answer)["choices"][0]["message"]
