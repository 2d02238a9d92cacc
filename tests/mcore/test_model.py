"""The Megatron model that a Hugging Face config becomes, and the forward steps around it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_gspo.mcore.model import transformer_config
from megatron_gspo.models import family_of
from megatron_gspo.models.model_shape import padded_vocab_size
from tests.support.configs import model_config, parallel
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


@pytest.mark.parametrize("normalised", [True, False])
def test_softmax_comes_before_the_choice_where_its_values_are_not_normalised(normalised):
    config = transformer_config(shape_of(norm_topk_prob=normalised), parallel(), model_config())
    assert config.moe_router_pre_softmax is not normalised


def test_layers_without_experts_are_dense():
    config = transformer_config(
        shape_of(mlp_only_layers=[1], decoder_sparse_step=1), parallel(), model_config()
    )
    assert config.moe_layer_freq == [1, 0, 1, 1]
    assert transformer_config(shape_of("dense"), parallel(), model_config()).num_moe_experts is None


def test_recompute_settings():
    def config(**settings: Any) -> Any:
        return transformer_config(shape_of(), parallel(), model_config(**settings))

    assert config().recompute_granularity is None
    assert config(recompute_granularity="selective").recompute_granularity == "selective"
    full = config(recompute_granularity="full", recompute_num_layers=2)
    assert (full.recompute_granularity, full.recompute_method, full.recompute_num_layers) == (
        "full",
        "uniform",
        2,
    )


def test_sequence_parallelism_follows_tensor_parallelism_unless_told():
    dense = shape_of("dense")
    assert transformer_config(dense, parallel(tensor=2), model_config()).sequence_parallel
    assert not transformer_config(dense, parallel(), model_config()).sequence_parallel
    assert not transformer_config(
        dense, parallel(tensor=2, sequence_parallel=False), model_config()
    ).sequence_parallel


def test_precision():
    config = transformer_config(shape_of(), parallel(), model_config(dtype="bfloat16"))
    assert config.bf16 and config.params_dtype == config.pipeline_dtype == torch.bfloat16
    assert config.moe_router_dtype == "fp32"


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


def test_vocabulary_is_padded_to_the_tensor_parallel_size():
    assert [padded_vocab_size(shape_of(vocab_size=95), size) for size in (1, 2, 3, 8)] == [
        95,
        96,
        96,
        96,
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA the setting may be possible")
def test_transformer_engine_is_refused_where_it_is_absent():
    with pytest.raises(ValueError, match="model.implementation=transformer_engine"):
        transformer_config(
            shape_of(), parallel(), model_config(implementation="transformer_engine")
        )
