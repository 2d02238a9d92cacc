"""Tables of the Megatron options that the ``megatron`` section may not set: the key that sets each,
or the reason.

An option that is in no table and no refused family is passed through.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_PARALLEL_KEYS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "sequence_parallel",
    "moe_token_dispatcher_type",
    "use_distributed_optimizer",
    "overlap_grad_reduce",
    "overlap_param_gather",
)
_OPTIMIZER_KEYS = (
    "lr",
    "min_lr",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_eps",
    "clip_grad",
)
_MODEL_SHAPE = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "ffn_hidden_size",
    "normalization",
    "layernorm_epsilon",
    "qk_layernorm",
    "add_qkv_bias",
    "gated_linear_unit",
    "activation_func",
    "add_bias_linear",
    "num_moe_experts",
    "moe_router_topk",
    "moe_ffn_hidden_size",
    "moe_layer_freq",
    "moe_router_pre_softmax",
    "moe_router_score_function",
    "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate",
)
# option -> the key that sets it
_SET_BY = {
    **{name: f"parallel.{name}" for name in _PARALLEL_KEYS},
    **{name: f"optimizer.{name}" for name in _OPTIMIZER_KEYS},
    **dict.fromkeys(_MODEL_SHAPE, "model.path"),
    **dict.fromkeys(("params_dtype", "pipeline_dtype", "bf16"), "model.dtype"),
    **dict.fromkeys(("recompute_granularity", "recompute_method"), "model.recompute_granularity"),
    "recompute_num_layers": "model.recompute_num_layers",
    "optimizer": "optimizer.function",
    **dict.fromkeys(("transformer_impl", "moe_grouped_gemm"), "model.implementation"),
    "moe_enable_routing_replay": "routing.replay",
    "timers": "tracking.detailed_timers",
    "moe_router_bias_update_rate": "model.expert_bias_update_rate",
}

_DROPOUT = (
    "makes the log-probs of one policy random, so that ratios are not 1 before the first update"
)
_CAPACITY = "drops tokens by the load of their batch, so that log-probs depend on other samples"
_OBJECTIVE = "adds a term to the objective"
_ROUTING = "makes routers choose experts at random or by force"
_OTHER_MODEL = "changes the model that config.json describes"
_NAMES = "changes parameters that are mapped to Hugging Face tensors"
_GRAPH = "replays fixed shapes, and packed micro-batches vary in length"
_SCHEDULE = (
    "needs a forward step that returns a schedule plan, or its own backward pass for weights"
)
_SOFTMAX = "has no effect: packed attention computes its own softmax"
_LOSS = (
    "has no effect: log-probs are computed from hidden states without Megatron's output layer and"
    " loss"
)
_LOW_PRECISION = (
    "scales tensors by earlier batches, which neither old log-probs nor a resumed run reproduce"
)
_EXCHANGE = "is chosen by the pipeline schedule; another value corrupts or deadlocks the exchange"
_FSDP = "needs FSDP; the policy is wrapped by DistributedDataParallel"
_DEVICE = "is chosen by the device that the model is built on"

# option -> (harmless values, why any other is refused)
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    **dict.fromkeys(("hidden_dropout", "attention_dropout"), ((0.0,), _DROPOUT)),
    **dict.fromkeys(
        ("moe_expert_capacity_factor", "moe_expert_rank_capacity_factor"), ((None,), _CAPACITY)
    ),
    **dict.fromkeys(
        ("moe_pad_expert_input_to_capacity", "moe_token_dropping"), ((False,), _CAPACITY)
    ),
    "moe_token_drop_policy": ((), _CAPACITY),
    "moe_aux_loss_coeff": ((0.0,), _OBJECTIVE),
    "moe_z_loss_coeff": ((None, 0.0), _OBJECTIVE),
    "moe_router_load_balancing_type": (("none",), _OBJECTIVE),
    "moe_router_enable_expert_bias": ((False,), "updates the routers outside of the optimizer"),
    "calculate_per_token_loss": (
        (False,),
        "divides the loss again, which is normalized by the global batch",
    ),
    **dict.fromkeys(("moe_input_jitter_eps", "moe_router_force_biased"), ((None,), _ROUTING)),
    "moe_router_force_load_balancing": ((False,), _ROUTING),
    "moe_router_dtype": (
        ("fp32", "fp64"),
        "rounds router logits, which flips routes between engines",
    ),
    **dict.fromkeys(("enable_cuda_graph", "external_cuda_graph"), ((False,), _GRAPH)),
    **dict.fromkeys(("cuda_graph_scope", "cuda_graph_modules"), ((), _GRAPH)),
    "cuda_graph_impl": (("none",), _GRAPH),
    "optimizer_cuda_graph": ((False,), _GRAPH),
    **dict.fromkeys(
        (
            "overlap_moe_expert_parallel_comm",
            "delay_wgrad_compute",
            "overlap_dispatch_backward_with_experts_wgrad",
            "ep_overlap_early_attn_memory_release",
        ),
        ((False,), _SCHEDULE),
    ),
    "num_microbatches_with_partial_activation_checkpoints": ((None,), _SCHEDULE),
    **dict.fromkeys(
        ("cross_entropy_loss_fusion", "defer_embedding_wgrad_compute"), ((False,), _LOSS)
    ),
    **dict.fromkeys(("cross_entropy_fusion_impl", "wgrad_deferral_limit"), ((), _LOSS)),
    **dict.fromkeys(("fp8", "fp4"), ((None,), _LOW_PRECISION)),
    **dict.fromkeys(
        ("fp8_param", "fp4_param", "fp8_param_gather", "fp4_param_gather"),
        ((False,), _LOW_PRECISION),
    ),
    **dict.fromkeys(
        ("fp16", "enable_autocast"),
        ((False,), "is not supported; model.dtype is float32 or bfloat16"),
    ),
    **dict.fromkeys(("overlap_p2p_comm", "batch_p2p_comm"), ((), _EXCHANGE)),
    "deallocate_pipeline_outputs": (
        (False,),
        "is chosen by the device and schedule; freeing early corrupts a send",
    ),
    "masked_softmax_fusion": ((False,), _SOFTMAX),
    "use_cpu_initialization": ((), _DEVICE),
    "init_model_with_meta_device": ((False,), _DEVICE),
    "perform_initialization": ((True,), "leaves model.init: random without values"),
    "tp_comm_overlap": ((False,), "needs buffers of one fixed sequence length"),
    "hybrid_context_parallel": ((False,), "divides sequences otherwise than packing does"),
    "hierarchical_context_parallel_sizes": ((None,), "needs process groups that are not created"),
    "num_distributed_optimizer_instances": ((1,), "needs process groups that are not created"),
    "max_seqlen_per_dp_cp_rank": ((None,), "divides sequences otherwise than packing does"),
    **dict.fromkeys(
        ("use_precision_aware_optimizer", "optimizer_cpu_offload"),
        ((False,), "keeps state that checkpoints lack"),
    ),
    **dict.fromkeys(
        ("moe_use_legacy_grouped_gemm", "moe_single_grouped_weight", "moe_single_grouped_bias"),
        ((False,), _NAMES),
    ),
    **dict.fromkeys(
        (
            "moe_mlp_glu_interleave_size",
            "moe_shared_expert_glu_interleave_size",
            "tensor_parallel_num_weight_shards",
            "expert_tensor_parallel_num_weight_shards",
        ),
        ((None,), _NAMES),
    ),
    **dict.fromkeys(("gtp_weight_remat_size", "expert_gtp_weight_remat_size"), ((1,), _NAMES)),
    **dict.fromkeys(
        (
            "apply_residual_connection_post_layernorm",
            "layernorm_zero_centered_gamma",
            "rotary_interleaved",
            "qk_l2_norm",
            "qk_clip",
            "attention_output_gate",
            "multi_latent_attention",
            "heterogeneous_block_specs",
            "is_hybrid_model",
            "moe_apply_probs_on_input",
            "use_mup",
        ),
        ((False,), _OTHER_MODEL),
    ),
    **dict.fromkeys(
        (
            "softmax_scale",
            "window_size",
            "window_attn_skip_freq",
            "no_rope_freq",
            "activation_func_clamp_value",
            "experimental_attention_variant",
            "moe_latent_size",
            "mrope_section",
            "mtp_num_layers",
            "moe_router_topk_scaling_factor",
            "moe_router_num_groups",
            "moe_router_group_topk",
            "moe_router_topk_limited_devices",
            "linear_attention_freq",
        ),
        ((None,), _OTHER_MODEL),
    ),
    "softmax_type": (("vanilla",), _OTHER_MODEL),
    "glu_linear_offset": ((0.0,), _OTHER_MODEL),
    **dict.fromkeys(("use_megatron_fsdp", "use_custom_fsdp"), ((False,), _FSDP)),
    **dict.fromkeys(
        ("data_parallel_sharding_strategy", "outer_dp_sharding_strategy"), (("no_shard",), _FSDP)
    ),
}
_REFUSED_FAMILIES = {
    **dict.fromkeys(("fsdp_", "megatron_fsdp_"), _FSDP),
    **dict.fromkeys(("mamba_", "linear_", "dsa_", "mup_", "mtp_"), _OTHER_MODEL),
}


# option -> whether a value makes a router choose without the hooks of routing replay and routing
# metrics
_BYPASSES_HOOKS: dict[str, Callable[[Any], bool]] = {
    "moe_router_fusion": bool,
    "moe_layer_recompute": bool,
    "recompute_modules": lambda modules: "moe" in (modules or ()),
}


# options whose kernels Transformer Engine has; without it Megatron fails at the first use, or with
# a text of its own
_NEEDS_TRANSFORMER_ENGINE = ("moe_permute_fusion", "moe_router_fusion")


def key_that_sets(name: str) -> str | None:
    """The config key that sets a Megatron option, or None."""
    return _SET_BY.get(name)


def reason_to_refuse(name: str, value: object) -> str | None:
    """Why an option may not have this value, or None where it may."""
    if name in _REFUSED:
        harmless, reason = _REFUSED[name]
        return (
            None
            if any(value == item and type(value) is not bool or value is item for item in harmless)
            else reason
        )
    return next(
        (reason for start, reason in _REFUSED_FAMILIES.items() if name.startswith(start)), None
    )


def bypasses_router_hooks(name: str, value: object) -> bool:
    """Whether an option with this value is refused where routes are replayed or measured."""
    return name in _BYPASSES_HOOKS and _BYPASSES_HOOKS[name](value)


def needs_transformer_engine(name: str, value: object) -> bool:
    """Whether an option with this value uses kernels of Transformer Engine."""
    return name in _NEEDS_TRANSFORMER_ENGINE and bool(value)


def refused_names() -> set[str]:
    """Every option that is named in a table."""
    return set(_SET_BY) | set(_REFUSED) | set(_BYPASSES_HOOKS) | set(_NEEDS_TRANSFORMER_ENGINE)
