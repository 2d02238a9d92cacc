"""The Megatron model that a Hugging Face config becomes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_gspo.mcore.model import build_model, transformer_config
from megatron_gspo.models import family_of
from tests.support.configs import model_config, parallel
from tests.support.distributed import run_distributed
from tests.support.parallel_groups import groups_of
from tests.support.tiny_models import tiny_config


def shape_of(kind: str = "moe", **overrides: object) -> Any:
    return family_of(tiny_config(kind, **overrides).to_dict())[1]


def test_reinforcement_learning_sets_the_router():
    config = transformer_config(shape_of(), parallel(), model_config())
    assert config.moe_router_load_balancing_type == "none" and config.moe_aux_loss_coeff == 0.0
    assert config.moe_router_dtype == "fp32" and config.moe_router_score_function == "softmax"
    assert config.moe_expert_capacity_factor is None, "dropless"
    assert (config.num_moe_experts, config.moe_router_topk, config.moe_ffn_hidden_size) == (
        8,
        2,
        16,
    )
    assert not config.calculate_per_token_loss
    assert config.hidden_dropout == config.attention_dropout == 0.0


def test_sent_tensors_are_freed_only_where_the_schedule_waits_for_the_send(monkeypatch):
    settings = model_config(implementation="torch")
    plain = parallel(pipeline=2)
    interleaved = parallel(pipeline=2, virtual_pipeline=2)
    for cuda, layout, freed in [
        (False, plain, False),
        (True, plain, True),
        (True, interleaved, False),
    ]:
        monkeypatch.setattr(torch.cuda, "is_available", lambda cuda=cuda: cuda)
        assert (
            transformer_config(shape_of("dense"), layout, settings).deallocate_pipeline_outputs
            is freed
        )


@pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA the setting may be possible")
def test_transformer_engine_is_refused_where_it_is_absent():
    with pytest.raises(ValueError, match="model.implementation=transformer_engine"):
        transformer_config(
            shape_of(), parallel(), model_config(implementation="transformer_engine")
        )


def test_latent_attention_has_torch_layers_only():
    with pytest.raises(ValueError, match="latent_attention has torch layers only; use 'torch'"):
        transformer_config(
            shape_of("deepseek"), parallel(), model_config(implementation="transformer_engine")
        )


def refused(rank: int, world_size: int) -> None:
    layout = parallel(tensor=2, sequence_parallel=False)
    with pytest.raises(ValueError, match="needs sequence parallelism|sequence parallel"):
        build_model(shape_of("deepseek"), layout, model_config(), groups_of(layout))


def test_latent_attention_needs_sequence_parallelism_under_tensor_parallelism():
    run_distributed(refused, 2)
