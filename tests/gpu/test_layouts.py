"""Layouts of one and two GPUs with NCCL against Transformers in float64; on a CPU one of them, with gloo.

tests/equivalence has all layouts on a CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_gspo.mcore.model import build_model  # noqa: F401  before the fork server starts, which then has it
from tests.equivalence.tolerances import TOLERANCES
from tests.equivalence.truth import save_truth
from tests.gpu.layouts import LAYOUTS, SCENARIOS, LayoutErrors, errors_of
from tests.gpu.tolerances import BITS, unit_roundoff
from tests.support.distributed import run_distributed
from tests.support.tiny_models import save_tiny_model

ROOT = Path(__file__).parents[2]
COUNTS = ("route",)  # not rounded


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("models")
    path = save_tiny_model(folder / "moe")
    return path, save_truth(path, folder / "truth.pt", SCENARIOS)


def torchrun(world: int, model: tuple[str, str], out: Path) -> list[LayoutErrors]:
    """Each rank's errors."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world), "-m",
               "tests.gpu.layouts", *model, str(out)]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True,
                          text=True, timeout=300)  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"[-5000:]
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(world)]


def too_large(ranks: list[LayoutErrors], device: str) -> list[str]:
    """What is beyond the tolerance of the equivalence proof, which is that of float32 on a CPU."""
    wider = unit_roundoff("float32", device) * 2 ** BITS["float32"]
    return [
        f"rank {rank}, {layout}: {kind} is off by {error:.1e} ({where})"
        for rank, layouts in enumerate(ranks)
        for layout, kinds in layouts.items()
        for kind, (error, where) in kinds.items()
        if not error < TOLERANCES[kind] * (1 if kind in COUNTS else wider)
    ]


@pytest.mark.parametrize("world", LAYOUTS)
def test_layouts(device, model, world, tmp_path):
    if device == "cuda":
        if torch.cuda.device_count() < world:
            pytest.skip(f"needs {world} GPUs, there are {torch.cuda.device_count()}")
        names, ranks = list(LAYOUTS[world]), torchrun(world, model, tmp_path)  # a process that uses CUDA cannot fork
    else:
        names = list(LAYOUTS[world])[:1]
        ranks = run_distributed(errors_of, world, *model, names)
    assert [list(found) for found in ranks] == [names] * world
    assert not too_large(ranks, device)


@pytest.mark.slow
def test_the_launch_that_gpus_take(model, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("test_layouts has it")
    assert not too_large(torchrun(1, model, tmp_path), "cpu")


def test_an_error_beyond_the_tolerance_is_reported_with_its_place():
    ranks = [{"tp2": {"gradient": (9e-6, "x"), "route": (0.0, "y")}}, {"tp2": {"gradient": (3e-4, "x")}}]
    assert too_large(ranks, "cuda") == ["rank 1, tp2: gradient is off by 3.0e-04 (x)"]
    assert too_large([{"tp2": {"route": (1.0, "y"), "loss": (float("nan"), "z")}}], "cuda") != []
