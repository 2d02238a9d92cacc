"""The example of a custom Megatron-Core loop: the same on one and on two processes."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
from pathlib import Path
from unittest import mock

from tests.support.distributed import run_distributed

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "plugin" / "train_own_loop.py"


def run_example(rank: int, world_size: int) -> list[tuple[float, float]]:
    """The loss and the gradient norm of each step; of rank 0, which prints them."""
    printed = io.StringIO()
    # Done outside.
    begin, end = (
        mock.patch(f"torch.distributed.{name}_process_group") for name in ("init", "destroy")
    )
    with contextlib.redirect_stdout(printed), begin, end:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return [
        (float(a), float(b))
        for a, b in re.findall(r"loss (\S+), gradient norm (\S+)", printed.getvalue())
    ]


def test_the_example_trains_and_does_not_depend_on_the_layout():
    [single] = run_distributed(run_example, 1)
    assert len(single) == 3 and all(norm > 0 for _, norm in single)
    assert run_distributed(run_example, 2)[0] == single
