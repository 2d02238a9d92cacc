"""Hosts the agents of a trainer on the other side of a connection; see `agent_process`."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import os
import pickle
import random
import socket
import sys
import traceback
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_gspo.agents.agent_host import AgentHost, OpenRun, RunRequest, single_error
from megatron_gspo.agents.engine_generators import ServerGenerator
from megatron_gspo.agents.generation import CallLimits, Generation, Generator
from megatron_gspo.agents.host_settings import HostSettings
from megatron_gspo.agents.process_messages import (
    Ask,
    Close,
    Failed,
    Follow,
    Frames,
    Generate,
    Generated,
    HostMessage,
    Line,
    NotGenerated,
    OpenClient,
    Play,
    Played,
    Progress,
    Ready,
    Refused,
    Report,
    Start,
    Stop,
    Stopped,
    Withdrawn,
    decode_trainers,
    encode,
)
from megatron_gspo.data.sample import Sample
from megatron_gspo.errors import EngineError, InputError, UserError
from megatron_gspo.rollout.server_engine.following_client import (
    ClientSettings,
    FollowingClient,
)
from megatron_gspo.rollout.server_engine.open_group import oldest
from megatron_gspo.rollout.server_engine.server_pool import PoolState
from megatron_gspo.servers.http_client import open_session
from megatron_gspo.terminal import get_logger, log_to

logger = get_logger(__name__)


def host_agents(connection: socket.socket) -> None:
    """Serve the trainer until it closes the connection."""

    async def serve() -> None:
        await _HostedAgents().serve(connection)

    asyncio.run(serve())


@dataclass(eq=False)
class _Playing:
    """Runs that were asked for together. runs: what they have, delivered or on its way."""

    samples: asyncio.Task[list[Sample]]
    runs: list[OpenRun]

    def progress(self) -> Progress:
        versions = [run.oldest_version for run in self.runs]
        return Progress(oldest(versions), sum(run.num_tokens for run in self.runs))


class _HostedAgents:
    """A host, and the trainer that asks it for samples."""

    def __init__(self) -> None:
        self._frames = Frames(self._receive, self._on_lost)
        self._started: asyncio.Future[Start | None] = asyncio.get_running_loop().create_future()
        self._over = asyncio.Event()
        self._playings: dict[int, _Playing] = {}
        self._trainer = _Trainer(self._send)
        self._client: FollowingClient | None = None
        self._states: asyncio.Queue[PoolState] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, connection: socket.socket) -> None:
        """See `host_agents`."""
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: self._frames, sock=connection)
        log_to(_LinesToTrainer(loop, self._send))
        start = await self._started
        if start is None:
            return
        try:
            self._host = _built_host(start)
        except UserError as error:
            self._send(Refused(str(error)))
        else:
            self._send(Ready())
            await self._over.wait()
            playings = [playing.samples for playing in self._playings.values()]
            for playing in playings:
                playing.cancel()
            await asyncio.gather(*playings, return_exceptions=True)
            await self._host.close()
            if self._client is not None:
                await self._client.close()
        self._frames.close()

    def _send(self, message: HostMessage) -> None:
        self._frames.send(encode(message))

    def _receive(self, frame: bytes) -> None:
        message = decode_trainers(frame)
        if isinstance(message, Generated | NotGenerated):
            self._trainer.take(message)
        elif isinstance(message, Play):
            self._play(message)
        elif isinstance(message, Stop):
            if message.playing in self._playings:
                self._playings[message.playing].samples.cancel()
        elif isinstance(message, OpenClient):
            self._begin(self._open_client(message))
        elif isinstance(message, Follow):
            self._states.put_nowait(message.state)
        elif isinstance(message, Ask):
            self._begin(self._report(message))
        elif isinstance(message, Close):
            self._over.set()
        elif isinstance(message, Start):
            self._started.set_result(message)

    def _on_lost(self) -> None:
        """The trainer has died."""
        self._over.set()
        if not self._started.done():
            self._started.set_result(None)

    def _play(self, message: Play) -> None:
        number = message.playing
        requests: Sequence[RunRequest] = pickle.loads(message.requests)
        if not self._playings:
            _seed_generators(requests[0])
        runs: list[OpenRun] = []
        generator: Generator
        if message.sampling is None:
            generator = _TrainerGenerator(self._trainer, number)
        else:
            assert self._client is not None, "it was opened before"
            generator = ServerGenerator(self._client, pickle.loads(message.sampling))
            runs.append(generator)
        playing = self._samples(requests, generator, message.max_call_length, runs)
        samples = asyncio.ensure_future(playing)
        self._playings[number] = _Playing(samples, runs)
        # Also of one that is stopped before it has begun.
        samples.add_done_callback(lambda ended: self._answer(number, ended))

    async def _samples(
        self,
        requests: Sequence[RunRequest],
        generator: Generator,
        max_call_length: int,
        runs: list[OpenRun],
    ) -> list[Sample]:
        with single_error():
            return await self._host.samples(requests, generator, max_call_length, opened=runs)

    def _answer(self, number: int, ended: asyncio.Task[list[Sample]]) -> None:
        """Tell the trainer how a playing has ended."""
        progress = self._playings.pop(number).progress()
        if ended.cancelled():
            self._send(Stopped(number, progress))
            return
        error = ended.exception()
        if error is None:
            self._send(Played(number, ended.result(), progress))
        elif isinstance(error, UserError):
            kind = "input" if isinstance(error, InputError) else "run"
            self._send(Failed(number, kind, str(error)))
        else:
            self._send(Failed(number, "bug", "".join(traceback.format_exception(error))))

    def _begin(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        """Forget a task. A bug in it ends the process: the trainer may wait for its answer."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("".join(traceback.format_exception(error)))
            self._over.set()

    async def _open_client(self, message: OpenClient) -> None:
        settings: ClientSettings = pickle.loads(message.settings)
        self._client = FollowingClient(settings, await open_session())
        self._begin(self._follow(self._client))
        self._send(Report(message.question, self._client.take_report(), {}))

    async def _follow(self, client: FollowingClient) -> None:
        while True:
            await client.follow_state(await self._states.get())

    async def _report(self, ask: Ask) -> None:
        client = self._client
        if client is not None and ask.first == "pause":
            await client.pause_requests()
        elif client is not None and ask.first == "interrupt":
            await client.interrupt_requests()
        found = None if client is None else client.take_report()
        progress = {number: playing.progress() for number, playing in self._playings.items()}
        self._send(Report(ask.question, found, progress))


class _Trainer:
    """The engine of the trainer."""

    def __init__(self, send: Callable[[HostMessage], None]) -> None:
        self._send = send
        self._calls: dict[int, asyncio.Future[Generation]] = {}
        self._numbers = itertools.count()

    async def generate(
        self, playing: int, prompt: np.ndarray, limits: CallLimits, seed: int, routes_start: int
    ) -> Generation:
        """See `Generator.generate`."""
        number = next(self._numbers)
        answer: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._calls[number] = answer
        self._send(
            Generate(playing, number, prompt, limits.max_tokens, limits.stop, seed, routes_start)
        )
        try:
            return await answer
        except asyncio.CancelledError:
            self._send(Withdrawn(number))
            raise
        finally:
            del self._calls[number]

    def take(self, message: Generated | NotGenerated) -> None:
        """The answer to a call."""
        answer = self._calls.get(message.call)
        if answer is None or answer.done():  # nobody waits any more
            return
        if isinstance(message, Generated):
            answer.set_result(message.generation)
        elif message.is_engine_error:
            answer.set_exception(EngineError(message.reason))
        else:
            answer.set_exception(RuntimeError(message.reason))


class _TrainerGenerator:
    """`Generator` of one playing. The trainer waits for its runs, and pauses nothing."""

    paused_seconds = 0.0

    def __init__(self, trainer: _Trainer, playing: int) -> None:
        self._trainer = trainer
        self._playing = playing

    async def generate(
        self, prompt: np.ndarray, limits: CallLimits, *, seed: int, routes_start: int
    ) -> Generation:
        """See `Generator.generate`."""
        return await self._trainer.generate(self._playing, prompt, limits, seed, routes_start)


class _LinesToTrainer(logging.Handler):
    """Gives the package's lines to the trainer, which prints and keeps them as its own."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, send: Callable[[HostMessage], None]
    ) -> None:
        super().__init__()
        self._loop = loop
        self._send_message = send

    def emit(self, record: logging.LogRecord) -> None:
        """Send the line, from any thread."""
        line = Line(record.levelno, record.getMessage())
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._send_message, line)


def _built_host(start: Start) -> AgentHost:
    """Raises what `HostSettings.host` raises."""
    sys.path[:] = start.import_path
    settings: HostSettings = pickle.loads(start.settings)
    # Of this thread, and of what it starts from here on: threads and processes.
    os.nice(settings.nice)
    host = settings.host()
    _leave_out_of_collections()
    return host


def _leave_out_of_collections() -> None:
    """Tell Python's garbage collector that what is there now stays.

    It looks for cycles among old objects when these have grown by a quarter. With all modules among
    them, what a thousand runs leave behind would wait for it, and a collection would take 65 ms.
    """
    gc.collect()
    gc.freeze()
    gc.collect()  # counts what is old now: nothing


def _seed_generators(first: RunRequest) -> None:
    """Seed what a verifier without a seed of its own may draw from, as the trainer does at the
    beginning of a rollout."""
    seeds = np.random.SeedSequence([first.seed, first.prompt.index]).generate_state(2)
    random.seed(int(seeds[0]))
    np.random.seed(seeds[1])
