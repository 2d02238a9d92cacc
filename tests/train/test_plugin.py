"""The example of a Megatron-Core loop of one's own: short, and the same on one and on two processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "plugin" / "train_own_loop.py"


def figures(processes: int) -> list[tuple[float, float]]:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(processes),
        str(EXAMPLE),
    ]
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": str(EXAMPLE.parents[2]),
    }
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    return [(float(a), float(b)) for a, b in re.findall(r"loss (\S+), gradient norm (\S+)", done.stdout)]


def test_the_example_trains_and_does_not_depend_on_the_layout():
    single = figures(1)
    assert len(single) == 3 and all(norm > 0 for _, norm in single)
    assert figures(2) == single
