"""The process that hosts a rank's agents, as the trainer sees it.

The endpoint would compete with the training step for the interpreter's lock. So a process of its
own has it, with the sessions, the tokenizer, the agents' programs and the verifier
(`hosted_process`). It requests replies from the servers itself, by a client that follows the
trainer's (`following_client`), and asks the trainer for a reply only where the engine is in the
trainer's process. The trainer gets finished samples, and is told how far the others are when it
asks.

It ends with all agents when the trainer closes it or dies. If it dies the runs fail with an
`EngineError`.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_gspo.agents.agent_host import OpenRun, RunRequest
from megatron_gspo.agents.generation import CallLimits, Generator
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
    TrainerMessage,
    Withdrawn,
    decode,
    encode,
    receive_frame,
    send_frame,
)
from megatron_gspo.config import SamplingParams
from megatron_gspo.data.sample import Sample
from megatron_gspo.errors import EngineError, InputError
from megatron_gspo.launch_environment import own_import_path
from megatron_gspo.rollout.server_engine.following_client import ClientReport, ClientSettings
from megatron_gspo.rollout.server_engine.server_pool import PoolState
from megatron_gspo.terminal import get_logger

logger = get_logger(__name__)

_ANSWER_SECONDS = 120.0  # for the process to answer; it may wait 30 s for servers to abort
_CLOSE_SECONDS = 20.0  # for the process to end all runs
_END_SECONDS = 10.0  # for its keeper to end all processes


@dataclass(eq=False)
class _RunsElsewhere:
    """`OpenRun`: all of a playing, as the process has told last."""

    oldest_version: int | None = None
    num_tokens: int = 0

    def take(self, progress: Progress) -> None:
        self.oldest_version = progress.oldest_version
        self.num_tokens = progress.num_tokens


@dataclass(eq=False)
class _Playing:
    """Runs that were asked for together.

    generator: draws replies here; None: the process requests them. calls: on their way.
    generator_failure: of the first call that has failed. over: is set when the process plays them
    no more; samples, failure: how that ended.
    """

    generator: Generator | None
    runs: _RunsElsewhere = field(default_factory=_RunsElsewhere)
    calls: set[asyncio.Task[None]] = field(default_factory=set)
    generator_failure: Exception | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)
    samples: list[Sample] = field(default_factory=list)
    failure: Exception | None = None

    def end(self, samples: Sequence[Sample] = (), failure: Exception | None = None) -> None:
        """The process has sent the samples or failed."""
        for call in self.calls:
            call.cancel()
        self.samples = list(samples)
        self.failure = failure
        self.over.set()


class AgentProcess:
    """`RunHost` and `ClientElsewhere`, see the module. The coroutines run in one event loop."""

    def __init__(self, settings: HostSettings) -> None:
        """Start the process and wait until it has built the host.

        Raises InputError as `HostSettings.host` does, and EngineError if the process ends.
        """
        self._process, self._connection = _started_process()
        self._frames = Frames(self._receive, self._on_lost)
        self._connecting = asyncio.Lock()
        self._is_connected = False
        self._is_closing = False
        self._lost = asyncio.Event()
        self._numbers = itertools.count()
        self._playings: dict[int, _Playing] = {}
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._questions: dict[int, asyncio.Future[ClientReport | None]] = {}
        self._failing: asyncio.Task[None] | None = None
        try:
            self._await_ready(settings)
        except BaseException:
            self._connection.close()
            self._end()
            raise

    @property
    def process_id(self) -> int:
        """The process id of the keeper, whose child the agent is."""
        return self._process.pid

    async def samples(
        self,
        requests: Sequence[RunRequest],
        generator: Generator,
        max_response_length: int,
        /,
        *,
        opened: list[OpenRun] | None = None,
    ) -> list[Sample]:
        """See `AgentHost.samples`. Raises EngineError if the process ends."""
        playing = _Playing(generator)
        if opened is not None:
            opened.append(playing.runs)
        return await self._played(playing, requests, max_response_length, None)

    async def samples_of_servers(
        self, requests: Sequence[RunRequest], sampling: SamplingParams, opened: list[OpenRun]
    ) -> list[Sample]:
        """Like `samples`, with replies that the process requests from the servers of its client.

        sampling: its `max_response_length` is that of a reply. opened: gets all runs as one.
        """
        playing = _Playing(None)
        opened.append(playing.runs)
        return await self._played(
            playing, requests, sampling.max_response_length, pickle.dumps(sampling)
        )

    async def _played(
        self,
        playing: _Playing,
        requests: Sequence[RunRequest],
        max_call_length: int,
        sampling: bytes | None,
    ) -> list[Sample]:
        await self._connect()
        if self._lost.is_set():
            raise EngineError(await self._why_it_ended())
        number = next(self._numbers)
        self._playings[number] = playing
        self._send(Play(number, pickle.dumps(requests), max_call_length, sampling))
        try:
            await playing.over.wait()
        except asyncio.CancelledError:
            self._send(Stop(number))
            await playing.over.wait()
            raise
        if playing.failure is not None:
            raise playing.failure
        return playing.samples

    async def open_client(self, settings: ClientSettings) -> None:
        """See `ClientElsewhere`."""
        await self._connect()
        await self._answer_to(OpenClient(next(self._numbers), pickle.dumps(settings)))

    def follow(self, state: PoolState) -> None:
        """See `ClientElsewhere`."""
        self._send(Follow(state))

    async def pause(self) -> ClientReport | None:
        """See `ClientElsewhere`."""
        return await self._answer_to(Ask(next(self._numbers), "pause"))

    async def interrupt(self) -> ClientReport | None:
        """See `ClientElsewhere`."""
        return await self._answer_to(Ask(next(self._numbers), "interrupt"))

    async def report(self) -> ClientReport | None:
        """See `ClientElsewhere`."""
        return await self._answer_to(Ask(next(self._numbers), "nothing"))

    async def _answer_to(self, question: OpenClient | Ask) -> ClientReport | None:
        """The report, once how far the runs are is taken from it; None if the process ends, which
        fails the runs. Raises EngineError if it hangs."""
        if self._lost.is_set():
            return None
        answer: asyncio.Future[ClientReport | None] = asyncio.get_running_loop().create_future()
        self._questions[question.question] = answer
        self._send(question)
        try:
            return await asyncio.wait_for(answer, _ANSWER_SECONDS)
        except TimeoutError:
            raise EngineError(
                f"agents: the process that hosts them ({self.process_id}) has not answered for"
                f" {_ANSWER_SECONDS:g} s; kill it and start the training again"
            ) from None
        finally:
            del self._questions[question.question]

    async def close(self) -> None:
        """See `AgentHost.close`. Ends the process."""
        if self._is_closing:
            return
        await self._connect()
        self._is_closing = True
        self._send(Close())
        try:
            await asyncio.wait_for(self._lost.wait(), _CLOSE_SECONDS)
        except TimeoutError:
            logger.warning("agents: their process does not end; it is killed with all agents")
            self._process.terminate()
        self._frames.close()
        await asyncio.to_thread(self._end)

    def _await_ready(self, settings: HostSettings) -> None:
        try:
            send_frame(self._connection, Start(list(sys.path), pickle.dumps(settings)))
        except OSError:  # it has ended; so it sends no frame either
            pass
        while (frame := receive_frame(self._connection)) is not None:
            message = decode(frame)
            if isinstance(message, Refused):
                raise InputError(message.reason)
            if isinstance(message, Ready):
                self._connection.setblocking(False)
                return
            self._take(message)
        self._end()
        raise EngineError(_end_line(self._process.returncode))

    async def _connect(self) -> None:
        """Read the connection in this event loop from now on."""
        async with self._connecting:
            if not self._is_connected:
                loop = asyncio.get_running_loop()
                await loop.create_unix_connection(lambda: self._frames, sock=self._connection)
                self._is_connected = True

    def _send(self, message: TrainerMessage) -> None:
        self._frames.send(encode(message))

    def _receive(self, frame: bytes) -> None:
        self._take(decode(frame))

    def _take(self, message: HostMessage) -> None:
        if isinstance(message, Line):
            logger.log(message.level, message.text)
        elif isinstance(message, Generate):
            playing = self._playings[message.playing]
            call = asyncio.ensure_future(self._generate(playing, message))
            self._calls[message.call] = call
            playing.calls.add(call)
            call.add_done_callback(lambda _: self._forget(playing, message.call))
        elif isinstance(message, Withdrawn):
            if message.call in self._calls:
                self._calls[message.call].cancel()
        elif isinstance(message, Report):
            for number, progress in message.progress.items():
                self._playings[number].runs.take(progress)
            self._answer(message.question, message.client)
        elif isinstance(message, Played):
            playing = self._playings.pop(message.playing)
            playing.runs.take(message.progress)
            playing.end(message.samples)
        elif isinstance(message, Failed):
            playing = self._playings.pop(message.playing)
            # The generator's error is the cause, with its class and its traceback.
            playing.end(failure=playing.generator_failure or _error_of(message))
        elif isinstance(message, Stopped):
            playing = self._playings.pop(message.playing)
            playing.runs.take(message.progress)
            playing.end()

    async def _generate(self, playing: _Playing, call: Generate) -> None:
        assert playing.generator is not None, "the process requests these replies itself"
        limits = CallLimits(call.max_tokens, call.stop)
        try:
            generation = await playing.generator.generate(
                call.prompt, limits, seed=call.seed, routes_start=call.routes_start
            )
        except Exception as error:
            playing.generator_failure = playing.generator_failure or error
            self._send(NotGenerated(call.call, isinstance(error, EngineError), str(error)))
        else:
            self._send(Generated(call.call, generation))

    def _forget(self, playing: _Playing, number: int) -> None:
        playing.calls.discard(self._calls.pop(number))

    def _answer(self, question: int, report: ClientReport | None) -> None:
        answer = self._questions.get(question)
        if answer is not None and not answer.done():  # else nobody waits any more
            answer.set_result(report)

    def _on_lost(self) -> None:
        self._lost.set()
        for question in self._questions:
            self._answer(question, None)
        self._failing = asyncio.ensure_future(self._fail_playings())

    async def _fail_playings(self) -> None:
        reason = await self._why_it_ended()
        while self._playings:
            self._playings.popitem()[1].end(failure=EngineError(reason))

    async def _why_it_ended(self) -> str:
        await asyncio.to_thread(self._end)
        return _end_line(self._process.returncode)

    def _end(self) -> None:
        """Wait for the end of the process, which has closed the connection, and of all agents."""
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._process.wait()


def _started_process() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A new process and the connection to it."""
    connection, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "megatron_gspo.agents.hosted_process",
                str(theirs.fileno()),
                str(os.getpid()),
            ],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # not interrupted by Ctrl-C
            env={
                "OMP_NUM_THREADS": "1",
                "TOKENIZERS_PARALLELISM": "false",  # short texts, one at a time
                **os.environ,
                **own_import_path(),
            },
        )
    return process, connection


def _end_line(code: int) -> str:
    """What the end of the process is for the run."""
    how = f"exit code {code}, see above" if code >= 0 else f"killed by {signal.Signals(-code).name}"
    return (
        f"agents: the process that hosts them has ended ({how}); start the training again, which"
        " plays their runs anew"
    )


def _error_of(failed: Failed) -> Exception:
    if failed.kind == "input":
        return InputError(failed.reason)
    if failed.kind == "run":
        return EngineError(failed.reason)
    return RuntimeError(f"in the process that hosts the agents:\n{failed.reason}")
