"""Drawing responses from a fleet: one request after the other for each draft until it is done, retried where it may be.

A request that fails is repeated, at another server where there is one, and what it had drawn is thrown away with it.
Every draft ends exactly once: as a sample, or with the run.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_gspo.config import SamplingParams
from megatron_gspo.errors import EngineError
from megatron_gspo.rollout.sglang.partial_response import Draft
from megatron_gspo.rollout.sglang.response_parser import (
    AnswerError,
    Asked,
    Part,
    answered_version,
    input_log_probs,
    is_empty,
    parse_answer,
)
from megatron_gspo.rollout.sglang.server_pool import Fleet, Member
from megatron_gspo.routing_replay.routes import RouteShape
from megatron_gspo.servers.http_client import Server, ServerError

_PRIME_TOKENS = 64  # prompts at least so long are computed once, before the samples of a group begin
_BACK_OFF, _LONGEST_BACK_OFF = 0.25, 15.0  # seconds before a request is repeated, doubling
_PAUSE = 0.02  # seconds before a request that came back empty is sent again
_INTERRUPT_SECONDS = 30.0  # what servers may take to give back what they have drawn


@dataclass(frozen=True)
class ModelFacts:
    """What the client must know of the model. vocab_size: a larger id never leaves (it kills some servers).
    max_length: tokens a sequence may have, None: no bound. stop_ids: end tokens. routes: None: don't ask for them."""

    vocab_size: int
    stop_ids: tuple[int, ...]
    max_length: int | None = None
    routes: RouteShape | None = None


@dataclass(frozen=True)
class RequestLimits:
    """timeout: seconds for one request. retries: how often one response may fail in a row before the run stops;
    in_all: seconds that those requests may take together, the wait for a server not counted."""

    timeout: float = 600.0
    retries: int = 8
    in_all: float = 1800.0


class _OtherWeights(EngineError):
    """An answer by other weights than the current ones."""


class Client:
    """See the module. `counts`: what happened since it was last read, by the names of docs/metrics.md."""

    def __init__(self, fleet: Fleet, model: ModelFacts, limits: RequestLimits) -> None:
        self.fleet, self.model, self.limits = fleet, model, limits
        self.current = 0  # training version that fleet.version stands for
        self._interruptions = 0
        self.counts: Counter[str] = Counter()

    async def draw(self, draft: Draft, sampling: SamplingParams, seed: int, near: Member | None) -> None:
        """Until `draft` is done. `near`: the server that has its prompt in the cache.

        Raises `EngineError` for a request that is refused, or fails more than `limits.retries` times or for longer
        than `limits.in_all`.
        """
        failed, spent = 0, 0.0
        while not draft.done:
            drawn, interruptions = draft.drawn, self._interruptions
            try:
                async with self.fleet.use(draft.prompt.length + draft.limit, near=None if failed else near) as member:
                    began = time.monotonic()  # the wait for a server isn't counted, and doesn't fail
                    await self._ask(draft, member, sampling, seed, self.limits.in_all - spent)
                if draft.drawn > drawn:
                    failed, spent = 0, 0.0
                    continue
                if self._interruptions > interruptions:
                    await asyncio.sleep(_PAUSE)
                    continue
                fault = EngineError("it came back without a token, and nobody had interrupted it")
            except ServerError as error:
                if not error.retry:
                    raise
                fault = error
            except AnswerError as error:
                self.counts["refused"] += 1
                fault = error
            except _OtherWeights as error:
                self.counts["distrusted"] += 1
                fault = error
            failed, spent = failed + 1, spent + time.monotonic() - began
            self.counts["retries"] += 1
            if failed > self.limits.retries or spent >= self.limits.in_all:
                raise EngineError(f"{draft.name}: given up after {failed} tries in {spent:.0f} s; the last: {fault}")
            await asyncio.sleep(min(_BACK_OFF * 2**failed, _LONGEST_BACK_OFF) * random.uniform(0.5, 1.0))

    async def _ask(self, draft: Draft, member: Member, sampling: SamplingParams, seed: int, left: float) -> None:
        """One request for the rest of `draft`, whose requests may take `left` more seconds."""
        version, current = self.fleet.version, self.current
        asked = self._asked(draft, version or "")
        body = self._body(draft, asked, sampling, seed)
        answer = await self._post(member, body, asked, min(self.limits.timeout, left))
        try:
            if is_empty(answer, asked):
                return
            found = answered_version(answer, asked)
            if found != version:
                reason = f"answered with weights {found[:80]!r} instead of {version!r}"
                if member.version == version:
                    await self.fleet.distrust(member, reason)
                raise _OtherWeights(f"server {member.server.url}: {reason}")
            part = parse_answer(answer, asked)
        except AnswerError as error:
            await self.fleet.blame(member, str(error))
            raise
        member.faults = member.losses = 0
        member.answered = time.monotonic()
        self._count(draft, part)
        draft.add(part, current)

    def _count(self, draft: Draft, part: Part) -> None:
        self.counts["requests"] += 1
        self.counts["input_tokens"] += draft.prompt.length + draft.drawn
        self.counts["cached_tokens"] += part.cached
        self.counts["continued"] += bool(draft.parts)

    async def _post(self, member: Member, body: dict[str, Any], asked: Asked, timeout: float) -> Any:
        """The answer; a `ServerError` too where the member was lost meanwhile."""
        request = member.server.post("/generate", body, timeout=timeout, max_bytes=asked.max_bytes)
        task = asyncio.ensure_future(request)
        member.tasks.add(task)
        try:
            await asyncio.wait({task})
            if task.cancelled():
                raise ServerError(f"{asked.name}: {member.reason or 'it was not given back'}", retry=True)
            return task.result()
        except ServerError as error:
            if not error.sent:
                await self.fleet.lose(member, str(error))
            elif error.retry and member.alive:
                await self.fleet.blame(member, str(error))
            message = f"{asked.name}: {error}" if asked.name not in str(error) else str(error)
            raise ServerError(message, status=error.status, retry=error.retry, sent=error.sent) from None
        finally:
            task.cancel()
            member.tasks.discard(task)

    def _asked(self, draft: Draft, version: str) -> Asked:
        return Asked(
            name=draft.name,
            context=draft.prompt.length + draft.drawn,
            max_new_tokens=draft.limit - draft.drawn,
            vocab_size=self.model.vocab_size,
            version=version,
            stop_ids=frozenset(self.model.stop_ids),
            routes=self.model.routes,
            routes_start=draft.routes_start,
        )

    def _body(self, draft: Draft, asked: Asked, sampling: SamplingParams, seed: int) -> dict[str, Any]:
        params = {
            "max_new_tokens": asked.max_new_tokens,
            "temperature": 0.0 if sampling.greedy else sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "stop_token_ids": list(self.model.stop_ids),
            # heeded by servers with --enable-deterministic-inference, ignored by the others
            "sampling_seed": _draw_seed(seed, draft),
        }
        body: dict[str, Any] = {"input_ids": draft.tokens, "sampling_params": params, "return_logprob": True}
        if self.model.routes is not None:
            body |= {"return_routed_experts": True, "routed_experts_start_len": draft.routes_start}
        return body

    async def prime(self, tokens: Sequence[int]) -> Member | None:
        """Have a prompt computed once, for the samples that follow; the server that did. A failure costs nothing."""
        if len(tokens) < _PRIME_TOKENS:
            return None
        body = {"input_ids": list(tokens), "sampling_params": {"max_new_tokens": 0, "temperature": 0.0}}
        async with self.fleet.use(len(tokens)) as member:
            try:
                asked = Asked("a prompt", len(tokens), 0, self.model.vocab_size, "")
                await self._post(member, body, asked, self.limits.timeout)
            except ServerError:
                return None
            return member

    async def score(self, server: Server, tokens: Sequence[int]) -> np.ndarray:
        """[len(tokens) - 1] float32: a server's log-probs (temperature 1) of tokens[1:] given those before."""
        body = {"input_ids": list(tokens), "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
                "return_logprob": True, "logprob_start_len": 0}
        asked = Asked(f"probe at {server.url}", len(tokens), 1, self.model.vocab_size, "")
        size = asked.max_bytes + 128 * len(tokens)
        return input_log_probs(await server.post("/generate", body, timeout=self.limits.timeout, max_bytes=size),
                               asked, tokens)

    async def interrupt(self) -> None:
        """Have all servers give back what they have drawn; nothing new begins until `fleet.hold(False)`."""
        await self.fleet.hold(True)
        self._interruptions += 1
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _INTERRUPT_SECONDS
        while busy := [member for member in self.fleet.members if member.tasks]:
            tasks = [task for member in busy for task in member.tasks]
            if loop.time() > deadline:
                for task in tasks:
                    task.cancel()
            # again and again: a request on its way in is missed by the first call
            await asyncio.gather(*(_abort_all(member.server) for member in busy if member.alive))
            await asyncio.wait(tasks, timeout=0.2)
            await asyncio.sleep(0)


async def _abort_all(server: Server) -> None:
    try:
        await server.post("/abort_request", {"rid": "", "abort_all": True}, timeout=5.0)
    except ServerError:
        pass  # the watch sees a dead server; its requests end with their connections


def _draw_seed(seed: int, draft: Draft) -> int:
    """63 bits that depend on (seed, prompt, sample, token) alone."""
    key = np.array([seed, draft.prompt.index, draft.sample_index, draft.drawn], dtype=np.int64).tobytes()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1
