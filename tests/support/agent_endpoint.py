"""An agents' endpoint over a scripted generator, and a client without any package."""

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np

from megatron_gspo.agents.agent_run import AgentRun, RunLimits
from megatron_gspo.agents.endpoint import AgentEndpoint
from megatron_gspo.agents.generation import Generator
from megatron_gspo.agents.rendering import Rendering, TemplateRendering
from megatron_gspo.agents.session_tree import Row
from tests.support.chat_tokenizer import chat_tokenizer
from tests.support.scripted_generator import Script, ScriptedGenerator, log_prob_sizes

TOKENIZER = chat_tokenizer()
BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run it.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}


def in_event_loop(test: Callable) -> Callable:
    """Run an asynchronous test."""

    @functools.wraps(test)
    def run(*arguments, **named):
        asyncio.run(asyncio.wait_for(test(*arguments, **named), 1200))

    return run


def call_text(name: str = "bash", **arguments) -> str:
    """A tool call as the policy writes it."""
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


@dataclass
class Serving:
    """An endpoint with one open run, and a session for requests to it."""

    endpoint: AgentEndpoint
    generator: Generator
    limits: RunLimits
    session: aiohttp.ClientSession
    run: AgentRun
    lines: list[str]

    def open_run(self, seed: int) -> AgentRun:
        """Another run."""
        return self.endpoint.open_run(self.generator, self.limits, seed=seed)

    async def post(
        self, path: str, body: Any, *, run: AgentRun | None = None, key: str | None = None
    ) -> tuple[int, Any]:
        """(status, body) of the answer."""
        run = run or self.run
        url = f"{self.endpoint.base_url(run)}/{path}"
        headers = {"Authorization": f"Bearer {run.key if key is None else key}"}
        async with self.session.post(url, json=body, headers=headers) as response:
            return response.status, await response.json()

    async def chat(self, messages, *, run: AgentRun | None = None, **fields) -> dict[str, Any]:
        """The choice of an answered chat completion."""
        status, body = await self.post(
            "chat/completions", {"model": "policy", "messages": messages, **fields}, run=run
        )
        assert status == 200, body
        return body["choices"][0]

    async def message(self, messages, **fields) -> dict[str, Any]:
        """The message of an answered chat completion."""
        return (await self.chat(messages, **fields))["message"]

    @property
    def rows(self) -> list[Row]:
        return self.run.tree.rows()

    def trained_texts(self) -> list[list[str]]:
        """The texts of the replies that each row trains."""
        return [
            [
                TOKENIZER.decode(row.tokens[row.prompt_length :][turn.start : turn.end].tolist())
                for turn in row.turns
            ]
            for row in self.rows
        ]

    def check_rows(self) -> None:
        """Every trained token stands behind the tokens that it was drawn behind."""
        for row in self.rows:
            for turn in row.turns:
                start = row.prompt_length + turn.start
                end = row.prompt_length + turn.end
                drawn = [
                    call
                    for call in self.generator.calls
                    if np.array_equal(call.prompt, row.tokens[:start])
                    and np.array_equal(call.tokens[: end - start], row.tokens[start:end])
                    and (call.limits.stop or len(call.tokens) == end - start)
                ]
                assert drawn, "a reply is trained that was not drawn from its prompt"
                sizes = log_prob_sizes(drawn[0].prompt, row.tokens[start:end])
                assert row.log_probs is not None
                assert row.log_probs[turn.start : turn.end].tolist() == (-sizes).tolist()
            expected = [
                [token % 4, position % 4] for position, token in enumerate(row.tokens[:-1].tolist())
            ]
            assert row.routes is not None
            assert row.routes[:, 0].tolist() == expected


@asynccontextmanager
async def serving(
    script: Script, *, thinking="template", rendering: Rendering | None = None, **limits
) -> AsyncIterator[Serving]:
    """Serve a run. rendering: by default the chat template."""
    lines: list[str] = []
    generator = ScriptedGenerator(TOKENIZER, script)
    rendering = rendering or TemplateRendering(
        TOKENIZER, [TOKENIZER.eos_token_id], thinking=thinking
    )
    endpoint = AgentEndpoint(rendering, log=lines.append)
    run_limits = RunLimits(**limits)
    await endpoint.start()
    try:
        async with aiohttp.ClientSession() as session:
            run = endpoint.open_run(generator, run_limits, seed=1)
            yield Serving(endpoint, generator, run_limits, session, run, lines)
    finally:
        await endpoint.close()
