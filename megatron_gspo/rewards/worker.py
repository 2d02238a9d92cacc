"""A reward worker: a process of its own that runs one verifier on what its parent sends.

Started by worker_pool.py as `python -m megatron_gspo.rewards.worker FD PARENT_PID MAX_GROWTH`, not
through `multiprocessing`, whose spawned children would import the training script, and torch with
it, again. `worker_keeper` ends it with all processes that it started.

Protocol: the parent sends (verifier name, options), then pickled (text, prompt) pairs; each is
answered by the fields of one `Reply` as a JSON object. The first reply's message is what the
verifier says of itself, its `description`, and its value whether it takes a batch: then a request
has lists, and the value of its reply is a list of replies. "last" is true in a reply after which
the worker ends. `serve` also runs environments.
"""

from __future__ import annotations

import contextlib
import json
import numbers
import os
import pickle
import resource
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from megatron_gspo.data.sample import Prompt
from megatron_gspo.errors import printable, show_bytes
from megatron_gspo.rewards.named_reward import NamedReward
from megatron_gspo.rewards.verifiers import Verifier, load_verifier
from megatron_gspo.rewards.worker_keeper import fork_worker
from megatron_gspo.terminal import get_logger, outlive_terminal

logger = get_logger(__name__)

_MAX_MESSAGE = 300
_MAX_REWARD = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Reply:
    """What a worker answers to one request.

    status: "ok", "invalid", "error" or "timeout". value: with "ok", of a verifier the reward, of an
    environment the fields of a turn. message: with "ok" the name of the reward, else why there is
    no value.
    """

    status: str
    value: Any = None
    message: str | None = None

    @property
    def failure(self) -> str:
        """Status and message; empty with "ok"."""
        return "" if self.status == "ok" else f"{self.status}: {self.message}"


def run_verifier(verifier: Verifier, text: str, prompt: Prompt) -> Reply:
    """Call a verifier. The status is "ok", "invalid" or "error". Never raises, but for Ctrl-C."""
    try:
        return _checked(verifier(text, prompt))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return Reply("error", message=describe(error))


def run_batch(
    verifier: Callable[..., Any], texts: Sequence[str], prompts: Sequence[Prompt]
) -> list[Reply]:
    """Call a verifier that takes a batch: a reply for each response, as of `run_verifier`."""
    try:
        values = verifier(texts, prompts)
        try:
            count = len(values)
        except TypeError:
            shown = _shown(values)
            problem = f"the verifier returned {shown}; return a list"
            return [Reply("invalid", message=problem)] * len(texts)
        if count != len(texts):
            problem = f"the verifier returned {count} rewards for {len(texts)} responses"
            return [Reply("invalid", message=f"{problem}; return one for each")] * len(texts)
        return [_checked(value) for value in values]
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return [Reply("error", message=describe(error))] * len(texts)


def _checked(value: object) -> Reply:
    if isinstance(value, Exception):  # of one response of a batch
        return Reply("error", message=describe(value))
    if isinstance(value, dict) and "score" in value:  # as verl's functions return
        value = value["score"]
    name = value.name if isinstance(value, NamedReward) else None
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # an array of one number
        value = value.item()
    if isinstance(value, (numbers.Real, Decimal)):
        reward = float(value)
        if abs(reward) <= _MAX_REWARD:  # False for NaN
            return Reply("ok", reward, name)
        problem = f"the verifier returned {reward}; return a finite number (float32)"
        return Reply("invalid", message=problem)
    fix = "return a number"
    if isinstance(value, dict):
        fix = 'return a number, or a dictionary with "score"'
    return Reply("invalid", message=f"the verifier returned {_shown(value)}; {fix}")


def describe(error: BaseException) -> str:
    """An exception as one short line."""
    try:
        return _one_line(f"{type(error).__name__}: {error}")
    except Exception:  # of a user's class without a text
        return type(error).__name__


def _shown(value: object) -> str:
    return _one_line(f"the {type(value).__name__} {value!r}")


def _one_line(text: str) -> str:
    return printable(" ".join(text.split()))[:_MAX_MESSAGE]


def _load(connection: Connection, load: Callable[[str, Any], Any]) -> tuple[Any, Reply]:
    try:
        name, options = pickle.loads(connection.recv_bytes())
        served = load(name, options)
        description = getattr(served, "description", None)
        if description is not None:
            description = _one_line(str(description))
        return served, Reply("ok", getattr(served, "takes_batch", False), description)
    except BaseException as error:
        return None, Reply("error", message=_one_line(str(error)) or type(error).__name__)


def _send(connection: Connection, reply: Reply, *, is_last: bool = False) -> None:
    fields = {**vars(reply), "last": is_last}
    connection.send_bytes(json.dumps(fields, default=asdict).encode())


def _memory() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def serve(
    arguments: list[str], load: Callable[[str, Any], Any], answer: Callable[[Any, Any], Reply]
) -> None:
    """Answer requests until the parent closes the connection.

    arguments: of the command line. load(name, options): loads what is served. answer(served,
    request): a reply; must not raise. A process that has grown by MAX_GROWTH bytes since its first
    answer ends after a reply.
    """
    outlive_terminal()  # a verifier that prints must not fail where nobody reads it
    descriptor = int(arguments[0])
    max_growth = int(arguments[2])
    fork_worker(int(arguments[1]), descriptor)
    connection = Connection(descriptor)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    with contextlib.suppress(OSError):  # when memory runs out, the kernel ends this process first
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    worker = os.getpid()
    served, reply = _load(connection, load)
    _send(connection, reply)
    memory = None
    while served is not None:
        try:
            request = connection.recv_bytes()
        except (EOFError, OSError):
            return
        reply = answer(served, pickle.loads(request))
        if os.getpid() != worker:  # a fork of the user's code that returned here
            os._exit(0)
        memory = _memory() if memory is None else memory
        grown = _memory() - memory
        is_last = grown > max_growth
        if is_last:
            logger.warning(f"its process has grown by {show_bytes(grown)} and is replaced")
        _send(connection, reply, is_last=is_last)
        if is_last:
            return


def main(arguments: list[str]) -> None:
    """Serve a verifier."""
    serve(arguments, load_verifier, _answer)


def _answer(verifier: Verifier, request: tuple[Any, Any]) -> Reply:
    if getattr(verifier, "takes_batch", False):
        return Reply("ok", run_batch(verifier, *request))
    return run_verifier(verifier, *request)


if __name__ == "__main__":
    main(sys.argv[1:])
