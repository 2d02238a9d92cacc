"""Log-probs of given tokens from servers of a model that is not trained."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from megatron_gspo.config import ServerConfig
from megatron_gspo.rollout.server_engine.server_api import (
    InputScores,
    RequestContext,
    ResponseError,
    ServedModel,
    ServerAPI,
)
from megatron_gspo.rollout.server_engine.server_clients import server_clients
from megatron_gspo.servers.backoff import Backoff
from megatron_gspo.servers.http_client import EventLoop, ServerClient, ServerError, open_session

_INFO_SECONDS = 10.0  # until a server has told its limits
_BACKOFF = Backoff(0.2, longest=5.0)


class ScoringClient:
    """A client of servers, each of which has the whole model. Methods are called from the training
    thread."""

    def __init__(self, config: ServerConfig, api: ServerAPI, model: ServedModel) -> None:
        """model: sizes of the model; ids outside its vocabulary must not be scored. Its
        `top_log_probs` are asked for.

        Raises ValueError for an invalid URL.
        """
        self._config = config
        self._api = api
        self._model = model
        self._loop = EventLoop()
        self._session = self._loop.run(open_session())
        self._servers = server_clients(config.urls, self._session, config)
        self._free = asyncio.Semaphore(config.max_concurrent_requests * len(self._servers))

    @property
    def top_count(self) -> int:
        """The most likely ids at each token that are asked for."""
        return self._model.top_log_probs

    def too_short(self, longest: int) -> str:
        """Which server can't score `longest` tokens; "" where all can, or do not say."""

        async def check(server: ServerClient) -> str:
            try:
                info = await self._api.server_info(server, timeout=_INFO_SECONDS)
            except ServerError:
                return ""  # a server that is down at the start may be up at the first batch
            if info.max_input_tokens is not None and longest > info.max_input_tokens:
                return f"{server.url} takes at most {info.max_input_tokens} tokens"
            # A scored sequence is a prompt with one further token.
            if info.max_total_tokens is not None and longest >= info.max_total_tokens:
                return f"{server.url} holds sequences of at most {info.max_total_tokens} tokens"
            return ""

        async def check_all() -> list[str]:
            return await asyncio.gather(*map(check, self._servers))

        return next(filter(None, self._loop.run(check_all())), "")

    def score(self, sequences: Sequence[np.ndarray]) -> list[InputScores]:
        """The scores of each sequence [L].

        A request that fails is repeated at the next server. Raises EngineError where that does not
        help.
        """

        async def score_all() -> list[InputScores]:
            tasks = [
                asyncio.create_task(self._score(number, tokens.tolist()))
                for number, tokens in enumerate(sequences)
            ]
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()  # those that are left when one has failed

        return self._loop.run(score_all())

    def close(self) -> None:
        """End the requests. May be called again."""
        if not self._session.closed:
            self._loop.run(self._session.close())
        self._loop.close()

    async def _score(self, number: int, tokens: list[int]) -> InputScores:
        for attempt in range(self._config.retries + 1):
            server = self._servers[(number + attempt) % len(self._servers)]
            try:
                async with self._free:
                    return await self._score_at(server, tokens)
            except (ServerError, ResponseError) as error:
                is_final = isinstance(error, ServerError) and not error.retry
                if is_final or attempt == self._config.retries:
                    raise
            await asyncio.sleep(_BACKOFF.seconds(attempt + 1))
        raise AssertionError("unreachable")

    async def _score_at(self, server: ServerClient, tokens: list[int]) -> InputScores:
        context = RequestContext(f"the teacher at {server.url}", len(tokens), 1, self._model)
        request = self._api.score_request(tokens, context)
        body = await server.post_for_bytes(
            request.path,
            request.body,
            timeout=self._config.request_timeout,
            max_bytes=request.max_bytes,
        )
        return self._api.responses.parse_input_scores(body, context, tokens)
