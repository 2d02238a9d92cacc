"""Messages over a pipe. multiprocessing's connections do the same; importing them makes the launcher's forks slower."""

from __future__ import annotations

import os
import pickle
import select
import time
from typing import Any

_HEADER = 8  # bytes of a message's length


def send(descriptor: int, message: Any) -> None:
    """Write a pickled message. Raises OSError if the other side has gone."""
    content = pickle.dumps(message)
    write(descriptor, len(content).to_bytes(_HEADER, "big") + content)


def receive(descriptor: int, seconds: float | None = None) -> Any:
    """Read a message. Raises EOFError if the other side has gone, TimeoutError after `seconds`."""
    deadline = None if seconds is None else time.monotonic() + seconds
    length = int.from_bytes(_read(descriptor, _HEADER, deadline), "big")
    return pickle.loads(_read(descriptor, length, deadline))


def write(descriptor: int, content: bytes) -> None:
    """Write all of it."""
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]


def _read(descriptor: int, length: int, deadline: float | None) -> bytes:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    parts: list[bytes] = []
    while length:
        if deadline is not None and not poll.poll(1000 * max(0.0, deadline - time.monotonic())):
            raise TimeoutError("no answer in time")
        part = os.read(descriptor, min(length, 1 << 20))
        if not part:
            raise EOFError("the other side has gone")
        parts.append(part)
        length -= len(part)
    return b"".join(parts)
