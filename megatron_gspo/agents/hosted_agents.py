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
from collections.abc import Callable, Sequence

import numpy as np

from megatron_gspo.agents.agent_host import AgentHost, OpenRun, RunRequest, single_error
from megatron_gspo.agents.generation import CallLimits, Generation
from megatron_gspo.agents.host_settings import HostSettings
from megatron_gspo.agents.process_messages import (
    Close,
    Failed,
    Frames,
    Generate,
    Generated,
    HostMessage,
    Line,
    NotGenerated,
    Paused,
    Play,
    Played,
    Progress,
    Ready,
    Refused,
    Start,
    Stop,
    Stopped,
    Withdrawn,
    decode_trainers,
    encode,
)
from megatron_gspo.data.sample import Sample
from megatron_gspo.errors import EngineError, InputError, UserError
from megatron_gspo.terminal import log_to


def host_agents(connection: socket.socket) -> None:
    """Serve the trainer until it closes the connection."""

    async def serve() -> None:
        await _HostedAgents().serve(connection)

    asyncio.run(serve())


class _HostedAgents:
    """A host, and the trainer that asks it for samples."""

    def __init__(self) -> None:
        self._frames = Frames(self._receive, self._on_lost)
        self._started: asyncio.Future[Start | None] = asyncio.get_running_loop().create_future()
        self._over = asyncio.Event()
        self._playings: dict[int, asyncio.Task[list[Sample]]] = {}
        self._trainer = _Trainer(self._send)

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
            playings = list(self._playings.values())
            for playing in playings:
                playing.cancel()
            await asyncio.gather(*playings, return_exceptions=True)
            await self._host.close()
        self._frames.close()

    def _send(self, message: HostMessage) -> None:
        self._frames.send(encode(message))

    def _receive(self, frame: bytes) -> None:
        message = decode_trainers(frame)
        if isinstance(message, Generated | NotGenerated | Paused):
            self._trainer.take(message)
        elif isinstance(message, Play):
            self._play(message)
        elif isinstance(message, Stop):
            if message.playing in self._playings:
                self._playings[message.playing].cancel()
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
        self._trainer.paused_seconds[number] = message.paused_seconds
        self._playings[number] = asyncio.ensure_future(self._samples(message, requests))
        # Also of one that is stopped before it has begun.
        self._playings[number].add_done_callback(lambda ended: self._answer(number, ended))

    async def _samples(self, message: Play, requests: Sequence[RunRequest]) -> list[Sample]:
        runs: list[OpenRun] = []

        def tell() -> None:
            if not message.reports_progress:
                return
            versions = [run.oldest_version for run in runs if run.oldest_version is not None]
            num_tokens = sum(run.num_tokens for run in runs)
            self._send(Progress(message.playing, min(versions, default=None), num_tokens))

        with single_error():
            return await self._host.samples(
                requests,
                _TrainerGenerator(self._trainer, message.playing),
                message.max_call_length,
                opened=runs,
                changed=tell,
            )

    def _answer(self, number: int, ended: asyncio.Task[list[Sample]]) -> None:
        """Tell the trainer how a playing has ended."""
        del self._playings[number]
        del self._trainer.paused_seconds[number]
        if ended.cancelled():
            self._send(Stopped(number))
            return
        error = ended.exception()
        if error is None:
            self._send(Played(number, ended.result()))
        elif isinstance(error, UserError):
            kind = "input" if isinstance(error, InputError) else "run"
            self._send(Failed(number, kind, str(error)))
        else:
            self._send(Failed(number, "bug", "".join(traceback.format_exception(error))))


class _Trainer:
    """The generators of the trainer.

    paused_seconds: of each playing's generator, as the trainer has told last.
    """

    def __init__(self, send: Callable[[HostMessage], None]) -> None:
        self.paused_seconds: dict[int, float] = {}
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

    def take(self, message: Generated | NotGenerated | Paused) -> None:
        """What the trainer says of its generators."""
        if isinstance(message, Paused):
            known = self.paused_seconds.keys() & message.seconds.keys()
            self.paused_seconds.update({playing: message.seconds[playing] for playing in known})
            return
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
    """`Generator` of one playing."""

    def __init__(self, trainer: _Trainer, playing: int) -> None:
        self._trainer = trainer
        self._playing = playing

    @property
    def paused_seconds(self) -> float:
        """See `Generator.paused_seconds`."""
        return self._trainer.paused_seconds[self._playing]

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
    them, what a thousand runs leave behind would wait for it.
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
