"""Why a server process ended, from its log and exit code."""

from __future__ import annotations

import re
from collections.abc import Sequence

PORT_IN_USE = "its port is in use"  # in the reason of a server that could not listen

_LONGEST_LINE = 240  # characters
_ADDRESS_IN_USE = r"address already in use|\[Errno 98\]"


def exit_reason(
    log: str, code: int | None, causes: Sequence[tuple[str, str]] = (), *, section: str
) -> str:
    """One line: why a server ended.

    Args:
        log: the end of its log.
        code: exit code; None if it does not respond.
        causes: (pattern in the log, meaning and fix) of the engine, the first match counts.
        section: of the config, for the keys to change.
    """
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    port_in_use = (_ADDRESS_IN_USE, f"{PORT_IN_USE}; choose another {section}.port")
    for pattern, meaning in (port_in_use, *causes):
        for line in reversed(lines):
            if re.search(pattern, line, re.IGNORECASE):
                return f"{meaning} ({_shorten(line)!r})"
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)(: |$)", line)]
    raised = errors[-1] if errors else ""
    if code is None:
        ended = f"it did not answer within {section}.start_timeout"
    elif code in (137, -9) and raised:  # a server whose scheduler failed kills its own processes
        ended = f"it failed with {_shorten(raised)!r}"
    elif code in (137, -9):
        ended = "it was killed by SIGKILL, which is how Linux ends a process when memory runs out"
    elif code > 128 or code < 0:
        ended = f"it was ended by signal {code - 128 if code > 0 else -code}"
    else:
        ended = f"it exited with code {code}"
    end_of_log = " | ".join(_shorten(line) for line in lines[-3:])
    return f"{ended}; the end of its log: {end_of_log or 'empty'}"


def _shorten(line: str) -> str:
    """A line of a log, cut where it is too long for a reason."""
    return line if len(line) <= _LONGEST_LINE else f"{line[: _LONGEST_LINE - 3]}..."
