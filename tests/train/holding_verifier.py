"""A verifier that delays the writer of a checkpoint, as a slow disk does, until the run has
continued.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

from tests.fault_injection import kill_and_resume

_WRITING = os.O_WRONLY | os.O_RDWR
_SIGNALS: list[Path] = []  # one; an audit hook can't be removed, and a module is loaded once


def _hold(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and arguments[2] & _WRITING and str(arguments[0]).endswith(".distcp"):
        while _SIGNALS and not _SIGNALS[0].exists():
            time.sleep(0.01)


sys.addaudithook(_hold)


def score(response: str, prompt, metrics: str, go: str, records: int) -> float:
    """Lets the writers go, by the file ``go``, once metrics.jsonl holds so many records."""
    _SIGNALS[:] = [Path(go)]
    file = Path(metrics)
    if file.is_file() and file.read_bytes().count(b"\n") >= records:
        _SIGNALS[0].touch()
    return kill_and_resume.score(response, prompt)
