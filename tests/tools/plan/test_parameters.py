"""Counts of parameters: worked by hand, against the published sizes, and against Megatron's own modules."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import DeepseekV3Config

from megatron_gspo.config import ParallelConfig
from megatron_gspo.models import family_of
from megatron_gspo.tools.plan.parameters import (
    LayerKind,
    active_parameters,
    chunk_layers,
    chunk_parameters,
    layer_parameters,
    total_parameters,
)
from tests.support.configs import model_config, parallel
from tests.support.distributed import run_distributed
from tests.support.model_shapes import LARGE, MINIMAX_M2, NEXT, SMALL, dense_shape, shape_of
from tests.support.tiny_models import tiny_config


def test_a_layer_by_hand() -> None:
    # q 2 x 4, k and v 4 each: 16 rows of 8; projection 8 x 8; MLP 2 x 6 x 8 and 6 x 8; norms 8 + 8 + 4 + 4
    parts = layer_parameters(dense_shape(), ParallelConfig(), LayerKind("attention", False))
    assert sum(part.count for part in parts) == 16 * 8 + 8 * 8 + 2 * 6 * 8 + 6 * 8 + 8 + 8 + 4 + 4
    assert total_parameters(dense_shape()) == 2 * 360 + 2 * 10 * 8 + 8
    assert total_parameters(dense_shape(tied_embeddings=True)) == 2 * 360 + 10 * 8 + 8


def test_published_sizes() -> None:
    # 48 layers: attention 2048 x (32 + 8 + 32) x 128, experts 128 x 3 x 768 x 2048, router 128 x 2048, norms
    layer = 2048 * 72 * 128 + 128 * 3 * 768 * 2048 + 128 * 2048 + 2 * 2048 + 2 * 128
    assert total_parameters(shape_of(SMALL)) == 48 * layer + 2 * 151936 * 2048 + 2048 == 30_532_122_624
    assert active_parameters(shape_of(SMALL)) == 30_532_122_624 - 48 * 120 * 3 * 768 * 2048
    assert total_parameters(shape_of(LARGE)) == pytest.approx(235.09e9, rel=1e-4)
    assert active_parameters(shape_of(LARGE)) == pytest.approx(22.2e9, rel=2e-3)


def test_published_sizes_of_latent_attention() -> None:
    """DeepSeek-V3 without its layer of multi-token prediction: 671 billion parameters, 37 billion active."""
    _, shape = family_of(DeepseekV3Config().to_dict())
    attention = 7168 * 1536 + 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 + 512 * 128 * 256 + 128 * 128 * 7168
    layers = 61 * (attention + 2 * 7168) + 3 * 3 * 7168 * 18432 + 58 * (256 * 7168 + 257 * 3 * 7168 * 2048)
    assert total_parameters(shape) == layers + 2 * 129280 * 7168 + 7168 == pytest.approx(671.0e9, rel=1e-3)
    assert active_parameters(shape) == pytest.approx(37.5e9, rel=5e-3)


def test_published_sizes_of_gated_delta_nets() -> None:
    """Qwen3-Next-80B-A3B without its multi-token prediction: 36 gated delta nets and 12 layers of gated attention."""
    shape = shape_of(NEXT)
    outer = 2 * 151936 * 2048 + 2048
    experts = 512 * 3 * 512 * 2048 + 512 * 2048 + 3 * 512 * 2048 + 2048  # with router, shared expert and its gate
    delta = 12352 * 2048 + 8192 * 4 + 2 * 32 + 128 + 4096 * 2048  # q k v z, b and a; filters; rates; norm; output
    attention = (2 * 4096 + 2 * 512) * 2048 + 2 * 256 + 4096 * 2048
    total = outer + 48 * (experts + 2 * 2048) + 36 * delta + 12 * attention
    assert total_parameters(shape) == total == 79_674_391_296  # as published, of the files of Qwen3-Coder-Next
    assert active_parameters(shape) == total - 48 * 502 * 3 * 512 * 2048 == 3_874_929_408


def test_published_sizes_of_minimax_m2() -> None:
    """230 billion parameters, 10 billion active, without its multi-token prediction."""
    shape = shape_of(MINIMAX_M2)
    attention = (48 + 2 * 8) * 128 * 3072 + 48 * 128 * 3072 + 56 * 128  # with norms of all heads
    layer = attention + 256 * 3 * 1536 * 3072 + 256 * 3072 + 2 * 3072
    assert total_parameters(shape) == 62 * layer + 2 * 200064 * 3072 + 3072 == pytest.approx(228.7e9, rel=1e-3)
    assert active_parameters(shape) == total_parameters(shape) - 62 * 248 * 3 * 1536 * 3072


def test_stages_hold_every_layer_once() -> None:
    parallel = ParallelConfig(pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=3)
    shape = shape_of(SMALL)
    chunks = {(s, c): list(chunk_layers(shape, parallel, s, c)) for s in range(4) for c in range(3)}
    assert chunks[1, 2] == [36, 37, 38, 39]  # the third chunk of the second stage is part 9 of 12
    assert sorted(layer for part in chunks.values() for layer in part) == list(range(48))


def test_embedding_and_loss_take_the_place_of_a_layer_each() -> None:
    """94 layers and 2 on 8 stages of 2 chunks: 6 to a chunk, 5 in the first and in the last."""
    parallel = ParallelConfig(pipeline_model_parallel_size=8, virtual_pipeline_model_parallel_size=2,
                              account_for_embedding_in_pipeline_split=True, account_for_loss_in_pipeline_split=True)
    chunks = [chunk_layers(shape_of(LARGE), parallel, stage, chunk) for chunk in range(2) for stage in range(8)]
    assert [len(chunk) for chunk in chunks] == [5, *[6] * 14, 5]
    assert [layer for chunk in chunks for layer in chunk] == list(range(94))


def _same_as_megatron(rank: int, world: int, cases: list[Any]) -> list[str]:
    import torch.distributed as dist

    from megatron_gspo.mcore.meta_device import meta_model, simulated_rank
    from megatron_gspo.models import family_of
    from megatron_gspo.models.families import with_value_head

    dist.destroy_process_group()
    found = []
    for hf, sizes, gpus, place in cases:
        shape = family_of(hf)[1]
        shape = with_value_head(shape) if sizes.get("value_head") else shape
        outer = sizes.get("outer", False)
        layout = parallel(
            tensor=sizes["tp"], pipeline=sizes["pp"], expert=sizes["ep"], expert_tensor=sizes.get("etp", 1),
            virtual_pipeline=sizes.get("vp"), embedding_as_layer=outer, loss_as_layer=outer,
        )  # fmt: skip
        with simulated_rank(layout, gpus, place) as groups:
            chunks = meta_model(shape, layout, model_config(dtype="bfloat16"), groups)
            stage = groups.pp.rank()
        for number, chunk in enumerate(chunks):
            real = [parameter.numel() for parameter in chunk.parameters()]
            ours = [part.count for part in chunk_parameters(shape, layout, stage, number)]
            if real != ours:
                found.append(f"{shape.model_type} {sizes} rank {place} chunk {number}: {real} is not {ours}")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return found


def test_megatron_registers_the_same_tensors_in_the_same_order() -> None:
    """Compared with its modules on the meta device: one rank of a real model in a layout of 64 ranks, and Qwen2-MoE."""
    from transformers import Qwen2MoeConfig

    from megatron_gspo.models import read_config

    shared = Qwen2MoeConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96,
        moe_intermediate_size=32, shared_expert_intermediate_size=64, num_experts=8, num_experts_per_tok=2,
        vocab_size=129, decoder_sparse_step=1,
    ).to_dict()  # fmt: skip
    cases = [
        (read_config(SMALL), dict(tp=2, pp=4, ep=8, vp=3), 64, 63),
        (read_config(LARGE), dict(tp=4, pp=2, ep=32, etp=2), 128, 0),
        *[(read_config(LARGE), dict(tp=4, pp=8, ep=16, vp=2, outer=True), 128, place) for place in (0, 63, 127)],
        (shared, dict(tp=2, pp=1, ep=2), 4, 1),
        *[(hf, dict(tp=2, pp=2, ep=2, value_head=True), 8, place)
          for hf in (read_config(SMALL), {**shared, "tie_word_embeddings": True}) for place in (0, 7)],
    ]
    cases += [(tiny_config(kind).to_dict(), dict(tp=2, pp=2, ep=2, vp=2), 4, 3)
              for kind in ("deepseek", "moonlight", "glm_lite", "glm", "next", "minimax", "gpt_oss", "qwen35_moe")]
    cases += [(tiny_config("qwen35").to_dict(), dict(tp=2, pp=2, ep=1, vp=2), 4, 3)]
    assert run_distributed(_same_as_megatron, 1, cases) == [[]]
