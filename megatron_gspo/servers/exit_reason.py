"""Why a server process ended, from its log and exit code."""

from __future__ import annotations

import re

PORT_IN_USE = "its port is in use"  # in the reason of a server that could not listen

# (pattern in the log, meaning and fix), from sglang 0.5.15 and 0.5.23; the first match counts
_CAUSES = (
    (r"address already in use|\[Errno 98\]", f"{PORT_IN_USE}; choose another sglang.port"),
    (
        r"unrecognized arguments|error: (argument|ambiguous option|the following arguments)",
        "sglang refused its arguments; correct sglang.server_args",
    ),
    (
        r"^(ModuleNotFoundError|\S+): No module named",
        "its sglang is incomplete; install it or name another interpreter in sglang.python",
    ),
    (
        r"out of memory|OutOfMemoryError|Not enough memory|MemoryError|can(no|')t allocate memory",
        "it ran out of memory; lower --mem-fraction-static or --max-total-tokens",
    ),
    (
        r"is not a local folder|does not appear to have a file|Unrecognized model in|Can't load.*config|"
        r"Error no file named|Cannot find any model weights|Repo id must be|SafetensorError",
        "its model can't be loaded; check the model path",
    ),
)


def exit_reason(log: str, code: int | None) -> str:
    """One line: why a server ended, from its log and exit code (None: it does not respond)."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    for pattern, meaning in _CAUSES:
        for line in reversed(lines):
            if re.search(pattern, line, re.IGNORECASE):
                return f"{meaning} ({shorten(line)!r})"
    if code is None:
        ended = "it did not answer within sglang.start_timeout"
    elif code in (137, -9):
        ended = "it was killed by SIGKILL, which is how Linux ends a process when memory runs out"
    elif code > 128 or code < 0:
        ended = f"it was ended by signal {code - 128 if code > 0 else -code}"
    else:
        ended = f"it exited with code {code}"
    return f"{ended}; the end of its log: {' | '.join(shorten(line) for line in lines[-3:]) or 'empty'}"


def shorten(line: str, limit: int = 240) -> str:
    """A line of a log, cut to `limit` characters."""
    return line if len(line) <= limit else f"{line[: limit - 3]}..."
