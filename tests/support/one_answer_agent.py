"""An agent's function with one call, whose rewards differ for as long as its answers do."""

from __future__ import annotations

import json
import urllib.request

from megatron_gspo.agents.agent_function import AgentTask


def one_answer(task: AgentTask) -> float:
    """A number from 0 to 1 that is made of the answer's letters."""
    messages = [{"role": "user", "content": task.prompt}]
    body = json.dumps({"model": task.model, "messages": messages}).encode()
    headers = {"Authorization": f"Bearer {task.key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{task.base_url}/chat/completions", body, headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request) as answer:
        content = json.load(answer)["choices"][0]["message"]["content"]
    return (sum(map(ord, content)) % 7) / 6
