"""Counts of parameters: worked by hand, against the published sizes, and against Megatron's own
modules.
"""

from __future__ import annotations

from typing import Any

import pytest
from transformers import DeepseekV3Config

from megatron_gspo.config import ParallelConfig
from megatron_gspo.models import ModelShape, family_of
from megatron_gspo.tools.plan.parameters import (
    active_parameters,
    total_parameters,
)
from tests.support.configs import model_config
from tests.support.distributed import run_distributed
from tests.support.model_shapes import LARGE, MINIMAX_M2, NEXT, SMALL, shape_of
from tests.support.tiny_models import tiny_config


@pytest.mark.parametrize(
    ("shape", "total", "active"),
    [
        (shape_of(SMALL), 30_532_122_624, 3_353_032_704),
        (shape_of(LARGE), pytest.approx(235.09e9, rel=1e-4), pytest.approx(22.2e9, rel=2e-3)),
        # Of the files of Qwen3-Coder-Next, without multi-token prediction.
        (shape_of(NEXT), 79_674_391_296, 3_874_929_408),
        (
            shape_of(MINIMAX_M2),
            pytest.approx(228.7e9, rel=1e-3),
            pytest.approx(11.03e9, rel=1e-3),
        ),
        (
            family_of(DeepseekV3Config().to_dict())[1],
            pytest.approx(671.0e9, rel=1e-3),
            pytest.approx(37.5e9, rel=5e-3),
        ),
    ],
    ids=["Qwen3-30B-A3B", "Qwen3-235B-A22B", "Qwen3-Next", "MiniMax-M2", "DeepSeek-V3"],
)
def test_published_sizes(shape: ModelShape, total: object, active: object) -> None:
    assert total_parameters(shape) == total
    assert active_parameters(shape) == active


def _parameters_of_megatron(rank: int, world: int, models: list[dict[str, Any]]) -> list[int]:
    import torch.distributed as dist

    from megatron_gspo.mcore.meta_device import meta_model, simulated_rank

    dist.destroy_process_group()
    counts = []
    for hf in models:
        with simulated_rank(ParallelConfig(), 1, 0) as groups:
            chunks = meta_model(family_of(hf)[1], ParallelConfig(), model_config(), groups)
        counts.append(
            sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())
        )
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return counts


FAMILIES = (
    "deepseek",
    "moonlight",
    "glm_lite",
    "deepseek_v32",
    "glm",
    "nemotron",
    "next",
    "minimax",
    "gpt_oss",
    "qwen35_moe",
    "qwen35",
)


def test_megatron_has_as_many() -> None:
    """Its modules on the meta device, of a small model of each family."""
    models = [tiny_config(family).to_dict() for family in FAMILIES]
    counted = [total_parameters(family_of(hf)[1]) for hf in models]
    assert run_distributed(_parameters_of_megatron, 1, models) == [counted]
