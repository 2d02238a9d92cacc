"""Answers of a model behind OpenAI-compatible servers, each an object of a JSON schema.

A server that fails is left alone for a while, longer after each failure, and its requests go to the
others. Nothing is made up for a request without an answer: it gets the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import sqlite3
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ValidationError

from megatron_gspo.config.data_sections import JUDGE_REQUEST_SECONDS
from megatron_gspo.config.key_files import read_key
from megatron_gspo.config.server_urls import check_url
from megatron_gspo.errors import first_line
from megatron_gspo.paths import expand_path
from megatron_gspo.servers.backoff import Backoff
from megatron_gspo.servers.http_client import JsonObject, ServerClient, ServerError, open_session

Answer = TypeVar("Answer", bound=BaseModel)

BACKOFF_SECONDS = 0.5  # after the first failure of a server; doubled after each further one
_MAX_BACKOFF_SECONDS = 30.0
_MAX_QUOTED = 200  # characters of a refusal
# A server that says so has not tried: the request may be right, and another time it is answered.
_BUSY_STATUS = (429, 502, 503, 504)


class JudgeError(Exception):
    """Why a request has no answer, in one line."""


@dataclass(frozen=True)
class JudgeRequest(Generic[Answer]):
    """What is asked: chat messages, and the model of the answer, whose JSON schema the server gets.

    A violation of the schema, or a ValueError of one of the model's validators, is no answer.
    """

    messages: Sequence[Mapping[str, str]]
    answer: type[Answer]


class _Server:
    """One server and how it has answered so far."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.origin = check_url(parts._replace(path="").geturl())
        self.path = (parts.path.rstrip("/") or "/v1") + "/chat/completions"
        self.in_flight = 0
        self.retry_at = 0.0  # monotonic seconds
        self._failures = 0  # in a row
        self._failed_at = 0.0

    def record_failure(self, began: float, backoff: Backoff) -> None:
        """A request that was sent at `began` failed. Those that were in flight together count as
        one.
        """
        if began < self._failed_at:
            return
        self._failures += 1
        self._failed_at = time.monotonic()
        self.retry_at = self._failed_at + backoff.seconds(self._failures)

    def record_answer(self) -> None:
        """It works."""
        self._failures = 0


class JudgeServers:
    """A model that several servers serve.

    An answer is kept by the content of its request, and the same request is asked once.

    Attributes:
        description: the model and its servers, in one line.
    """

    def __init__(
        self,
        servers: Sequence[str],
        model: str,
        *,
        api_key_file: str | None = None,
        request: Mapping[str, Any] | None = None,
        concurrency: int = 64,
        request_timeout: float = JUDGE_REQUEST_SECONDS,
        attempts: int = 3,
        time_limit: float = 600.0,
        cache: str | None = None,
        backoff: float = BACKOFF_SECONDS,
    ) -> None:
        """Asks nothing yet.

        Args:
            servers: addresses, `http://host:port` or with the path before `/chat/completions`;
                default `/v1`.
            model: its name at the servers.
            api_key_file: the first line is sent as bearer token.
            request: further fields of each request, as `temperature`; its default is 0.
            concurrency: requests in flight.
            request_timeout: seconds until a request is sent again.
            attempts: how often a request is sent that a server has failed on, or answered against
                the schema. A server that cannot be reached or is busy does not count.
            time_limit: seconds of a call of `ask`; what has no answer then stays without one.
            cache: file of a database that keeps the answers; None: they are kept in memory.
            backoff: seconds that a server is left alone after its first failure.

        Raises:
            ValueError: a setting is invalid; OSError: the key can't be read; in one line.
        """
        if not servers or isinstance(servers, str):
            raise ValueError(f"servers is {servers!r}; give a list of addresses")
        if concurrency < 1 or attempts < 1:
            raise ValueError(
                f"concurrency is {concurrency} and attempts {attempts}; both must be at least 1"
            )
        self._servers = [_Server(url) for url in servers]
        self.description = f"the judge {model} answers at {', '.join(servers)}"
        self._api_key = read_key(expand_path(api_key_file)) if api_key_file else None
        self._fields = {"model": model, "temperature": 0.0, **(request or {})}
        self._concurrency = concurrency
        self._request_timeout = request_timeout
        self._attempts = attempts
        self._time_limit = time_limit
        self._backoff = Backoff(backoff, _MAX_BACKOFF_SECONDS)
        self._answers = _AnswerCache(":memory:" if cache is None else expand_path(cache))

    async def ask(self, requests: Sequence[JudgeRequest[Answer]]) -> list[Answer | JudgeError]:
        """An answer to each request, or the reason why it has none."""
        bodies = [self._body(request) for request in requests]
        keys = [
            hashlib.sha256(json.dumps(body, sort_keys=True).encode()).digest() for body in bodies
        ]
        distinct = {
            key: (body, request) for key, body, request in zip(keys, bodies, requests, strict=True)
        }
        deadline = time.monotonic() + self._time_limit
        slots = asyncio.Semaphore(self._concurrency)
        async with await open_session() as session:
            clients = {
                server: ServerClient(
                    server.origin,
                    session,
                    api_key=self._api_key,
                    key_setting="verifier_options.api_key_file",
                )
                for server in self._servers
            }
            answers = await asyncio.gather(
                *(
                    self._answer(key, body, request.answer, clients, slots, deadline)
                    for key, (body, request) in distinct.items()
                )
            )
        by_key = dict(zip(distinct, answers, strict=True))
        return [by_key[key] for key in keys]

    def _body(self, request: JudgeRequest[Answer]) -> JsonObject:
        schema = {
            "name": request.answer.__name__,
            "strict": True,
            "schema": request.answer.model_json_schema(),
        }
        return {
            **self._fields,
            "messages": [dict(message) for message in request.messages],
            "response_format": {"type": "json_schema", "json_schema": schema},
        }

    async def _answer(
        self,
        key: bytes,
        body: JsonObject,
        answer: type[Answer],
        clients: Mapping[_Server, ServerClient],
        slots: asyncio.Semaphore,
        deadline: float,
    ) -> Answer | JudgeError:
        kept = self._answers.get(key)
        if kept is not None:
            with contextlib.suppress(ValidationError):  # of a validator that has changed since
                return answer.model_validate_json(kept)
        reason = ""
        failures = 0
        try:
            async with asyncio.timeout(deadline - time.monotonic()), slots:
                while failures < self._attempts:
                    server = await self._free_server()
                    began = time.monotonic()
                    reason = reason or f"server {server.origin}: it has not answered yet"
                    server.in_flight += 1
                    try:
                        reply = await clients[server].post(
                            server.path, body, timeout=self._request_timeout
                        )
                        server.record_answer()
                        content = _content(reply)
                        verdict = answer.model_validate_json(content)
                        self._answers.put(key, content)
                        return verdict
                    except ServerError as error:
                        reason = str(error)
                        if not error.retry:
                            return JudgeError(reason)
                        server.record_failure(began, self._backoff)
                        failures += error.sent and error.status not in _BUSY_STATUS
                    except ValueError as error:
                        reason = f"server {server.origin}: {_fault(error)}"
                        failures += 1
                    finally:
                        server.in_flight -= 1
        except TimeoutError:
            reason = reason or "it was not sent yet"
            return JudgeError(f"no answer within {self._time_limit:g} s ({reason})")
        tries = "1 attempt" if failures == 1 else f"{failures} attempts"
        return JudgeError(f"no answer after {tries} ({reason})")

    async def _free_server(self) -> _Server:
        """The server with the fewest requests; waits while all are left alone."""
        while True:
            now = time.monotonic()
            server = min(
                self._servers, key=lambda server: (max(server.retry_at, now), server.in_flight)
            )
            if server.retry_at <= now:
                return server
            await asyncio.sleep(server.retry_at - now)


class _AnswerCache:
    """Answers by the content of their requests, in a database that may be in memory."""

    def __init__(self, path: str) -> None:
        try:
            # Calls may come from several threads, one after another.
            self._database = sqlite3.connect(
                path, timeout=60.0, isolation_level=None, check_same_thread=False
            )
            # What is lost with the machine is asked again.
            self._database.execute("PRAGMA synchronous = OFF")
            self._database.execute(
                "CREATE TABLE IF NOT EXISTS answers (request BLOB PRIMARY KEY, answer TEXT)"
            )
        except sqlite3.Error as error:
            raise ValueError(
                f"cache is {path!r}: {error}; name a file that can be written"
            ) from None

    def get(self, key: bytes) -> str | None:
        """The answer to a request, if it is known."""
        row = self._database.execute(
            "SELECT answer FROM answers WHERE request = ?", (key,)
        ).fetchone()
        return None if row is None else row[0]

    def put(self, key: bytes, answer: str) -> None:
        """Keep an answer."""
        self._database.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", (key, answer))


def _content(reply: Any) -> str:
    """The text of a chat completion. Raises ValueError for another reply, or one that was cut
    off.
    """
    try:
        [choice, *_] = reply["choices"]
        message = choice["message"]
        content = message["content"]
        refusal = message.get("refusal")
        reason = choice.get("finish_reason")
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ValueError("the reply is no chat completion") from None
    if reason == "length":
        raise ValueError("the answer was cut off; give it more tokens or a larger context")
    if reason == "content_filter":
        raise ValueError("the answer was cut off by a content filter")
    if refusal:
        raise ValueError(f"the judge refused ({' '.join(str(refusal).split())[:_MAX_QUOTED]})")
    if not isinstance(content, str):
        raise ValueError("the reply has no text")
    return content


def _fault(error: ValueError) -> str:
    """The first fault of an answer in one line."""
    if not isinstance(error, ValidationError):
        return first_line(error)
    fault = error.errors(include_url=False)[0]
    location = ".".join(map(str, fault["loc"]))
    return f"the answer breaks its schema ({location + ': ' if location else ''}{fault['msg']})"
