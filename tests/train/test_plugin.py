"""The example of a custom Megatron-Core loop: short, and the same on one and on two processes."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.training_runs import torchrun

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "plugin" / "train_own_loop.py"


def figures(processes: int) -> list[tuple[float, float]]:
    done = torchrun(processes, str(EXAMPLE), PYTHONPATH=str(EXAMPLE.parents[2]))
    return [(float(a), float(b)) for a, b in re.findall(r"loss (\S+), gradient norm (\S+)", done.stdout)]


def test_the_example_trains_and_does_not_depend_on_the_layout():
    single = figures(1)
    assert len(single) == 3 and all(norm > 0 for _, norm in single)
    assert figures(2) == single
