"""A server with a token rule and faults on request: token j of a response is 10 + (input length
+ j) % 50.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
from aiohttp import web

from megatron_gspo.config import SamplingParams, ServerConfig
from megatron_gspo.data.sample import Prompt
from megatron_gspo.rollout.server_engine import response_generator
from megatron_gspo.rollout.server_engine.rollout_client import RolloutClient
from megatron_gspo.rollout.sglang.sglang_api import SGLangAPI
from megatron_gspo.servers.backoff import Backoff
from tests.servers.web_server import WebServer
from tests.support.served_models import served_model
from tests.support.sglang_responses import answer

VERSION = "00c0ffee:3"
MODEL = served_model()
SAMPLING = SamplingParams(n_samples_per_prompt=2, max_response_length=4)
Break = Callable[[dict[str, Any]], Any]  # of a right answer: another answer, or a web.Response


class Generator:
    """breaks: what befalls the next answers, in turn; breaks_of: those to one sender. gate: closed,
    answers wait for it or for an abort. It takes weights and keeps their version; updates: their
    number. senders: API key of each request in `bodies`. refuses: senders whose connections it
    closes. hangs: senders, or paths, that wait for ever.
    """

    def __init__(self) -> None:
        self.breaks: list[Break] = []
        self.always: Break | None = None
        self.version = VERSION
        self.bodies: list[dict[str, Any]] = []
        self.aborts = 0
        self.gate = True
        self.breaks_of: dict[str, list[Break]] = {}
        self.updates = 0
        self.senders: list[str] = []
        self.refuses: set[str] = set()
        self.hangs: set[str] = set()
        self._aborted = asyncio.Event()

    def __enter__(self) -> Generator:
        self.web = WebServer(self.answer)
        self.web.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.web.__exit__()

    @property
    def url(self) -> str:
        return self.web.url

    async def answer(self, request: web.Request) -> web.StreamResponse:
        sender = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if sender in self.refuses and request.transport is not None:
            request.transport.abort()
            return web.Response()
        if request.path in self.hangs or (request.path == "/generate" and sender in self.hangs):
            await self.web.hang()
            return web.Response()
        if request.path == "/abort_request":
            self.aborts += 1
            self._aborted.set()
            return web.json_response({})
        body = await request.json() if request.can_read_body else {}
        if request.path != "/generate":
            self.version = body.get("new_version", self.version)
            self.updates += "weights_from" in request.path
            return web.json_response({"success": True, "weight_version": self.version})
        self.bodies.append(body)
        self.senders.append(sender)
        reply = respond(body, self.version)
        while not self.gate:
            self._aborted.clear()
            try:
                await asyncio.wait_for(self._aborted.wait(), 0.01)
            except TimeoutError:
                continue
            reply = respond(body, self.version, cut=1)
            break
        breaks = self.breaks_of.get(sender) or self.breaks
        change = breaks.pop(0) if breaks else self.always
        reply = change(reply) if change is not None else reply
        if asyncio.iscoroutine(reply):
            reply = await reply
        return reply if isinstance(reply, web.StreamResponse) else web.json_response(reply)


def respond(body: dict[str, Any], version: str, cut: int | None = None) -> dict[str, Any]:
    """The right answer to a request; `cut`: aborted after so many tokens."""
    context = len(body["input_ids"])
    count = body["sampling_params"]["max_new_tokens"]
    tokens = [10 + (context + j) % 50 for j in range(count)]
    log_probs = [-float(token) / 8 for token in tokens]
    if cut is not None and cut < count:
        return answer(
            tokens[:cut],
            log_probs[:cut],
            "abort",
            context,
            weight_version=version,
            weight_versions=None,
        )
    return answer(
        tokens, log_probs, "length", context, weight_version=version, weight_versions=None
    )


def expected(prompt: Prompt) -> list[int]:
    """The tokens of a response to it, interrupted or not."""
    return [10 + (prompt.length + j) % 50 for j in range(SAMPLING.max_response_length)]


def prompts(count: int, length: int = 5) -> list[Prompt]:
    return [Prompt(i, np.arange(2, 2 + length) + i, "") for i in range(count)]


class Unwatched(RolloutClient):
    """A client that checks no server's health by itself."""

    def _start_monitor(self) -> Future:
        return Future()


class Setup:
    """A stream over some servers in a loop of its own."""

    def __init__(self, *urls: str, **settings: Any) -> None:
        given = dict(retries=3, request_timeout=10.0, response_timeout=60.0, recovery_timeout=30.0)
        config = ServerConfig(**{**given, **settings})
        self.client = Unwatched(urls, config, MODEL, str, api=SGLangAPI(), log=lambda line: None)
        self.loop = self.client.loop
        self.pool = self.client.pool
        self.serve()
        self.stream = self.client.stream()

    def serve(self, version: str = VERSION) -> None:
        """All servers hold this version."""
        self.client.current_version = int(version.rpartition(":")[2])
        self.loop.run(self.pool.set_version(version, self.pool.servers))
        self.loop.run(self.pool.resume())

    def __enter__(self) -> Setup:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()


def without_pauses(monkeypatch: Any) -> None:
    """Repeat failed requests at once."""
    monkeypatch.setattr(response_generator, "_BACKOFF", Backoff(0.0))
