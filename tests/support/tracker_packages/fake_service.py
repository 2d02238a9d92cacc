"""What the fake packages beside it share: a file of calls, and faults on request."""

import json
import os
import time
from typing import Any


def note(call: str, **values: Any) -> None:
    with open(os.environ["FAKE_TRACKER_CALLS"], "a", encoding="utf-8") as file:
        file.write(json.dumps({"call": call, **values}) + "\n")


def begin() -> None:
    """Fail as a package does that can't start a run."""
    fault = os.environ.get("FAKE_TRACKER_FAULT")
    if fault == "no network":
        raise ConnectionError("Failed to resolve 'api.example'\nTraceback of a library")
    if fault == "wrong key":
        raise SystemExit("401: the API key is invalid")
    if fault == "asks":
        input("Paste your API key: ")


def take() -> None:
    """Fail as a package does whose service is gone in the middle of a run."""
    fault = os.environ.get("FAKE_TRACKER_FAULT")
    if fault == "ends":
        os._exit(3)
    if fault == "hangs":
        time.sleep(600)
