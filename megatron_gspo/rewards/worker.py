"""A reward worker: a process of its own that runs one verifier on what its parent sends.

Started by worker_pool.py as `python -m megatron_gspo.rewards.worker FD PARENT_PID TIMEOUT`, not through
`multiprocessing`, whose spawned children would import the training script, and torch with it, again.

Protocol: the parent sends (verifier name, options), then pickled (text, prompt) pairs; each is answered by one JSON
object {"status": ..., "value": number or null, "message": text or null}; the message of the first reply is what the
verifier says of itself, its `description`. `serve` also runs environments.
"""

from __future__ import annotations

import contextlib
import json
import numbers
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from megatron_gspo.data.sample import Prompt
from megatron_gspo.rewards.named_reward import NamedReward
from megatron_gspo.rewards.verifiers import Verifier, load_verifier
from megatron_gspo.terminal import outlive_terminal

Reply = tuple[str, Any, str | None]  # status, value (a verifier's is a float, or None), message
_MAX_MESSAGE = 300
_MAX_REWARD = float(np.finfo(np.float32).max)


def run_verifier(verifier: Verifier, text: str, prompt: Prompt) -> Reply:
    """Call a verifier: ("ok", reward, its name or None), or ("invalid" or "error", None, why). Never raises."""
    try:
        value: object = verifier(text, prompt)
        name = value.name if isinstance(value, NamedReward) else None
        if isinstance(value, (numbers.Real, np.bool_)):
            reward = float(value)
            if abs(reward) <= _MAX_REWARD:  # False for NaN
                return "ok", reward, name
            return "invalid", None, f"the verifier returned {reward}; return a finite number (float32)"
        kind = type(value).__name__
        return "invalid", None, _one_line(f"the verifier returned the {kind} {value!r}; return a number")
    except (Exception, SystemExit) as error:
        return "error", None, describe(error)


def describe(error: BaseException) -> str:
    """An exception as one short line."""
    return _one_line(f"{type(error).__name__}: {error}")


def _one_line(text: str) -> str:
    return " ".join(text.split())[:_MAX_MESSAGE]


def _load(connection: Connection, load: Callable[[str, Any], Any]) -> tuple[Any, Reply]:
    try:
        name, options = pickle.loads(connection.recv_bytes())
        served = load(name, options)
        description = getattr(served, "description", None)
        return served, ("ok", None, None if description is None else _one_line(str(description)))
    except (Exception, SystemExit) as error:
        return None, ("error", None, _one_line(str(error)))


def _send(connection: Connection, reply: Reply) -> None:
    connection.send_bytes(json.dumps(dict(zip(("status", "value", "message"), reply, strict=True))).encode())


def _exit_with_parent(parent: int) -> None:
    """Kill this process group when the parent has died, also while a verifier sleeps."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


@contextlib.contextmanager
def _cpu_time_limit(seconds: float) -> Iterator[None]:
    """Have the kernel end this process after `seconds` of CPU time.

    The parent kills a verifier that hangs. If the parent has died and the verifier holds the interpreter lock (as a
    regular expression does), the thread that checks the parent can't run.
    """
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def serve(arguments: list[str], load: Callable[[str, Any], Any], answer: Callable[[Any, Any], Reply]) -> None:
    """Answer requests until the parent closes the connection.

    arguments: of the command line. load(name, options): loads what is served. answer(served, request): a reply; must
    not raise.
    """
    outlive_terminal()  # a verifier that prints must not fail where nobody reads it
    connection = Connection(int(arguments[0]))
    _exit_with_parent(int(arguments[1]))
    cpu_seconds = float(arguments[2]) * len(os.sched_getaffinity(0)) + 5.0
    with contextlib.suppress(OSError):  # when memory runs out, the kernel ends this process first
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    own = os.getpid()
    served, reply = _load(connection, load)
    _send(connection, reply)
    while served is not None:
        try:
            request = connection.recv_bytes()
        except (EOFError, OSError):
            return
        with _cpu_time_limit(cpu_seconds):
            reply = answer(served, pickle.loads(request))
        if os.getpid() != own:  # a fork of the user's code that returned here
            os._exit(0)
        _send(connection, reply)


def main(arguments: list[str]) -> None:
    """Serve a verifier."""
    serve(arguments, load_verifier, lambda verifier, request: run_verifier(verifier, *request))


if __name__ == "__main__":
    main(sys.argv[1:])
