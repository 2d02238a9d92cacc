"""Build a Megatron ``GPTModel`` from the sizes of a Hugging Face model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_gspo.config import ModelConfig, ParallelConfig
from megatron_gspo.mcore.embedding import use_row_gradients
from megatron_gspo.mcore.expert_bias import set_up_expert_bias
from megatron_gspo.mcore.gated_units import squared_relu
from megatron_gspo.mcore.indexer import keep_norms_wide
from megatron_gspo.mcore.layers import (
    block_spec,
    transformer_engine_available,
    use_own_operators,
)
from megatron_gspo.mcore.megatron_options import MegatronOptions, construct, rejections
from megatron_gspo.mcore.mixers import mixer_options, mixers_of
from megatron_gspo.mcore.process_groups import ProcessGroups
from megatron_gspo.mcore.router import use_exact_routers
from megatron_gspo.mcore.routing_replay.router_hooks import attach_router_hooks
from megatron_gspo.mcore.token_dispatchers import use_own_dispatchers
from megatron_gspo.mcore.value_head import ValueHead
from megatron_gspo.models.model_shape import ModelShape, padded_vocab_size
from megatron_gspo.patches import expert_gradients


def _moe(
    shape: ModelShape, parallel: ParallelConfig, engine: bool, update_rate: float
) -> dict[str, object]:
    router = shape.router
    return dict(
        num_moe_experts=shape.num_experts,
        moe_router_topk=shape.experts_per_token,
        moe_ffn_hidden_size=shape.moe_ffn_hidden_size,
        moe_layer_freq=[int(is_moe) for is_moe in shape.moe_layers],
        # softmax over the chosen experts equals softmax over all, then normalised; without
        # normalisation it comes first
        moe_router_pre_softmax=router.score == "softmax" and not router.normalize,
        moe_router_score_function=router.score,
        moe_router_enable_expert_bias=router.expert_bias,
        moe_router_bias_update_rate=update_rate,
        moe_router_num_groups=router.groups if router.groups > 1 else None,
        moe_router_group_topk=router.chosen_groups if router.groups > 1 else None,
        moe_router_topk_scaling_factor=router.scaling if router.scaling != 1 else None,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",  # an auxiliary loss would add a term to the objective
        moe_aux_loss_coeff=0.0,
        moe_token_dispatcher_type=parallel.moe_token_dispatcher_type,
        moe_grouped_gemm=engine,
        moe_shared_expert_intermediate_size=shape.shared_expert_size or None,
        moe_shared_expert_gate=shape.shared_expert_gate,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=parallel.expert_tensor_size,
    )


def transformer_config(
    shape: ModelShape,
    parallel: ParallelConfig,
    model: ModelConfig,
    options: MegatronOptions = MegatronOptions(),
) -> TransformerConfig:
    """Megatron's config of this model.

    ``options`` of the user win over values that no config key sets.
    """
    engine = use_transformer_engine(model, shape)
    keywords = _layers(shape, engine) | mixer_options(shape) | _layout(parallel) | _precision(model)
    if shape.is_moe:
        keywords |= _moe(shape, parallel, engine, model.expert_bias_update_rate)
    if model.recompute_granularity == "selective":
        keywords |= dict(recompute_granularity="selective")
    elif model.recompute_granularity == "full":
        keywords |= dict(
            recompute_granularity="full",
            recompute_method="uniform",
            recompute_num_layers=model.recompute_num_layers or 1,
        )
    config = construct(TransformerConfig, keywords, options.transformer)
    # Refused with expert-tensor parallelism: Megatron's own experts would add it on every rank.
    if shape.linear_bias:
        config.add_bias_linear = True
    if _on_meta_device():  # no values to draw: most of the time that a build takes
        config.init_method = config.output_layer_init_method = lambda weight: weight
    return config


def _layers(shape: ModelShape, engine: bool) -> dict[str, object]:
    return dict(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_attention_heads,
        ffn_hidden_size=shape.ffn_hidden_size,
        normalization="RMSNorm",
        layernorm_epsilon=shape.rms_norm_eps,
        layernorm_zero_centered_gamma=shape.zero_centred_norms,
        gated_linear_unit=not shape.squared_relu,
        activation_func=_activation(shape),
        activation_func_clamp_value=shape.glu_limit,
        glu_linear_offset=1.0 if shape.glu_limit else 0.0,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=not torch.cuda.is_available() or _on_meta_device(),
        perform_initialization=True,
        # fused kernels: Transformer Engine's only; the torch ones would be compiled on first use
        bias_activation_fusion=engine,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=engine,
        # adds without a rounding, and Transformer Engine without a kernel for each expert
        gradient_accumulation_fusion=engine,
    )


def _activation(shape: ModelShape) -> Callable[[Tensor], Tensor]:
    if shape.squared_relu:
        return squared_relu
    return quick_gelu if shape.glu_limit else torch.nn.functional.silu


def _precision(model: ModelConfig) -> dict[str, object]:
    dtype = torch_dtype(model)
    return dict(params_dtype=dtype, pipeline_dtype=dtype, bf16=dtype == torch.bfloat16)


def _layout(parallel: ParallelConfig) -> dict[str, object]:
    is_interleaved = parallel.virtual_pipeline_model_parallel_size is not None
    return dict(
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline_model_parallel_size,
        account_for_embedding_in_pipeline_split=parallel.account_for_embedding_in_pipeline_split,
        account_for_loss_in_pipeline_split=parallel.account_for_loss_in_pipeline_split,
        context_parallel_size=parallel.context_parallel_size,
        sequence_parallel=parallel.use_sequence_parallel,
        # a tensor may be freed only after its send has completed; gloo, and the interleaved
        # schedule before megatron-core 0.18, do not wait for that
        deallocate_pipeline_outputs=torch.cuda.is_available() and not is_interleaved,
        # a batched exchange mixes up the two directions when both neighbours are the same rank (2
        # interleaved stages)
        overlap_p2p_comm=is_interleaved,
        batch_p2p_comm=not is_interleaved,
    )


def torch_dtype(model: ModelConfig) -> torch.dtype:
    """``model.dtype`` of the config."""
    return getattr(torch, model.dtype)


def use_transformer_engine(model: ModelConfig, shape: ModelShape) -> bool:
    """Resolve ``model.implementation``; raises ``ValueError`` where Transformer Engine is required
    and absent, or where a mixer of the model has torch layers only."""
    if not all(mixer.transformer_engine for mixer in mixers_of(shape)):
        if model.implementation == "transformer_engine":
            mixers = ", ".join(dict.fromkeys(shape.mixers))
            raise ValueError(
                f"model.implementation=transformer_engine: {mixers} has torch layers only; use"
                " 'torch'"
            )
        return False
    if model.implementation == "transformer_engine" and not transformer_engine_available():
        raise ValueError(
            "model.implementation=transformer_engine: not installed, or no CUDA device; use 'torch'"
        )
    return model.implementation != "torch" and transformer_engine_available()


def _on_meta_device() -> bool:
    """Whether models are built without memory (`mcore/meta_device.py`)."""
    return torch.get_default_device().type == "meta"


def build_model(
    shape: ModelShape,
    parallel: ParallelConfig,
    model: ModelConfig,
    groups: ProcessGroups,
    options: MegatronOptions = MegatronOptions(),
) -> list[GPTModel]:
    """This rank's model chunks: one, or several under the interleaved pipeline schedule."""
    config = transformer_config(shape, parallel, model, options)
    engine = use_transformer_engine(model, shape)
    chunks = []
    virtual = parallel.virtual_pipeline_model_parallel_size
    stages = virtual or 1
    for stage in range(stages):
        vp_stage = stage if virtual else None
        with rejections("GPTModel", options.transformer):
            chunk = GPTModel(
                config,
                block_spec(config, shape, transformer_engine=engine, vp_stage=vp_stage),
                vocab_size=padded_vocab_size(shape, parallel.tensor_model_parallel_size),
                max_sequence_length=shape.max_position_embeddings,
                pre_process=groups.pp.rank() == 0 and stage == 0,
                post_process=groups.is_last_stage and stage == stages - 1,
                position_embedding_type="rope" if engine else "none",  # PackedAttention applies it
                rotary_base=shape.rotary.base,
                share_embeddings_and_output_weights=shape.tied_embeddings,
                vp_stage=vp_stage,
            )
        if shape.value_head and chunk.post_process:
            chunk.output_layer = ValueHead(config)
        use_row_gradients(chunk)
        use_own_dispatchers(chunk)
        use_exact_routers(chunk)
        if not engine:
            use_own_operators(chunk, shape)
        if shape.is_moe:
            attach_router_hooks(chunk)
        expert_gradients.mark_experts(chunk, config)  # adapters copy the marks
        if torch.cuda.is_available() and not _on_meta_device():
            chunk.cuda()
        if torch_dtype(model) != torch.float32:
            chunk.to(torch_dtype(model))
            keep_norms_wide(chunk)
        chunks.append(chunk)
    set_up_expert_bias(chunks, config)
    return chunks
