"""What the kernels take of a GPU: registers without spills, and wide accesses."""

from __future__ import annotations

import json
import os
import subprocess
import sys

# Of a thread; with 256 of 65,536 registers a multiprocessor is full at a quarter of its threads.
REGISTERS = 128
WIDEST = 16


def test_kernels_compile_for_hopper_and_blackwell():
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.compiled"]
    answer = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert answer.returncode == 0, answer.stderr[-2000:]
    for name, usage in json.loads(answer.stdout).items():
        assert usage["stack"] == 0, f"{name} spills registers: {usage}"
        assert usage["registers"] <= REGISTERS, f"{name}: {usage}"
        assert usage["load"] == WIDEST, f"{name}: {usage}"
        assert usage["store"] == usage["wanted_store"], f"{name}: {usage}"
        assert usage["atomics"] == 0, f"{name} adds up in another order each time: {usage}"
