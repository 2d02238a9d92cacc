"""Triton's interpreter runs the kernels on a CPU: ``.ci/run kernels``."""

from __future__ import annotations

import importlib.util
import os
import sys

import pytest

INTERPRET = "TRITON_INTERPRET"
REASON = ""
if importlib.util.find_spec("triton") is None:
    REASON = "Triton is not installed: .ci/run kernels has it"
elif "triton.language" in sys.modules and os.environ.get(INTERPRET) != "1":
    REASON = f"Triton was imported without {INTERPRET}=1: run tests/kernels alone"
else:
    os.environ[INTERPRET] = "1"


@pytest.fixture(autouse=True)
def _needs_the_interpreter() -> None:
    if REASON:
        pytest.skip(REASON)
