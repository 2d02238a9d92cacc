"""Generates responses on a pool of servers: one request after another until a response is finished.

A failed request is repeated, on another server if there is one; its tokens are discarded. Every
response ends exactly once: as a sample, or with the run.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from megatron_gspo.config import SamplingParams, ServerConfig
from megatron_gspo.errors import EngineError
from megatron_gspo.rollout.server_engine.partial_response import PartialResponse
from megatron_gspo.rollout.server_engine.server_api import (
    Request,
    RequestContext,
    ResponseError,
    ResponsePart,
    ServedModel,
    ServerAPI,
)
from megatron_gspo.rollout.server_engine.server_pool import PooledServer, PoolState, ServerPool
from megatron_gspo.servers.backoff import Backoff
from megatron_gspo.servers.http_client import ServerClient, ServerError

_MIN_PREFILL_TOKENS = 64  # shorter prompts are not prefilled before the samples of their group
_BACKOFF = Backoff(0.5, longest=15.0)
_INTERRUPTED_SECONDS = 0.02  # before a request that was interrupted without a token is repeated
_ABORT_SECONDS = 30.0  # servers may take to return what they have generated


class _StaleResponse(EngineError):
    """A response of other weights than the current ones."""


class ResponseGenerator:
    """The requests of one client, in one event loop.

    counts: events since they were last read, by the names of docs/metrics.md. current_version:
    training version of the pool's weight version. decode: token ids of a response to its text.
    recovery_timeout: seconds without a responding server after which the run fails.
    """

    def __init__(
        self,
        pool: ServerPool,
        model: ServedModel,
        api: ServerAPI,
        decode: Callable[[list[int]], str],
        config: ServerConfig,
    ) -> None:
        self.pool = pool
        self.model = model
        self.api = api
        self.decode = decode
        self.counts: Counter[str] = Counter()
        self.current_version = 0
        self.recovery_timeout = config.recovery_timeout
        self._config = config
        self._text_only = replace(model, stop_ids=(), return_routes=False, top_log_probs=0)
        self._interruptions = 0

    async def generate(
        self,
        response: PartialResponse,
        sampling: SamplingParams,
        seed: int,
        preferred: PooledServer | None,
    ) -> None:
        """Generate until `response` is finished. preferred: the server that has its prompt in the
        prefix cache.

        Raises `EngineError` if the server rejects the request, after more than `config.retries`
        failures in a row, or when the requests without a new token took longer than
        `config.resolved_response_timeout` seconds.
        """
        failures = 0
        spent = 0.0
        limit = self._config.resolved_response_timeout
        while not response.finished:
            num_tokens = response.num_tokens
            interruptions = self._interruptions
            try:
                cost = response.prompt.length + response.max_tokens
                async with self.pool.acquire(
                    cost, preferred=None if failures else preferred
                ) as server:
                    began = time.monotonic()  # the wait for a server is not counted
                    await self._request(response, server, sampling, seed, limit - spent)
                if response.num_tokens > num_tokens:
                    failures = 0
                    spent = 0.0
                    continue
                if self._interruptions > interruptions:
                    await asyncio.sleep(_INTERRUPTED_SECONDS)
                    continue
                fault = EngineError("it came back without a token, and it was not interrupted")
            except ServerError as error:
                if not error.retry:
                    raise
                fault = error
            except ResponseError as error:
                self.counts["refused"] += 1
                fault = error
            except _StaleResponse as error:
                self.counts["stale_responses"] += 1
                fault = error
            failures += 1
            spent += time.monotonic() - began
            self.counts["retries"] += 1
            if failures > self._config.retries or spent >= limit:
                raise EngineError(
                    f"{response.name}: given up after {failures} tries in {spent:.0f} s; the last:"
                    f" {fault}"
                )
            await asyncio.sleep(_BACKOFF.seconds(failures))

    async def prefill(self, tokens: list[int]) -> PooledServer | None:
        """Compute a prompt once, before the samples of its group; returns the server that has
        it. Ignores failures.
        """
        if len(tokens) < _MIN_PREFILL_TOKENS:
            return None
        async with self.pool.acquire(len(tokens)) as server:
            try:
                context = RequestContext("a prompt", len(tokens), 0, self._text_only)
                request = self.api.prefill_request(tokens, context)
                await self._post(server, request, context.name, self._config.request_timeout)
            except ServerError:
                return None
            return server

    async def follow_state(self, state: PoolState) -> None:
        """Take over the state of the client that this one follows."""
        self.current_version = state.training_version
        await self.pool.follow(state.version, state.servers)
        if state.paused:
            await self.pool.pause()
        else:
            await self.pool.resume()

    async def hear(self) -> None:
        """Learn from clients that request for this one elsewhere what they have found."""

    async def pause_requests(self) -> None:
        """Start no request until `pool.resume()`; those in flight may come back without a
        token, by anyone's abort.
        """
        await self.pool.pause()
        self._interruptions += 1

    async def interrupt_requests(self) -> None:
        """`pause_requests`, and have the servers of requests in flight return what they have
        generated; the other clients are paused.
        """
        await self.pause_requests()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _ABORT_SECONDS
        while busy := [server for server in self.pool.servers if server.tasks]:
            tasks = [task for server in busy for task in server.tasks]
            if loop.time() > deadline:
                for task in tasks:
                    task.cancel()
            # repeated: an abort does not reach a request that is still being sent
            await asyncio.gather(*(self._abort(server.client) for server in busy if server.alive))
            await asyncio.wait(tasks, timeout=0.2)
            await asyncio.sleep(0)

    async def _abort(self, server: ServerClient) -> None:
        try:
            await self.api.abort_requests(server, timeout=5.0)
        except ServerError:
            pass  # health checks find a dead server; its requests end with their connections

    async def _request(
        self,
        response: PartialResponse,
        server: PooledServer,
        sampling: SamplingParams,
        seed: int,
        time_left: float,
    ) -> None:
        """One request for the rest of `response`.

        time_left: seconds that its requests may still take.
        """
        version = self.pool.version
        training_version = self.current_version
        context = self._context(response, version or "", sampling)
        request_seed = _request_seed(seed, response)
        request = self.api.generate_request(response.tokens, context, sampling, request_seed)
        body = await self._post(
            server, request, context.name, min(self._config.request_timeout, time_left)
        )
        try:
            answer = self.api.responses.decode_response(body, context)
            if self.api.responses.is_empty(answer, context):
                return
            reported = self.api.responses.response_version(answer, context)
            if reported != version:
                reason = f"answered with weights {reported[:80]!r} instead of {version!r}"
                if server.version == version:
                    await self.pool.mark_stale(server, reason)
                raise _StaleResponse(f"server {server.url}: {reason}")
            part = self.api.responses.parse_response(answer, context)
        except ResponseError as error:
            await self.pool.mark_failed(server, str(error))
            raise
        self.pool.mark_succeeded(server)
        self._count(response, part)
        response.add(part, training_version)

    def _count(self, response: PartialResponse, part: ResponsePart) -> None:
        self.counts["requests"] += 1
        self.counts["input_tokens"] += response.prompt.length + response.num_tokens
        self.counts["cached_tokens"] += part.cached
        self.counts["continued"] += bool(response.parts)

    async def _post(
        self, server: PooledServer, request: Request, name: str, timeout: float
    ) -> bytearray:
        """The body of the server's answer.

        A server that is marked down meanwhile is a `ServerError` too.
        """
        posted = server.client.post_for_bytes(
            request.path, request.body, timeout=timeout, max_bytes=request.max_bytes
        )
        task = asyncio.ensure_future(posted)
        server.tasks.add(task)
        try:
            await asyncio.wait({task})
            if task.cancelled():
                raise ServerError(
                    f"{name}: {server.reason or 'the server did not return it'}", retry=True
                )
            return task.result()
        except ServerError as error:
            if not error.sent:
                await self.pool.mark_down(server, str(error))
            elif error.retry and server.alive:
                await self.pool.mark_failed(server, str(error))
            message = f"{name}: {error}" if name not in str(error) else str(error)
            raise ServerError(
                message, status=error.status, retry=error.retry, sent=error.sent
            ) from None
        finally:
            task.cancel()
            server.tasks.discard(task)

    def _context(
        self, response: PartialResponse, version: str, sampling: SamplingParams
    ) -> RequestContext:
        return RequestContext(
            name=response.name,
            context_length=response.prompt.length + response.num_tokens,
            max_new_tokens=response.max_tokens - response.num_tokens,
            model=self.model,
            version=version,
            routes_start=response.routes_start,
            log_probs=self.api.gives_log_probs(sampling),
            max_support=sampling.max_support,
        )


def _request_seed(seed: int, response: PartialResponse) -> int:
    """63 bits that depend on (seed, prompt, sample, token) alone."""
    numbers = [seed, response.prompt.index, response.sample_index, response.num_tokens]
    key = np.array(numbers, dtype=np.int64).tobytes()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1
