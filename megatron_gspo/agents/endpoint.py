"""The HTTP server that agents call: the APIs of OpenAI and Anthropic over the runs of a rank.

A run's requests go to `<url>/runs/<number>/v1/...` and carry its key, as a bearer token or as
`x-api-key`. Runners claim runs at `<url>/tasks/claim`, with a key of their own. With this key they
may also play them at `<url>/v1/...`, where the header `x-session-id` names the run. Errors have the
statuses that the clients of both APIs take as final: 401 for a key that is not, or no longer,
valid, 404, and 400; 503 alone is tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, Protocol

from aiohttp import ClientError, web

from megatron_gspo.agents.agent_run import AgentRun, Draw, RunLimits, session_over
from megatron_gspo.agents.conversation import (
    Call,
    CallError,
    Reply,
    invalid_request,
    over_limit,
    reply_id_of,
)
from megatron_gspo.agents.dialects import chat, fields, messages, responses
from megatron_gspo.agents.generation import Generator
from megatron_gspo.agents.rendering import Rendering
from megatron_gspo.agents.run_queue import RunQueue
from megatron_gspo.errors import InputError

MAX_BODY_BYTES = 32 * 2**20
MAX_DEPTH = 64  # of the JSON of a body
PING_SECONDS = 10.0  # between signs of life in a stream that waits for its reply
_SEND_BUFFER_BYTES = 64 * 2**10  # of a connection; what is in it counts as delivered
_BACKLOG = 1024  # connections that wait to be accepted
_SHUTDOWN_SECONDS = 5.0
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_EVERYWHERE = ("0.0.0.0", "::")


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Dialect(Protocol):
    """An API's requests and responses: a module of `dialects`."""

    PING: bytes

    def parse_call(self, body: Mapping[str, Any]) -> Call: ...

    def response_body(self, call: Call, reply: Reply) -> dict[str, Any]: ...

    def events(self, call: Call, reply: Reply) -> Iterator[bytes]: ...

    def error_body(self, error: CallError) -> dict[str, Any]: ...

    def error_event(self, error: CallError) -> bytes: ...


class AgentEndpoint:
    """See the module. url: where it listens, once it is started.

    All methods are called in the event loop that serves it.
    """

    def __init__(
        self,
        rendering: Rendering,
        *,
        listen: str = "127.0.0.1",
        port: int = 0,
        queue: RunQueue | None = None,
        log: Callable[[str], None] = print,
    ) -> None:
        """listen: address; another one than this machine's loopback is warned of. port: 0 takes a
        free one. queue: of the runs that runners may claim; None serves no runners. log: takes a
        line for each thing that an agent asks for in vain, once."""
        self.url = ""
        self._rendering = rendering
        self._listen = listen
        self._port = port
        self._queue = queue
        self._log = log
        self._runs: dict[int, AgentRun] = {}
        self._sessions: dict[str, AgentRun] = {}
        self._num_runs = 0
        self._remarks: set[str] = set()
        self._server: web.AppRunner | None = None

    async def start(self) -> None:
        """Listen. Raises InputError for an address or a port that can't be opened."""
        if self._listen not in _LOOPBACK:
            self._log(
                f"agents.listen: {self._listen} is open to other machines, whose only hurdle are"
                " the keys of the runs; use it in a private network"
            )
        application = web.Application(client_max_size=MAX_BODY_BYTES)
        self._add_run_routes(application.router, "/runs/{number:[0-9]{1,18}}/v1")
        if self._queue is not None:
            application.router.add_post("/tasks/claim", _answering(chat, self._claim))
            self._add_run_routes(application.router, "/v1")
        application.router.add_route("*", "/{path:.*}", _answering(chat, _refuse_path))
        self._server = web.AppRunner(
            application, access_log=None, shutdown_timeout=_SHUTDOWN_SECONDS
        )
        await self._server.setup()
        listener = self._open_listener()
        await web.SockSite(self._server, listener, backlog=_BACKLOG).start()
        port = listener.getsockname()[1]
        host = f"[{self._listen}]" if ":" in self._listen else self._listen
        self.url = f"http://{host}:{port}"
        if self._queue is not None:
            name = socket.gethostname() if self._listen in _EVERYWHERE else host
            self._queue.announce(f"http://{name}:{port}")

    def open_run(
        self,
        generator: Generator,
        limits: RunLimits,
        *,
        seed: int,
        takes_rewards: bool = True,
    ) -> AgentRun:
        """A new run, whose replies are of `generator`. seed: 62 bits from (seed, prompt, sample).
        takes_rewards: see `AgentRun`."""
        run = AgentRun(
            self._num_runs,
            seed,
            limits,
            self._rendering,
            generator,
            takes_rewards=takes_rewards,
        )
        self._runs[run.number] = run
        self._sessions[run.session_id] = run
        self._num_runs += 1
        return run

    def base_url(self, run: AgentRun) -> str:
        """For clients of OpenAI's APIs; `<base_url>/reward` takes the reward."""
        return f"{self.anthropic_url(run)}/v1"

    def anthropic_url(self, run: AgentRun) -> str:
        """For clients of Anthropic's API, which add the version themselves."""
        return f"{self.url}/runs/{run.number}"

    def end_run(self, run: AgentRun) -> None:
        """Revoke the key of a run and stop its calls. May be called again."""
        run.end()
        self._runs.pop(run.number, None)
        self._sessions.pop(run.session_id, None)

    async def close(self) -> None:
        """End all runs and stop listening. May be called again."""
        for run in list(self._runs.values()):
            self.end_run(run)
        if self._server is not None:
            await self._server.cleanup()
            self._server = None

    def _open_listener(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._listen else socket.AF_INET
        try:
            listener = socket.create_server((self._listen, self._port), family=family)
        except OSError as error:
            raise InputError(
                f"agents.listen = {self._listen}: port {self._port} can't be opened"
                f" ({(error.strerror or str(error)).lower()}); give an address of this machine and a"
                " free port"
            ) from error
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        return listener

    def _add_run_routes(self, router: web.UrlDispatcher, prefix: str) -> None:
        router.add_post(f"{prefix}/chat/completions", self._call_handler(chat))
        router.add_post(f"{prefix}/responses", self._call_handler(responses))
        router.add_post(f"{prefix}/messages", self._call_handler(messages))
        router.add_post(f"{prefix}/messages/count_tokens", _answering(messages, self._count_tokens))
        router.add_get(f"{prefix}/models", _answering(chat, self._models))
        router.add_post(f"{prefix}/reward", _answering(chat, self._reward))
        router.add_post(f"{prefix}/renew", _answering(chat, self._renew))
        router.add_post(f"{prefix}/end", _answering(chat, self._end))

    def _call_handler(self, dialect: Dialect) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                run = self._authorized(request)
                call = dialect.parse_call(await _read_object(request))
                self._remark(call)
                prepared = run.prepare(call)
                consumer = _Connection(request)
                draw = run.begin(prepared, consumer, is_repeated=_is_repeated(request))
            except CallError as error:
                return _error_response(dialect, error)
            exchange = _Exchange(request, dialect, run, draw, consumer, call)
            return await (exchange.stream() if call.stream else exchange.answer())

        return handle

    async def _count_tokens(self, request: web.Request) -> dict[str, Any]:
        run = self._authorized(request)
        prepared = run.prepare(messages.parse_call(await _read_object(request)))
        return messages.token_count(len(prepared.prompt))

    async def _models(self, request: web.Request) -> dict[str, Any]:
        self._authorized(request)
        return fields.model_list()

    async def _reward(self, request: web.Request) -> dict[str, Any]:
        run = self._authorized(request)
        body = await _read_object(request)
        given = body.get("response_id")
        reply_id = "" if given is None else reply_id_of(given) or "unknown"
        run.set_reward(body.get("reward"), reply_id)
        return {"reward": float(body["reward"])}

    async def _renew(self, request: web.Request) -> dict[str, Any]:
        """Any request renews the lease of a run; this one does nothing else."""
        self._authorized(request)
        return {"renewed": True}

    async def _end(self, request: web.Request) -> dict[str, Any]:
        self.end_run(self._authorized(request))
        return {"ended": True}

    async def _claim(self, request: web.Request) -> dict[str, Any]:
        queue = self._queue_of_runner(request)
        queued = queue.claim()
        if queued is None:
            return {"task": None}
        run = queued.run
        # As the runner reaches this machine, which may be over a tunnel.
        anthropic_url = f"{request.scheme}://{request.host}/runs/{run.number}"
        addresses = {
            "base_url": f"{anthropic_url}/v1",
            "anthropic_url": anthropic_url,
            "key": run.key,
            "session_id": run.session_id,
            "model": "policy",
            "lease": queue.lease,
        }
        return {"task": {**queued.task, **addresses}}

    def _authorized(self, request: web.Request) -> AgentRun:
        """The run of a request that has the right to it. Raises CallError 401 for another one."""
        number = request.match_info.get("number")
        if number is None:
            run = self._run_of_session(request)
        else:
            run = self._runs.get(int(number))
            if run is not None and not _has_key(request, run.key):
                run = None
        if run is None:
            raise session_over()
        run.touch()
        return run

    def _run_of_session(self, request: web.Request) -> AgentRun | None:
        """The run that a runner's request names; None if it is over."""
        self._queue_of_runner(request)
        session_id = request.headers.get("x-session-id")
        if session_id is None:
            raise invalid_request("the header x-session-id is missing; give session_id of a task")
        return self._sessions.get(session_id)

    def _queue_of_runner(self, request: web.Request) -> RunQueue:
        """The queue. Raises CallError 401 for a request without the key of runners."""
        assert self._queue is not None, "runners have no path without a queue"
        if not _has_key(request, self._queue.key):
            raise CallError(401, "invalid_runner_key", "the key is not that of runners")
        return self._queue

    def _remark(self, call: Call) -> None:
        """One line for each field that has no effect, when it is first sent."""
        for name in call.remarks:
            if name not in self._remarks:
                self._remarks.add(name)
                self._log(f"agents: requests set {name}, which has no effect here")


class _Connection:
    """The client of a request."""

    def __init__(self, request: web.Request) -> None:
        self._request = request

    @property
    def gone(self) -> bool:
        transport = self._request.transport
        return transport is None or transport.is_closing()


class _Exchange:
    """The answer to one call. It is delivered when all of it is written to the connection; what the
    system still holds of it then is little."""

    def __init__(
        self,
        request: web.Request,
        dialect: Dialect,
        run: AgentRun,
        draw: Draw,
        consumer: _Connection,
        call: Call,
    ) -> None:
        self._request = request
        self._dialect = dialect
        self._run = run
        self._draw = draw
        self._consumer = consumer
        self._call = call
        if request.transport is not None:
            request.transport.set_write_buffer_limits(0)  # a write waits until the system has it

    async def answer(self) -> web.StreamResponse:
        """The reply as one body."""
        try:
            reply = await self._run.reply(self._draw, self._consumer)
            if reply is None:
                return _adopted_elsewhere()
            response = web.json_response(self._dialect.response_body(self._call, reply))
            with _closing_connection():
                await response.prepare(self._request)
                await response.write_eof()
                self._deliver(reply)
            return response
        except CallError as error:
            return _error_response(self._dialect, error)
        finally:
            self._run.abandon(self._draw, self._consumer)

    async def stream(self) -> web.StreamResponse:
        """The reply as server-sent events."""
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        response = web.StreamResponse(headers=headers)
        try:
            with _closing_connection():
                await response.prepare(self._request)
                try:
                    reply = await self._reply_with_pings(response)
                except CallError as error:
                    await response.write(self._dialect.error_event(error))
                    return response
                if reply is None:
                    return response
                for data in self._dialect.events(self._call, reply):
                    await response.write(data)
                await response.write_eof()
                self._deliver(reply)
            return response
        finally:
            self._run.abandon(self._draw, self._consumer)

    async def _reply_with_pings(self, response: web.StreamResponse) -> Reply | None:
        waiting = asyncio.ensure_future(self._run.reply(self._draw, self._consumer))
        try:
            while not (await asyncio.wait({waiting}, timeout=PING_SECONDS))[0]:
                await response.write(self._dialect.PING)
            return waiting.result()
        finally:
            waiting.cancel()

    def _deliver(self, reply: Reply) -> None:
        if not self._consumer.gone:
            self._run.deliver(self._draw, self._consumer, reply)


def _answering(
    dialect: Dialect, answer: Callable[[web.Request], Awaitable[dict[str, Any]]]
) -> Handler:
    """A handler that sends what `answer` returns, or the CallError that it raises."""

    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            return web.json_response(await answer(request))
        except CallError as error:
            return _error_response(dialect, error)

    return handle


def _error_response(dialect: Dialect, error: CallError) -> web.Response:
    return web.json_response(dialect.error_body(error), status=error.status)


def _has_key(request: web.Request, key: str) -> bool:
    """Whether a request carries this key."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    given = [request.headers.get("x-api-key", "")]
    if scheme.lower() == "bearer":
        given.append(token.strip())
    return any(hmac.compare_digest(known.encode(), key.encode()) for known in given)


def _is_repeated(request: web.Request) -> bool:
    """Whether the clients of OpenAI and Anthropic send a request again."""
    return request.headers.get("x-stainless-retry-count", "0") not in ("", "0")


def _closing_connection() -> contextlib.AbstractContextManager[None]:
    """A block that ends where the client closes the connection."""
    return contextlib.suppress(ConnectionError, ClientError)


def _adopted_elsewhere() -> web.Response:
    """Nobody reads it: the connection is closed."""
    return web.Response(status=499)


async def _refuse_path(request: web.Request) -> dict[str, Any]:
    raise CallError(404, "not_found", f"{request.method} {request.path[:200]} is not served")


async def _read_object(request: web.Request) -> dict[str, Any]:
    """The JSON object of a request's body."""
    try:
        raw = await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise over_limit(f"a request has at most {MAX_BODY_BYTES >> 20} MiB") from None
    try:
        body = json.loads(raw) if raw else {}
        if b"\\ud" in raw or b"\\uD" in raw:  # half of a surrogate pair can't be encoded
            json.dumps(body, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        raise invalid_request("the body is not JSON in UTF-8") from None
    if not isinstance(body, dict):
        raise invalid_request("the body is not a JSON object")
    if _depth_exceeds(body, MAX_DEPTH):
        raise invalid_request(f"the body is nested more than {MAX_DEPTH} levels deep")
    return body


def _depth_exceeds(body: Any, limit: int) -> bool:
    level = [body]
    for _ in range(limit):
        level = [
            item
            for value in level
            if isinstance(value, (dict, list))
            for item in (value.values() if isinstance(value, dict) else value)
        ]
        if not level:
            return False
    return True
