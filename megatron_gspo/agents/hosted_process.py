"""The process that hosts a rank's agents.

`python -m megatron_gspo.agents.hosted_process DESCRIPTOR PARENT_PID`, started by `agent_process`:
the descriptor is a socket for the messages of `process_messages`. A keeper (`worker_keeper`) ends
it with all agents and verifiers when the trainer has died.
"""

from __future__ import annotations

import signal
import socket
import sys

from megatron_gspo.rewards.worker_keeper import fork_worker
from megatron_gspo.terminal import outlive_terminal


def main() -> None:
    """Host agents until the trainer closes the connection."""
    outlive_terminal()
    # Schedulers may send it to all processes of a job: it asks the trainer to save.
    signal.signal(signal.SIGUSR1, lambda *_: None)
    descriptor = int(sys.argv[1])
    fork_worker(int(sys.argv[2]), descriptor)
    # The keeper has nothing of this in its memory.
    from megatron_gspo.agents.hosted_agents import host_agents

    host_agents(socket.socket(fileno=descriptor))


if __name__ == "__main__":
    main()
