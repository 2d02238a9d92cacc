"""Triton's interpreter runs the kernels on a CPU: ``.ci/run kernels``."""

from __future__ import annotations

import importlib.util
import os

import pytest

HAS_TRITON = importlib.util.find_spec("triton") is not None
if HAS_TRITON:
    os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are imported


@pytest.fixture(autouse=True)
def _needs_triton() -> None:
    if not HAS_TRITON:
        pytest.skip("Triton is not installed: .ci/run kernels has it")
