"""GPT models of the unmodified megatron-core package, with its own layers without Transformer
Engine."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_gspo.config import ParallelConfig

_COMMON: dict[str, Any] = dict(
    num_layers=4,
    hidden_size=32,
    num_attention_heads=4,
    ffn_hidden_size=48,
    gated_linear_unit=True,
    activation_func=torch.nn.functional.silu,
    add_bias_linear=False,
    bias_activation_fusion=False,
    normalization="RMSNorm",
    qk_layernorm=True,
    use_cpu_initialization=True,
    gradient_accumulation_fusion=False,
    pipeline_dtype=torch.float32,
)
_GROUPED = _COMMON | dict(num_query_groups=2, kv_channels=16)
_EXPERTS: dict[str, Any] = dict(
    num_moe_experts=8,
    moe_ffn_hidden_size=16,
    moe_router_topk=2,
    moe_token_dispatcher_type="alltoall",
)
# By the kinds of `tiny_models.py`: `moe_layer_freq` as a number and as a list, which number the
# layers of a checkpoint otherwise.
_OPTIONS: dict[str, tuple[type[TransformerConfig], dict[str, Any]]] = {
    "dense": (TransformerConfig, _GROUPED),
    "moe": (TransformerConfig, _GROUPED | _EXPERTS | dict(moe_layer_freq=1)),
    "numbered": (TransformerConfig, _GROUPED | _EXPERTS | dict(moe_layer_freq=[1] * 4)),
    "deepseek": (
        MLATransformerConfig,
        _COMMON
        | _EXPERTS
        | dict(
            multi_latent_attention=True,
            q_lora_rank=24,
            kv_lora_rank=16,
            qk_head_dim=12,
            qk_pos_emb_head_dim=8,
            v_head_dim=16,
            num_moe_experts=12,
            moe_router_topk=4,
            moe_layer_freq=[0, 1, 1, 1],
            moe_shared_expert_intermediate_size=16,
            moe_router_score_function="sigmoid",
            moe_router_enable_expert_bias=True,
        ),
    ),
}


class WithoutAttention(torch.nn.Module):
    """In the place of what multiplies queries, keys and values, which has no parameters: Megatron's
    own without Transformer Engine can't be built for latent attention."""

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()


def megatron_model(kind: str, layout: ParallelConfig, *, vocabulary: int = 128) -> GPTModel:
    """This rank's part of the model, with random values everywhere."""
    config_class, options = _OPTIONS[kind]
    config = config_class(
        **options,
        tensor_model_parallel_size=layout.tensor_model_parallel_size,
        pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
        expert_model_parallel_size=layout.expert_model_parallel_size,
        expert_tensor_parallel_size=layout.expert_tensor_size,
    )
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = WithoutAttention
    # megatron-core 0.16.1 takes Transformer Engine for installed where latent attention is built.
    with mock.patch.object(multi_latent_attention, "HAVE_TE", False):
        model = GPTModel(
            config,
            spec,
            vocab_size=vocabulary,
            max_sequence_length=64,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
        )
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    with torch.no_grad():
        for value in model.state_dict(keep_vars=True).values():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                value.uniform_(-1.0, 1.0, generator=generator)
    return model
