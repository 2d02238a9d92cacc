"""A verifier in the training process that breaks one rank; its options select which and how."""

import os
import resource
import signal
import time


def score(response: str, prompt, *, rank: int, how: str) -> float:
    if int(os.environ.get("RANK", "0")) == rank:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if how == "terminate":
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(600)
        if how == "full disk":
            resource.setrlimit(
                resource.RLIMIT_FSIZE, (3000, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
            )
    return (sum(map(ord, response)) % 7) / 6
