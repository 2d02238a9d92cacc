"""The process of one tracker, which ``trackers.RemoteTracker`` starts.

A tracker's package may wait for its server for minutes, also at the end of the interpreter, and
print, log and raise where nobody catches it. Here it does all of that to nobody but itself.

Protocol: one JSON object a line. Requests come on standard input: the tracker, then steps, then
{"close": true}; without that the trainer has died, and the tracked run is left as it is. Each
request has one reply, on the descriptor that standard output was: {"error": null}, or why it
failed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_gspo.errors import first_line
from megatron_gspo.terminal import outlive_terminal
from megatron_gspo.tracking.trackers import TRACKERS, RunInfo, Tracker


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    os.dup2(2, 1)  # what the package prints is no reply
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # nor is a request its user's answer
    outlive_terminal()
    tracker: Tracker | None = None
    for line in requests:
        if not line.endswith("\n"):
            break  # the trainer died while it wrote this one
        request: dict[str, Any] = json.loads(line)
        error = None
        try:
            if tracker is None:
                tracker = _start(request)
            elif "close" in request:
                tracker.close()
            else:
                tracker.log(request["step"], request["metrics"])
        except (Exception, SystemExit) as failure:
            error = f"{type(failure).__name__}: {first_line(failure)}"
        try:
            replies.write(json.dumps({"error": error}) + "\n")
            replies.flush()
        except BrokenPipeError:
            break  # the trainer died before it read this one
        if error is not None:
            os._exit(1)  # without the packages' work at the end of the interpreter
        if "close" in request:
            return
    os._exit(1)


def _start(request: Mapping[str, Any]) -> Tracker:
    sys.argv[:] = request["command"]  # W&B shows it
    run = RunInfo(Path(request["path"]), request["config"], request["resume_step"])
    return TRACKERS[request["kind"]].make(run, request["project"])


if __name__ == "__main__":
    main()
