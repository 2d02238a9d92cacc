"""Counts of parameters: worked by hand, against the published sizes, and against Megatron's own
modules.
"""

from __future__ import annotations

from typing import Any

import pytest
from transformers import DeepseekV3Config

from megatron_gspo.config import ParallelConfig
from megatron_gspo.models import family_of
from megatron_gspo.tools.plan.parameters import (
    active_parameters,
    layer_parameters,
    total_parameters,
)
from tests.support.configs import model_config
from tests.support.distributed import run_distributed
from tests.support.model_shapes import LARGE, MINIMAX_M2, NEXT, SMALL, dense_shape, shape_of
from tests.support.tiny_models import tiny_config


def test_a_layer_by_hand() -> None:
    # q 2 x 4, k and v 4 each: 16 rows of 8; projection 8 x 8; MLP 2 x 6 x 8 and 6 x 8; norms 8 + 8
    # + 4 + 4
    layer = layer_parameters(dense_shape(), 0)
    assert (
        layer.attention == 16 * 8 + 8 * 8 + 4 + 4
        and layer.mlp == 2 * 6 * 8 + 6 * 8
        and layer.norms == 8 + 8
    )
    assert layer.dense == 360 and layer.experts == 0
    assert total_parameters(dense_shape()) == 2 * 360 + 2 * 10 * 8 + 8
    assert total_parameters(dense_shape(tied_embeddings=True)) == 2 * 360 + 10 * 8 + 8


def test_published_sizes() -> None:
    # 48 layers: attention 2048 x (32 + 8 + 32) x 128, experts 128 x 3 x 768 x 2048, router 128 x
    # 2048, norms
    layer = 2048 * 72 * 128 + 128 * 3 * 768 * 2048 + 128 * 2048 + 2 * 2048 + 2 * 128
    assert (
        total_parameters(shape_of(SMALL)) == 48 * layer + 2 * 151936 * 2048 + 2048 == 30_532_122_624
    )
    assert active_parameters(shape_of(SMALL)) == 30_532_122_624 - 48 * 120 * 3 * 768 * 2048
    assert total_parameters(shape_of(LARGE)) == pytest.approx(235.09e9, rel=1e-4)
    assert active_parameters(shape_of(LARGE)) == pytest.approx(22.2e9, rel=2e-3)


def test_published_sizes_of_latent_attention() -> None:
    """DeepSeek-V3 without its layer of multi-token prediction: 671 billion parameters, 37
    billion active.
    """
    _, shape = family_of(DeepseekV3Config().to_dict())
    attention = (
        7168 * 1536
        + 1536
        + 1536 * 128 * 192
        + 7168 * 576
        + 512
        + 512 * 128 * 256
        + 128 * 128 * 7168
    )
    layers = (
        61 * (attention + 2 * 7168)
        + 3 * 3 * 7168 * 18432
        + 58 * (256 * 7168 + 257 * 3 * 7168 * 2048)
    )
    assert (
        total_parameters(shape)
        == layers + 2 * 129280 * 7168 + 7168
        == pytest.approx(671.0e9, rel=1e-3)
    )
    assert active_parameters(shape) == pytest.approx(37.5e9, rel=5e-3)


def test_published_sizes_of_gated_delta_nets() -> None:
    """Qwen3-Next-80B-A3B without its multi-token prediction: 36 gated delta nets and 12 layers
    of gated attention.
    """
    shape = shape_of(NEXT)
    outer = 2 * 151936 * 2048 + 2048
    # With router, shared expert and its gate.
    experts = 512 * 3 * 512 * 2048 + 512 * 2048 + 3 * 512 * 2048 + 2048
    # Q k v z, b and a; filters; rates; norm; output.
    delta = 12352 * 2048 + 8192 * 4 + 2 * 32 + 128 + 4096 * 2048
    attention = (2 * 4096 + 2 * 512) * 2048 + 2 * 256 + 4096 * 2048
    total = outer + 48 * (experts + 2 * 2048) + 36 * delta + 12 * attention
    # As published, of the files of Qwen3-Coder-Next.
    assert total_parameters(shape) == total == 79_674_391_296
    assert active_parameters(shape) == total - 48 * 502 * 3 * 512 * 2048 == 3_874_929_408


def test_published_sizes_of_minimax_m2() -> None:
    """230 billion parameters, 10 billion active, without its multi-token prediction."""
    shape = shape_of(MINIMAX_M2)
    attention = (48 + 2 * 8) * 128 * 3072 + 48 * 128 * 3072 + 56 * 128  # with norms of all heads
    layer = attention + 256 * 3 * 1536 * 3072 + 256 * 3072 + 2 * 3072
    assert (
        total_parameters(shape)
        == 62 * layer + 2 * 200064 * 3072 + 3072
        == pytest.approx(228.7e9, rel=1e-3)
    )
    assert active_parameters(shape) == total_parameters(shape) - 62 * 248 * 3 * 1536 * 3072


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
    "glm",
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
