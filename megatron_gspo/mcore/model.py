"""Build a Megatron ``GPTModel`` from the sizes of a Hugging Face model."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_gspo.mcore.layers import block_spec, transformer_engine_available, use_own_operators
from megatron_gspo.mcore.process_groups import Groups, Layout
from megatron_gspo.mcore.routing_replay.router_hooks import attach_router_hooks
from megatron_gspo.models.model_shape import ModelShape, padded_vocab_size
from megatron_gspo.patches import expert_gradients


@dataclass(frozen=True)
class ModelSettings:
    """How to build the model; what it is comes from its ``ModelShape``.

    ``implementation``: ``auto`` (Transformer Engine if installed), ``transformer_engine`` or ``torch``.
    ``recompute``: ``none``, ``selective`` (attention core) or ``full`` (``recompute_num_layers`` layers at a time).
    ``dispatcher``: Megatron's ``moe_token_dispatcher_type``, ``alltoall`` or ``allgather``.
    """

    dtype: torch.dtype = torch.float32
    implementation: str = "auto"
    recompute: str = "none"
    recompute_num_layers: int = 1
    dispatcher: str = "alltoall"
    sequence_parallel: bool | None = None


def _moe(shape: ModelShape, layout: Layout, settings: ModelSettings, engine: bool) -> dict[str, Any]:
    return dict(
        num_moe_experts=shape.num_experts,
        moe_router_topk=shape.experts_per_token,
        moe_ffn_hidden_size=shape.moe_ffn_hidden_size,
        moe_layer_freq=[int(is_moe) for is_moe in shape.moe_layers],
        # softmax over the chosen experts equals softmax over all, then normalised; without normalisation it comes first
        moe_router_pre_softmax=not shape.normalize_topk,
        moe_router_score_function="softmax",
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",  # an auxiliary loss would be an objective that RL didn't ask for
        moe_aux_loss_coeff=0.0,
        moe_token_dispatcher_type=settings.dispatcher,
        moe_grouped_gemm=engine,
        moe_shared_expert_intermediate_size=shape.shared_expert_size or None,
        moe_shared_expert_gate=bool(shape.shared_expert_size),
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
    )


def transformer_config(shape: ModelShape, layout: Layout, settings: ModelSettings) -> TransformerConfig:
    """Megatron's config for this model in this layout; keywords that the installed version lacks are left out."""
    engine = use_transformer_engine(settings)
    sequence_parallel = layout.tensor > 1 if settings.sequence_parallel is None else settings.sequence_parallel
    keywords: dict[str, Any] = dict(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_query_groups,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn_hidden_size,
        normalization="RMSNorm",
        layernorm_epsilon=shape.rms_norm_eps,
        qk_layernorm=shape.query_key_norms,
        add_qkv_bias=shape.attention_bias,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=settings.dtype,
        pipeline_dtype=settings.dtype,
        bf16=settings.dtype == torch.bfloat16,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline,
        account_for_embedding_in_pipeline_split=layout.embedding_as_layer,
        account_for_loss_in_pipeline_split=layout.loss_as_layer,
        context_parallel_size=layout.context,
        sequence_parallel=sequence_parallel,
        use_cpu_initialization=not torch.cuda.is_available() or _on_meta_device(),
        perform_initialization=True,
        # fused kernels: Transformer Engine's only; the torch ones would be compiled on first use
        bias_activation_fusion=engine,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=engine,
        gradient_accumulation_fusion=False,
        async_tensor_model_parallel_allreduce=False,
        # a sent tensor may not be freed before the send is done, which gloo, and before megatron-core 0.18 the
        # interleaved schedule, don't wait for
        deallocate_pipeline_outputs=torch.cuda.is_available() and layout.virtual_pipeline is None,
        # a batched exchange mixes up the two directions when both neighbours are the same rank (2 interleaved stages)
        overlap_p2p_comm=layout.virtual_pipeline is not None,
        batch_p2p_comm=layout.virtual_pipeline is None,
    )
    if shape.is_moe:
        keywords |= _moe(shape, layout, settings, engine)
    if settings.recompute == "selective":
        keywords |= dict(recompute_granularity="selective")
    elif settings.recompute == "full":
        keywords |= dict(recompute_granularity="full", recompute_method="uniform",
                         recompute_num_layers=settings.recompute_num_layers)
    known = inspect.signature(TransformerConfig.__init__).parameters
    return TransformerConfig(**{key: value for key, value in keywords.items() if key in known})


def use_transformer_engine(settings: ModelSettings) -> bool:
    """Resolve ``settings.implementation``; asking for Transformer Engine where it is absent raises ``ValueError``."""
    if settings.implementation == "transformer_engine" and not transformer_engine_available():
        raise ValueError("model.implementation=transformer_engine: not installed, or no CUDA device; use 'torch'")
    return settings.implementation != "torch" and transformer_engine_available()


def _on_meta_device() -> bool:
    """Whether models are built without memory (`mcore/meta_device.py`)."""
    return torch.get_default_device().type == "meta"


def build_model(shape: ModelShape, layout: Layout, settings: ModelSettings, groups: Groups) -> list[GPTModel]:
    """This rank's model chunks: one, or ``layout.virtual_pipeline`` under the interleaved schedule."""
    config = transformer_config(shape, layout, settings)
    engine = use_transformer_engine(settings)
    chunks = []
    stages = layout.virtual_pipeline or 1
    for stage in range(stages):
        vp_stage = stage if layout.virtual_pipeline else None
        chunk = GPTModel(
            config,
            block_spec(config, transformer_engine=engine, vp_stage=vp_stage),
            vocab_size=padded_vocab_size(shape, layout.tensor),
            max_sequence_length=shape.max_position_embeddings,
            pre_process=groups.pp.rank() == 0 and stage == 0,
            post_process=groups.is_last_stage and stage == stages - 1,
            position_embedding_type="rope" if engine else "none",  # PackedAttention applies it
            rotary_base=shape.rope_theta,
            share_embeddings_and_output_weights=shape.tied_embeddings,
            vp_stage=vp_stage,
        )
        if not engine:
            use_own_operators(chunk, shape.rope_theta)
        if shape.is_moe:
            attach_router_hooks(chunk)
        expert_gradients.apply(chunk, config)
        if torch.cuda.is_available() and not _on_meta_device():
            chunk.cuda()
        if settings.dtype != torch.float32:
            chunk.to(settings.dtype)
        chunks.append(chunk)
    return chunks
