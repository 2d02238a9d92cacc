"""Runs one server and ends it, with all of its children, when the trainer ends, also by SIGKILL.

    python -I -S supervisor.py [--hide] TRAINER_PID COMMAND [ARGUMENT ...]

The supervisor leads a session of its own, so that one signal to the process group reaches the
server and its children. It polls its parent; the kernel's signal at the parent's death would come
when the thread that started the server ends. Its exit code is the server's (128 + n for signal n).

--hide: standard input is a secret, which is removed from the server's output: sglang logs its
settings, the API key among them.

Run as a program by any Python: standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time

POLL_SECONDS = 0.2
_MAX_KEPT = 1 << 16  # bytes
_PR_SET_PDEATHSIG = 1


def die_with_supervisor() -> None:
    """Called in the server before it starts: SIGKILL when the supervisor, which has one thread,
    is killed.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Filter:
    """Copies one descriptor to another, line by line, without a secret.

    The secret has no line end. An unfinished line is kept back, up to `_MAX_KEPT` bytes.
    """

    def __init__(self, source: int, target: int, secret: str) -> None:
        self._source = source
        self._target = target
        spellings = {secret, repr(secret)[1:-1], json.dumps(secret)[1:-1]} - {""}
        self._secrets = sorted((spelling.encode() for spelling in spellings), key=len, reverse=True)
        self._kept = b""
        self._open = True

    def wait(self, seconds: float) -> None:
        """Copy the next output, if any arrives within `seconds`."""
        if not self._open:
            time.sleep(seconds)
        elif self._has_more(seconds):
            self._copy()

    def finish(self) -> None:
        """Copy the remaining output."""
        while self._open and self._has_more(0.0):
            self._copy()
        self._write(self._kept)

    def _has_more(self, seconds: float) -> bool:
        return bool(select.select([self._source], [], [], seconds)[0])

    def _copy(self) -> None:
        data = os.read(self._source, _MAX_KEPT)
        self._open = bool(data)
        text = self._kept + data
        for secret in self._secrets:
            text = text.replace(secret, b"***")
        end = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
        if not end and len(text) > _MAX_KEPT:
            end = len(text) - max(map(len, self._secrets), default=0)
        self._kept = text[end:]
        self._write(text[:end])

    def _write(self, text: bytes) -> None:
        with contextlib.suppress(OSError):  # a full disk: the server needs no log
            while text:
                text = text[os.write(self._target, text) :]


def main(trainer: int, command: list[str], secret: str | None = None) -> int:
    if os.getppid() != trainer:  # it ended before the supervisor started
        return 1
    pipes = {} if secret is None else {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    try:
        server = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, preexec_fn=die_with_supervisor, **pipes
        )  # type: ignore[call-overload]
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        return 127
    hiding = None if secret is None else Filter(server.stdout.fileno(), sys.stdout.fileno(), secret)
    while (code := server.poll()) is None:
        if os.getppid() != trainer:
            os.killpg(0, signal.SIGKILL)
        if hiding:
            hiding.wait(POLL_SECONDS)
        else:
            time.sleep(POLL_SECONDS)
    if hiding:
        hiding.finish()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    arguments = sys.argv[1:]
    hidden = None
    if arguments[0] == "--hide":
        hidden = sys.stdin.buffer.read().decode()
        arguments = arguments[1:]
    sys.exit(main(int(arguments[0]), arguments[1:], hidden))
