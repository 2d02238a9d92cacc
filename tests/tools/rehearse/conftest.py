"""The tests of `on_fake_gpu`: one process for all workers of pytest runs the selected ones from
the start.
"""

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

ROOT = Path(__file__).parents[3]
SECONDS = 900.0  # that it may take; it takes a minute


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the process before the first test, so that no worker waits for all of it."""
    functions = [getattr(item, "function", None) for item in session.items]
    names = [function.on_fake_gpu[0] for function in functions if hasattr(function, "on_fake_gpu")]
    if not names or session.config.option.collectonly:
        return
    folder = shared_folder(session.config._tmp_path_factory)  # type: ignore[attr-defined]
    with contextlib.suppress(BlockingIOError), locked(folder) as lock:
        if not (folder / "outcomes.json").exists():
            start(folder, lock, names)


@pytest.fixture(scope="session")
def fake_gpu_outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The failure of each test of `on_fake_gpu`, or nothing."""
    folder = shared_folder(tmp_path_factory)
    with locked(folder, SECONDS):
        output = folder / "outcomes.json"
        assert output.exists(), (folder / "log").read_text()
    return json.loads(output.read_text())


def shared_folder(factory: pytest.TempPathFactory) -> Path:
    """A folder of all workers of this session."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "fake_gpu"
    folder.mkdir(exist_ok=True)
    return folder


@contextlib.contextmanager
def locked(folder: Path, seconds: float = 0.0) -> Iterator[IO[str]]:
    """The lock that the process holds while it runs; BlockingIOError if it still does after
    these seconds.
    """
    deadline = time.monotonic() + seconds
    with open(folder / "lock", "w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(0.1)
        yield lock


def start(folder: Path, lock: IO[str], names: list[str]) -> None:
    """Run these tests in the process, which inherits the lock and with it holds it until it
    ends.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    module = "tests.tools.rehearse.on_fake_gpu"
    command = [sys.executable, "-W", "ignore", "-m", module, str(folder / "outcomes.json"), *names]
    with open(folder / "log", "w") as log:
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=[lock.fileno()],
        )
