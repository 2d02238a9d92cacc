"""The device of a test: the GPU, or the CPU at tiny sizes where there is none, so that the
tests themselves are run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_gspo.config import ParallelConfig
from megatron_gspo.mcore.layers import transformer_engine_available
from megatron_gspo.mcore.process_groups import ProcessGroups, shutdown
from tests.gpu.errors import MEASURED
from tests.gpu.sizes import SIZES, Sizes
from tests.support.parallel_groups import groups_of

NO_GPU = "no CUDA GPU"


@pytest.fixture(scope="session", params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    """Models are built on the GPU where there is one, so one of the two is skipped."""
    there = torch.cuda.is_available()
    if request.param == "cuda" and not there:
        pytest.skip(NO_GPU)
    if request.param == "cpu" and there:
        pytest.skip("models are built on the GPU")
    return request.param


@pytest.fixture(scope="session")
def sizes(device: str) -> Sizes:
    return SIZES[device]


@pytest.fixture(params=["torch", "transformer_engine"])
def implementation(request: pytest.FixtureRequest, device: str) -> str:
    """Of the layers."""
    if request.param == "transformer_engine" and not transformer_engine_available():
        pytest.skip(NO_GPU if device == "cpu" else "Transformer Engine is not installed")
    return request.param


@pytest.fixture(scope="module")
def groups(device: str) -> Iterator[ProcessGroups]:
    """A world of this process alone, with its GPU's NCCL or with gloo."""
    yield groups_of(ParallelConfig())
    shutdown()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """How close the results of each test were to their tolerances."""
    reports = [
        report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, ())
    ]
    lines = [
        f"{value}  {report.nodeid}"
        for report in reports
        for name, value in report.user_properties
        if name == MEASURED
    ]
    if lines:
        terminalreporter.write_sep("=", MEASURED)
        terminalreporter.write("\n".join(lines) + "\n")
