"""Layouts against the float64 reference, on GPUs with NCCL: one rank of one or two.

    torchrun --nproc-per-node 2 -m tests.gpu.layouts MODELS OUT

MODELS is a JSON file: by name of ``MEASURED`` in tests/equivalence/layouts.py, the model and the
folder of its truth. Writes this rank's errors as OUT/RANK.json: by model, layout and kind, the error
and where it was met.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from megatron_gspo.mcore.process_groups import shutdown, start
from tests.equivalence.cases import Case
from tests.equivalence.layouts import Arrangement
from tests.equivalence.lora import ADAPTERS, save_lora_truth
from tests.equivalence.measure import DENSE_MODELS, MODELS
from tests.equivalence.run import run_case
from tests.equivalence.truth import ModelFiles
from tests.support.tiny_models import save_tiny_model

SCENARIOS = ("gspo", "grpo, replayed")
LAYOUTS = {
    1: {"one": Arrangement()},
    2: {
        "tp2": Arrangement(tensor=2, sequence_parallel=True),
        "ep2": Arrangement(expert=2, data=2),
        "pp2": Arrangement(pipeline=2),
        "cp2": Arrangement(context=2),
        "tp2ep2": Arrangement(tensor=2, sequence_parallel=True, expert=2),
        "dp2": Arrangement(data=2),
    },
}

LayoutErrors = dict[str, dict[str, tuple[float, str]]]
Files = tuple[str, str]  # a model and the folder of its truth


def has_experts(name: str) -> bool:
    """Of a model of ``MEASURED``."""
    return (ADAPTERS[name].model if name in ADAPTERS else name) not in DENSE_MODELS


def scenarios_of(name: str) -> tuple[str, ...]:
    """What a model's truth has to hold."""
    return SCENARIOS if has_experts(name) else SCENARIOS[:1]


def save_files(name: str, folder: Path) -> Files:
    """Write a model and its truth to a folder."""
    kind = ADAPTERS[name].model if name in ADAPTERS else name
    path = save_tiny_model(folder / name, **MODELS[kind])
    files = ModelFiles(path, folder / f"{name}_truth")
    if name in ADAPTERS:
        save_lora_truth(files, ADAPTERS[name])
    else:
        files.make(scenarios_of(name))
    return path, str(files.folder)


def case_of(name: str, arrangement: Arrangement) -> Case:
    """Log-probs, gradients, routing replay and optimizer steps of a model."""
    experts = has_experts(name)
    lora = ADAPTERS[name].lora if name in ADAPTERS else None
    runs = tuple((scenario, "packed") for scenario in scenarios_of(name))
    return Case(
        replace(arrangement, moe=experts),
        {"recompute": "full"},
        runs,
        "gspo",
        (True,),
        replays=experts and lora is None,
        lora=lora,
    )


def errors_of(
    rank: int, world_size: int, name: str, files: Files, layouts: Sequence[str]
) -> LayoutErrors:
    """Of this rank, with a model in some layouts of as many processes."""
    path, folder = files
    model = ModelFiles(path, Path(folder))
    errors = {}
    for layout in layouts:
        case = case_of(name, LAYOUTS[world_size][layout])
        errors[layout] = run_case(rank, world_size, model, case).worst
        shutdown(keep_distributed=True)
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    start(timeout_minutes=2.0)
    rank = dist.get_rank()
    world = dist.get_world_size()
    models = json.loads(arguments.models.read_text())
    errors = {}
    for name, files in models.items():
        began = time.monotonic()
        errors[name] = errors_of(rank, world, name, files, tuple(LAYOUTS[world]))
        print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)
    (arguments.out / f"{os.environ['RANK']}.json").write_text(json.dumps(errors))
    shutdown()


if __name__ == "__main__":
    main()
