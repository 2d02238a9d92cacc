"""Runs one server and ends it, with all of its children, when the trainer ends: by any cause, SIGKILL included.

    python -I -S guard.py TRAINER_PID COMMAND [ARGUMENT ...]

The guard leads a session of its own, in which the server and its children stay, so that one signal to the process group
reaches all of them. It looks at its parent instead of asking the kernel for a signal at the parent's death, which would
come when the thread that started the server ends. Its exit code is the server's (128 + n for signal n).

Run as a program of its own by any Python: standard library only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time

LOOK_EVERY = 0.2  # seconds
_PR_SET_PDEATHSIG = 1


def die_with_guard() -> None:
    """In the server before it begins: SIGKILL when the guard, which has one thread, is itself killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main(trainer: int, command: list[str]) -> int:
    if os.getppid() != trainer:  # it ended before the guard began
        return 1
    try:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=die_with_guard)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        return 127
    while (code := server.poll()) is None:
        if os.getppid() != trainer:
            os.killpg(0, signal.SIGKILL)
        time.sleep(LOOK_EVERY)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
