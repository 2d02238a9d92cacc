"""An OpenAI-compatible server in this process, whose answers a test chooses."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

from aiohttp import web

from tests.support.threaded_server import ThreadedServer

Reply = web.Response | dict[str, Any] | str | None


class JudgeServer(ThreadedServer):
    """Answers each chat completion with what `choose` returns of the user's message and the JSON
    schema of the answer: an object or a text as the content, a response as it is, or None to hang
    until the server stops.

    bodies: of all requests. keys: their authorization headers. A request that is none of the
    protocol gets 404 or 400.
    """

    def __init__(self, choose: Callable[[str, dict[str, Any]], Reply]) -> None:
        super().__init__()
        self.choose = choose
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.most_in_flight = 0
        self._in_flight = 0
        self.asked = threading.Event()

    async def _start(self) -> None:
        await self._serve(self._answer, max_bytes=1 << 24)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if (request.method, request.path) != ("POST", "/v1/chat/completions"):
            return web.Response(status=404, text="no such path")
        body = await request.json()
        chosen_format = body["response_format"]
        if chosen_format["type"] != "json_schema" or not chosen_format["json_schema"]["strict"]:
            return web.Response(status=400, text="no schema")
        self.bodies.append(body)
        self.keys.append(request.headers.get("Authorization"))
        self._in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self._in_flight)
        self.asked.set()
        try:
            return await self._reply(body, chosen_format["json_schema"]["schema"])
        finally:
            self._in_flight -= 1

    async def _reply(self, body: dict[str, Any], schema: dict[str, Any]) -> web.StreamResponse:
        content = self.choose(body["messages"][-1]["content"], schema)
        if content is None:
            await self.stopping.wait()
            return web.Response(status=503)
        if isinstance(content, web.Response):
            return content
        text = content if isinstance(content, str) else json.dumps(content)
        return completion(text)


def completion(text: str, finish_reason: str = "stop") -> web.Response:
    """A chat completion with this content."""
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": finish_reason}
    return web.json_response({"object": "chat.completion", "choices": [choice]})
