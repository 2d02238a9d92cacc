"""Scores a response by its characters, and waits while the file that `GATE` names exists, to
stop a run's progress.
"""

import os
import time
from pathlib import Path


def score(response: str, prompt) -> float:
    while Path(os.environ["GATE"]).exists():
        time.sleep(0.05)
    return (sum(map(ord, response)) % 7) / 6
