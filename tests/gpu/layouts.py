"""Layouts against the float64 reference, on GPUs with NCCL: one rank of one or two.

    torchrun --nproc-per-node 2 -m tests.gpu.layouts MODEL TRUTH OUT

Writes this rank's errors as OUT/RANK.json: by layout and kind, the error and where it was met.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from megatron_gspo.mcore.process_groups import shutdown, start
from tests.equivalence.cases import Case
from tests.equivalence.layouts import Arrangement
from tests.equivalence.run import run_case

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


def case_of(arrangement: Arrangement) -> Case:
    """Log-probs, gradients, routing replay and optimizer steps."""
    return Case(arrangement, {"recompute": "full"}, tuple((name, "packed") for name in SCENARIOS), "gspo", (True,),
                replays=True)  # fmt: skip


def errors_of(rank: int, world_size: int, path: str, truth: str, names: Sequence[str]) -> LayoutErrors:
    """Of this rank, in some layouts of as many processes."""
    found = {}
    for name in names:
        case = case_of(LAYOUTS[world_size][name])
        found[name] = run_case(rank, world_size, path, case, truth).worst
        shutdown(keep_distributed=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name in ("model", "truth", "out"):
        parser.add_argument(name)
    arguments = parser.parse_args()
    start(timeout_minutes=2.0)
    world = dist.get_world_size()
    errors = errors_of(dist.get_rank(), world, arguments.model, arguments.truth, tuple(LAYOUTS[world]))
    (Path(arguments.out) / f"{os.environ['RANK']}.json").write_text(json.dumps(errors))
    shutdown()


if __name__ == "__main__":
    main()
