"""Planned adapters: by hand, and against those that are attached to Megatron's own modules."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_gspo.config import LoRAConfig, ParallelConfig
from megatron_gspo.models import read_config
from megatron_gspo.tools.plan.adapters import adapter_counts, chunk_adapters, layer_adapters, total_adapters
from megatron_gspo.tools.plan.model_states import exact_states, rank_states
from megatron_gspo.tools.plan.parameters import LayerKind
from tests.support.configs import model_config, parallel
from tests.support.distributed import run_distributed
from tests.support.model_shapes import SMALL, shape_of
from tests.support.tiny_models import tiny_config

EXPERTS = LayerKind("attention", True)
EACH, SHARED = LoRAConfig(rank=8), LoRAConfig(rank=8, experts="shared")


def test_a_layer_by_hand() -> None:
    """Qwen3-30B-A3B: 32 query and 2 x 4 key and value heads of 128, hidden 2048, 128 experts of 768."""
    whole = layer_adapters(shape_of(SMALL), ParallelConfig(), EACH, EXPERTS)
    sizes = {one.name: [part.count for part in one.parameters] for one in whole[:4]}
    assert sizes == {"linear_proj": [8 * 4096, 2048 * 8], "linear_qkv": [3 * 8 * 2048, 5120 * 8],
                     "experts.0.linear_fc1": [2 * 8 * 2048, 1536 * 8],
                     "experts.0.linear_fc2": [8 * 768, 2048 * 8]}  # fmt: skip
    assert len(whole) == 2 + 2 * 128
    assert [one.gathers for one in whole[:4]] == [False, True, False, False]
    assert len(layer_adapters(shape_of(SMALL), ParallelConfig(), SHARED, EXPERTS)) == 4
    assert total_adapters(shape_of(SMALL), EACH) == 421_920_768  # docs/lora.md


def test_parts_of_a_layer_by_hand() -> None:
    lora = LoRAConfig(rank=4, targets=("k_proj", "up_proj", "gate"))
    sizes = ParallelConfig(tensor_model_parallel_size=2, expert_model_parallel_size=8, expert_tensor_parallel_size=2)
    dense, experts = adapter_counts(shape_of(SMALL), sizes, lora, EXPERTS)
    assert dense == {4 * 2048: 2, 2560 * 4: 1, 128 * 4: 1}  # A whole, half of k_proj's rows in B, all of the router's
    assert experts == {4 * 2048: 16, 768 * 4: 16}


def test_only_adapters_have_gradients_by_hand() -> None:
    """Two layers' shared adapters on one rank, all in one buffer, without its padding."""
    shape, sizes = shape_of(SMALL), ParallelConfig(use_distributed_optimizer=False)
    base = rank_states(shape, sizes, 1, 0, 2)
    found = rank_states(shape, sizes, 1, 0, 2, SHARED)
    adapters = 48 * (8 * 4096 + 2048 * 8 + 24 * 2048 + 5120 * 8 + 16 * 2048 + 1536 * 8 + 8 * 768 + 2048 * 8)
    assert (found.frozen, found.trained) == (base.weights, 2 * adapters)
    assert (found.gradients, found.optimizer) == (4 * adapters, 12 * adapters + 4 * 48 * 8)
    assert exact_states(shape, sizes, 1, 0, 2, (0, 0), SHARED) == found


def _attached(rank: int, world: int, cases: list[Any]) -> list[str]:
    import torch.distributed as dist

    from megatron_gspo.mcore.lora.attach import attach_adapters
    from megatron_gspo.mcore.meta_device import meta_model, simulated_rank
    from megatron_gspo.models import family_of

    dist.destroy_process_group()
    found = []
    for hf, lora, sizes, gpus, place in cases:
        family, shape = family_of(hf)
        layout = parallel(**sizes)
        with simulated_rank(layout, gpus, place) as groups:
            chunks = meta_model(shape, layout, model_config(dtype="bfloat16", implementation="torch"), groups)
            attach_adapters(chunks, lora, family, shape, groups)
            stage = groups.pp.rank()
        for number, chunk in enumerate(chunks):
            real = [parameter.numel() for parameter in chunk.parameters() if parameter.requires_grad]
            ours = [part.count for part in chunk_adapters(shape, layout, lora, stage, number)]
            if real != ours:
                found.append(f"{shape.model_type} {lora} {sizes} rank {place} chunk {number}: {real} is not {ours}")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return found


def test_the_same_are_attached_in_the_same_order() -> None:
    some = LoRAConfig(rank=4, targets=("v_proj", "gate_proj", "down_proj", "gate"))
    small = {**read_config(SMALL), "num_hidden_layers": 8}
    cases = [(small, lora, dict(tensor=2, pipeline=2, expert=16, expert_tensor=2, virtual_pipeline=2), 64, 63)
             for lora in (EACH, SHARED, some)]  # fmt: skip
    cases += [(tiny_config(kind).to_dict(), EACH, dict(tensor=2, expert=2), 4, 3)
              for kind in ("dense", "shared", "deepseek", "moonlight", "glm")]  # fmt: skip
    assert run_distributed(_attached, 1, cases) == [[]]


@pytest.mark.parametrize("lora", [EACH, SHARED])
def test_the_fast_states_bound_the_exact_ones(lora: LoRAConfig) -> None:
    shape, sizes = shape_of(SMALL), ParallelConfig(tensor_model_parallel_size=2, expert_model_parallel_size=8)
    fast = rank_states(shape, sizes, 16, 0, 2, lora)
    exact = exact_states(shape, sizes, 16, 0, 2, (3, 1), lora)
    assert (exact.weights, exact.gradients, exact.frozen) == (fast.weights, fast.gradients, fast.frozen)
    assert fast.optimizer == pytest.approx(exact.optimizer, rel=2e-2)
