"""A reverse proxy in front of a real server that breaks selected replies in a chosen way.

    with FaultProxy(server_url) as proxy:
        proxy.add(Fault("half"))                                    # the next /generate
        proxy.add(Fault("late", path="/update_weights", seconds=3, times=2))
        ...  # the client under test is given proxy.url

Everything else passes through unchanged, so what is injected is the only thing that isn't the
server's own.
"""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

from tests.support.threaded_server import ThreadedServer

_BIGGEST = 2**36  # bytes of a request: buckets of weights pass through
_NOT_PASSED_ON = {"host", "content-length", "transfer-encoding", "connection", "content-encoding"}


def _meta(answer: dict[str, Any]) -> dict[str, Any]:
    return answer["meta_info"]


def _shorten(answer: dict[str, Any]) -> None:
    _meta(answer)["output_token_logprobs"].pop()


def _set_log_prob(value: float) -> Callable[[dict[str, Any]], None]:
    def change(answer: dict[str, Any]) -> None:
        _meta(answer)["output_token_logprobs"][-1][0] = value

    return change


def _foreign_token(answer: dict[str, Any]) -> None:
    answer["output_ids"][-1] = _meta(answer)["output_token_logprobs"][-1][1] = 10**6


def _cut_routes(answer: dict[str, Any]) -> None:
    routes = base64.b64decode(_meta(answer)["routed_experts"])
    _meta(answer)["routed_experts"] = base64.b64encode(routes[: len(routes) // 2 // 4 * 4]).decode()


def _old_version(answer: dict[str, Any]) -> None:
    _meta(answer)["weight_version"] = "another-life:0"
    _meta(answer).pop("weight_versions", None)


Changes = dict[str, Callable[[dict[str, Any]], None]]
# What changes SGLang's answer to a /generate (of several, the first)
CHANGES: Changes = {
    "wrong_lengths": _shorten,
    "nan": _set_log_prob(float("nan")),
    "positive": _set_log_prob(0.5),
    "foreign_token": _foreign_token,
    "few_routes": _cut_routes,
    "old_version": _old_version,
}


def _choice(answer: dict[str, Any]) -> dict[str, Any]:
    return answer["choices"][0]


def _set_vllm_log_prob(value: float) -> Callable[[dict[str, Any]], None]:
    def change(answer: dict[str, Any]) -> None:
        _choice(answer)["logprobs"]["content"][-1]["logprob"] = value

    return change


def _foreign_vllm_token(answer: dict[str, Any]) -> None:
    _choice(answer)["token_ids"][-1] = _choice(answer)["logprobs"]["content"][-1]["token_id"] = (
        10**6
    )


def _old_vllm_version(answer: dict[str, Any]) -> None:
    for span in _choice(answer)["weight_versions"]:
        span["version"] = "another-life:0"


# The same of vLLM's answer to /inference/v1/generate
VLLM_CHANGES: Changes = {
    "wrong_lengths": lambda answer: _choice(answer)["logprobs"]["content"].pop(),
    "nan": _set_vllm_log_prob(-9999.0),  # as vLLM sends it
    "positive": _set_vllm_log_prob(0.5),
    "foreign_token": _foreign_vllm_token,
    "few_routes": lambda answer: _choice(answer).update(routed_experts=None),
    "old_version": _old_vllm_version,
}


def _has_tokens(answer: dict[str, Any]) -> bool:
    """Whether tokens came with log-probs. They did not from a request that was aborted at its
    start, nor from vLLM's health check, whose path is that of generations: a change would go
    unnoticed."""
    if "meta_info" in answer:
        return bool(_meta(answer).get("output_token_logprobs"))
    return bool((_choice(answer)["logprobs"] or {}).get("content"))


# What becomes of the exchange itself
EXCHANGES = {
    "hang": "the request is taken and never answered; the server doesn't see it",
    "refuse": "the connection is closed at once; the server doesn't see the request",
    "error": "status 500; the server doesn't see the request",
    "lost": "the server does the work and the answer is lost",
    "half": "the connection is closed after half of the answer",
    "late": "the answer comes `seconds` after the server gave it",
    "huge": "an answer of `size` bytes",
    "call": (
        "`action` is called `seconds` after the request went to the server, such as one that"
        " kills it"
    ),
}


@dataclass
class Fault:
    """kind: a name in CHANGES or EXCHANGES. path: what the request's path begins with; None: that
    of generations. times: how many requests it befalls; skip: how many of them it spares before. A
    change waits for an answer that has tokens."""

    kind: str
    path: str | None = None
    times: int = 1
    skip: int = 0
    seconds: float = 0.0
    size: int = 2**28
    action: Callable[[], object] | None = None

    def __post_init__(self) -> None:
        if self.kind not in CHANGES and self.kind not in EXCHANGES:
            raise ValueError(
                f"no fault {self.kind!r}; there are {', '.join((*CHANGES, *EXCHANGES))}"
            )


class FaultProxy(ThreadedServer):
    """The proxy of a server at `upstream`. requests: the path of each request that came. generate:
    path of generations. changes: of their answers, by name."""

    def __init__(
        self, upstream: str, *, generate: str = "/generate", changes: Changes = CHANGES
    ) -> None:
        super().__init__()
        self.generate = generate
        self.changes = changes
        self.upstream = upstream
        self.requests: list[str] = []
        self._faults: list[Fault] = []
        self._lock = threading.Lock()

    def add(self, fault: Fault) -> None:
        """Queue a fault: it befalls the next requests with its path that no earlier one befalls."""
        with self._lock:
            self._faults.append(fault)

    def clear(self) -> None:
        """Forget the faults that are still to come."""
        with self._lock:
            self._faults.clear()

    @property
    def pending(self) -> int:
        """How many faults are still to come."""
        with self._lock:
            return sum(fault.times for fault in self._faults)

    async def _start(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            trust_env=False,
        )
        await self._serve(self._handle, max_bytes=_BIGGEST)

    async def _stop(self) -> None:
        await super()._stop()
        await self._session.close()

    def _take(self, path: str) -> Fault | None:
        with self._lock:
            self.requests.append(path)
            for fault in self._faults:
                if not path.startswith(fault.path or self.generate):
                    continue
                if fault.skip:
                    fault.skip -= 1
                    return None
                fault.times -= 1
                if fault.times == 0:
                    self._faults.remove(fault)
                return fault
        return None

    def _put_back(self, fault: Fault) -> None:
        with self._lock:
            if fault.times == 0:
                self._faults.insert(0, fault)
            fault.times += 1

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        fault = self._take(request.path)
        kind = fault.kind if fault else None
        if kind == "hang":
            await self.stopping.wait()
        if kind in ("hang", "refuse"):
            return self._close(request)
        if kind == "error":
            return web.json_response({"error": {"message": "injected"}}, status=500)
        if kind == "huge":
            return await self._pour(request, fault.size)
        try:
            answer, body = await self._ask(request, fault)
        except (aiohttp.ClientError, OSError):
            return self._close(request)  # as the server's own end looks from the other side
        if kind == "lost":
            return self._close(request)
        if kind == "late":
            await asyncio.sleep(fault.seconds)
        if kind == "half":
            response = web.StreamResponse(
                status=answer.status, headers={"content-length": str(len(body))}
            )
            await response.prepare(request)
            await response.write(body[: len(body) // 2])
            return self._close(request, response)
        if fault and kind in self.changes and answer.status == 200:
            answers = json.loads(body)
            first = answers[0] if isinstance(answers, list) else answers
            if _has_tokens(first):
                self.changes[kind](first)
                body = json.dumps(answers).encode()
            else:
                self._put_back(fault)
        headers = {
            name: value
            for name, value in answer.headers.items()
            if name.lower() not in _NOT_PASSED_ON
        }
        return web.Response(status=answer.status, headers=headers, body=body)

    async def _ask(
        self, request: web.Request, fault: Fault | None
    ) -> tuple[aiohttp.ClientResponse, bytes]:
        headers = {
            name: value
            for name, value in request.headers.items()
            if name.lower() not in _NOT_PASSED_ON
        }
        data = await request.read()
        if fault is not None and fault.kind == "call":
            assert fault.action is not None
            self._loop.call_later(fault.seconds, fault.action)
        async with self._session.request(
            request.method, f"{self.upstream}{request.path_qs}", headers=headers, data=data
        ) as answer:
            return answer, await answer.read()

    def _close(
        self, request: web.Request, response: web.StreamResponse | None = None
    ) -> web.StreamResponse:
        if request.transport is not None:
            request.transport.close()
        return response or web.Response()

    async def _pour(self, request: web.Request, size: int) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "application/json"})
        await response.prepare(request)
        piece = b" " * 2**16
        try:
            for _ in range(-(-size // len(piece))):
                await response.write(piece)
            await response.write_eof(b"{}")
        except ConnectionError:  # the client has had enough
            pass
        return response
