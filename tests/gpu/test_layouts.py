"""Layouts of one and two GPUs with NCCL against Transformers in float64; on a CPU one of them, with
gloo.

tests/equivalence has all layouts on a CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

# Before the fork server starts, which then has it.
from megatron_gspo.mcore.model import build_model  # noqa: F401
from tests.equivalence.layouts import MEASURED
from tests.equivalence.tolerances import OF_LORA, TOLERANCES
from tests.gpu.layouts import LAYOUTS, Files, LayoutErrors, errors_of, save_files
from tests.gpu.tolerances import BITS, unit_roundoff
from tests.support.distributed import run_distributed

ROOT = Path(__file__).parents[2]
COUNTS = ("route", "frozen weight")  # not rounded


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def moe(folder: Path) -> Files:
    return save_files("moe", folder)


def all_files(folder: Path) -> dict[str, Files]:
    """Of every model of the proof, made in as many processes as there are cores."""
    # Each; with a thread per core each, they would wait for each other.
    single_threaded = partial(torch.set_num_threads, 1)
    with ProcessPoolExecutor(
        os.cpu_count(), get_context("spawn"), initializer=single_threaded
    ) as pool:
        return dict(zip(MEASURED, pool.map(save_files, MEASURED, repeat(folder)), strict=True))


def torchrun(world: int, models: dict[str, Files], out: Path) -> list[dict[str, LayoutErrors]]:
    """Each rank's errors of each model."""
    listed = out / "models.json"
    listed.write_text(json.dumps(models))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(world),
        "-m",
        "tests.gpu.layouts",
        str(listed),
        str(out),
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"[-5000:]
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(world)]


def too_large(ranks: list[dict[str, LayoutErrors]], device: str) -> list[str]:
    """What is beyond the tolerance of the equivalence proof, which is that of float32 on a CPU."""
    wider = unit_roundoff("float32", device) * 2 ** BITS["float32"]
    return [
        f"rank {rank}, {model} {layout}: {kind} is off by {error:.1e} ({where})"
        for rank, models in enumerate(ranks)
        for model, layouts in models.items()
        for layout, kinds in layouts.items()
        for kind, (error, where) in kinds.items()
        if not error < (TOLERANCES | OF_LORA)[kind] * (1 if kind in COUNTS else wider)
    ]


@pytest.mark.parametrize("world", LAYOUTS)
def test_layouts(device, folder, moe, world, tmp_path):
    """Every model of the proof on one GPU, and Qwen3-MoE on two."""
    if device == "cpu":
        names = list(LAYOUTS[world])[:1]
        ranks = [{"moe": errors} for errors in run_distributed(errors_of, world, "moe", moe, names)]
    elif torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs, there are {torch.cuda.device_count()}")
    else:  # a process that uses CUDA cannot fork
        ranks = torchrun(world, all_files(folder) if world == 1 else {"moe": moe}, tmp_path)
    assert [list(errors["moe"]) for errors in ranks] == [
        names if device == "cpu" else list(LAYOUTS[world])
    ] * world
    assert not too_large(ranks, device)


@pytest.mark.slow
def test_the_launch_that_gpus_take(folder, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("test_layouts has it")
    models = all_files(folder)
    launched = torchrun(1, models, tmp_path)
    assert list(launched[0]) == list(MEASURED) == list(models)
    assert not too_large(launched, "cpu")
