"""A rank's memory by the plan against a GPU's."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_gspo.config import load_config
from megatron_gspo.models import family_of, read_config
from megatron_gspo.tools.doctor.gpu_memory import judge_gpu_memory, planned_memory

EXAMPLES = Path(__file__).parents[3] / "examples" / "qwen3_moe"
GIB = 1 << 30


@pytest.fixture(scope="module")
def memory():
    config = load_config(EXAMPLES / "qwen3_30b_a3b_1x8_141gb_gspo.yaml")
    return planned_memory(config, family_of(read_config(EXAMPLES / "models" / "Qwen3-30B-A3B"))[1], 8)


def test_the_states_are_those_of_the_launch_page(memory):
    states = memory.weights + memory.gradients + memory.optimizer
    line = next(line for line in (EXAMPLES.parents[1] / "docs" / "launch.md").read_text().splitlines()
                if "`qwen3_30b_a3b_1x8_141gb_gspo.yaml`" in line)  # fmt: skip
    assert f"| {states / GIB:.1f} GiB |" in line


@pytest.mark.parametrize("gibibytes, level", [(140, "ok"), (78, "warning"), (40, "error"), (None, "note")])
def test_a_gpu(memory, gibibytes, level):
    found = judge_gpu_memory(memory, gibibytes and gibibytes * GIB)
    assert (found.level, found.check) == (level, "machine.gpu_memory")
    assert "67.3 GiB of weights, gradients and optimizer" in found.what
