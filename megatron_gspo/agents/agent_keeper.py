"""Starts an agent's program in a group of its own and ends it with every process that it started.

Run as `python -m megatron_gspo.agents.agent_keeper PARENT_PID PID_DESCRIPTOR`; the command, its
directory and its environment come over the standard input as JSON, since keys do not belong on a
command line. The program's process id is written to the descriptor. A second process, the keeper,
waits for the program's end (`worker_keeper`): it then kills what is left, also what has left the
group, and so it does on SIGTERM and when the parent dies.
"""

from __future__ import annotations

import json
import os
import resource
import sys

from megatron_gspo.rewards.worker_keeper import fork_worker

NOT_STARTED = 127  # exit code, as of a shell


def main() -> None:
    """Never returns in the program's process."""
    parent = int(sys.argv[1])
    pid_descriptor = int(sys.argv[2])
    given = json.loads(sys.stdin.buffer.read())
    fork_worker(parent, pid_descriptor)
    os.write(pid_descriptor, str(os.getpid()).encode())
    os.close(pid_descriptor)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        os.chdir(given["directory"])
        os.execvpe(given["command"][0], given["command"], given["env"])
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        print(f"{given['command'][0]}: cannot be started: {reason}", file=sys.stderr, flush=True)
        os._exit(NOT_STARTED)


if __name__ == "__main__":
    main()
