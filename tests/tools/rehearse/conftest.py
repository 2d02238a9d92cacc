import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def fake_gpu_outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The failure of each test of `on_fake_gpu`, or nothing. Run once for all of pytest's workers."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # of all workers of this session
    output = folder / "fake_gpu_outcomes.json"
    with open(folder / "fake_gpu.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not output.exists():
            _run(output)
    return json.loads(output.read_text())


def _run(output: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.tools.rehearse.on_fake_gpu", str(output)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
