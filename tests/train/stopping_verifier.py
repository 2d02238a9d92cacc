"""A verifier that signals the run to stop, as a job script does before its time limit."""

import os
import signal
from pathlib import Path

from tests.support import spelling_verifier


def score(response: str, prompt, metrics: str, rank: int, records: int) -> float:
    """Sends SIGUSR1 to its own rank, and to no other, while metrics.jsonl holds just so many
    records.
    """
    file = Path(metrics)
    if (
        int(os.environ["RANK"]) == rank
        and file.is_file()
        and file.read_bytes().count(b"\n") == records
    ):
        os.kill(os.getpid(), signal.SIGUSR1)
    return spelling_verifier.score(response, prompt)
