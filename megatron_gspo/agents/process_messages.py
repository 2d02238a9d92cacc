"""What a trainer's process and the process that hosts its agents say to each other.

Messages are frames of MessagePack on a socket pair; a reply to a call takes a thirtieth of the time
that pickling it takes. What only Python can carry, settings and a user's prompts, is pickled within
a message of the trainer. Nothing is unpickled that comes from the other process, which may run a
user's verifier.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np

from megatron_gspo.agents.generation import Generation
from megatron_gspo.data.sample import Sample
from megatron_gspo.rollout.server_engine.following_client import ClientReport
from megatron_gspo.rollout.server_engine.server_pool import PoolState

_SIZE_BYTES = 8  # of a frame's length, in front of it


# Of the trainer.


class Start(msgspec.Struct, tag=True):
    """The first message. import_path: `sys.path` of the trainer. settings: a pickled
    `HostSettings`, which is read with this path."""

    import_path: list[str]
    settings: bytes


class Play(msgspec.Struct, tag=True):
    """Play runs. playing: their number in later messages. requests: a pickled sequence of
    `RunRequest`. sampling: pickled `SamplingParams` of replies that the process requests from the
    servers; None: it asks the trainer for them (`Generate`)."""

    playing: int
    requests: bytes
    max_call_length: int
    sampling: bytes | None


class Stop(msgspec.Struct, tag=True):
    """End these runs; `Stopped` answers when their agents have ended."""

    playing: int


class Generated(msgspec.Struct, tag=True):
    """The answer to a `Generate`."""

    call: int
    generation: Generation


class NotGenerated(msgspec.Struct, tag=True):
    """No engine could serve a `Generate`, or another error if not `is_engine_error`."""

    call: int
    is_engine_error: bool
    reason: str


class OpenClient(msgspec.Struct, tag=True):
    """Make a client of the servers. `Report` answers. settings: pickled `ClientSettings`."""

    question: int
    settings: bytes


class Follow(msgspec.Struct, tag=True):
    """Have the client follow; see `ClientElsewhere.follow`."""

    state: PoolState


class Ask(msgspec.Struct, tag=True):
    """What the client and the runs have so far; `Report` answers. first: what the client does
    before."""

    question: int
    first: Literal["nothing", "pause", "interrupt"]


class Close(msgspec.Struct, tag=True):
    """End all runs, and the process."""


TrainerMessage: TypeAlias = (
    Start | Play | Stop | Generated | NotGenerated | OpenClient | Follow | Ask | Close
)


# Of the process that hosts the agents.


class Ready(msgspec.Struct, tag=True):
    """Runs can be played."""


class Refused(msgspec.Struct, tag=True):
    """The settings can't be used; nothing follows."""

    reason: str


class Line(msgspec.Struct, tag=True):
    """A line for the trainer's log. level: of `logging`."""

    level: int
    text: str


class Generate(msgspec.Struct, tag=True):
    """A call of `Generator.generate`."""

    playing: int
    call: int
    prompt: np.ndarray
    max_tokens: int
    stop: tuple[str, ...]
    seed: int
    routes_start: int


class Withdrawn(msgspec.Struct, tag=True):
    """Nobody waits for the answer to a `Generate` any more."""

    call: int


class Progress(msgspec.Struct):
    """What the runs of a playing have; see `OpenRun`."""

    oldest_version: int | None
    num_tokens: int


class Report(msgspec.Struct, tag=True):
    """The answer to a question. client: None before it is made. progress: by playing."""

    question: int
    client: ClientReport | None
    progress: dict[int, Progress]


class Played(msgspec.Struct, tag=True):
    """The samples of a playing, in the order of its requests."""

    playing: int
    samples: list[Sample]
    progress: Progress


class Failed(msgspec.Struct, tag=True):
    """A playing has failed. kind: "input" for an `InputError`, "run" for another `UserError`, or
    "bug", whose reason is a traceback."""

    playing: int
    kind: str
    reason: str


class Stopped(msgspec.Struct, tag=True):
    """The answer to a `Stop`."""

    playing: int
    progress: Progress


HostMessage: TypeAlias = (
    Ready | Refused | Line | Generate | Withdrawn | Report | Played | Failed | Stopped
)


def encode(message: TrainerMessage | HostMessage) -> bytes:
    """The content of a frame."""
    return msgspec.msgpack.encode(message, enc_hook=_as_plain)


def decode(frame: bytes) -> HostMessage:
    """The message of a frame from the process that hosts the agents."""
    return _OF_HOST.decode(frame)


def decode_trainers(frame: bytes) -> TrainerMessage:
    """The message of a frame from the trainer."""
    return _OF_TRAINER.decode(frame)


def _as_plain(value: object) -> object:
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.str, "shape": value.shape, "data": value.tobytes()}
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a {type(value).__name__} can't be sent between trainer and agents")


def _restored(expected: type, plain: Any) -> object:
    if expected is not np.ndarray:
        raise TypeError(f"{plain!r} is no {expected.__name__}")
    values = np.frombuffer(plain["data"], dtype=np.dtype(plain["dtype"]))
    return values.reshape(plain["shape"]).copy()


_OF_HOST = msgspec.msgpack.Decoder(HostMessage, dec_hook=_restored)
_OF_TRAINER = msgspec.msgpack.Decoder(TrainerMessage, dec_hook=_restored)


class Frames(asyncio.Protocol):
    """The frames of a connection, in an event loop."""

    def __init__(self, receive: Callable[[bytes], None], lost: Callable[[], None]) -> None:
        """receive: takes each frame. lost: is called when the other side has closed."""
        self._receive = receive
        self._lost = lost
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._received += data
        while len(self._received) >= _SIZE_BYTES:
            end = _SIZE_BYTES + int.from_bytes(self._received[:_SIZE_BYTES])
            if len(self._received) < end:
                return
            frame = bytes(self._received[_SIZE_BYTES:end])
            del self._received[:end]
            self._receive(frame)

    def connection_lost(self, error: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._lost()

    def send(self, frame: bytes) -> None:
        """Send a frame; to a connection that is closed, nothing."""
        assert self._transport is not None, "it is not connected yet"
        if not self._transport.is_closing():
            self._transport.writelines([len(frame).to_bytes(_SIZE_BYTES), frame])

    def close(self) -> None:
        """Close the connection when all is sent."""
        if self._transport is not None:
            self._transport.close()


def send_frame(connection: socket.socket, message: TrainerMessage) -> None:
    """Send a message of the trainer without an event loop. Raises OSError."""
    frame = encode(message)
    connection.sendall(len(frame).to_bytes(_SIZE_BYTES) + frame)


def receive_frame(connection: socket.socket) -> bytes | None:
    """The next frame, without an event loop; None if the other side has closed."""
    with contextlib.suppress(EOFError, OSError):
        size = int.from_bytes(_received_bytes(connection, _SIZE_BYTES))
        return _received_bytes(connection, size)
    return None


def _received_bytes(connection: socket.socket, count: int) -> bytes:
    """Exactly so many bytes. Raises EOFError."""
    received = bytearray()
    while len(received) < count:
        data = connection.recv(count - len(received))
        if not data:
            raise EOFError
        received += data
    return bytes(received)
