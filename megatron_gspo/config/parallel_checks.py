"""Checks of the parallel sizes against each other, the processes and the model.

Each raises ConfigError.
"""

from __future__ import annotations

from megatron_gspo.config.config_error import ConfigError
from megatron_gspo.config.model_sections import ParallelConfig
from megatron_gspo.models.config_defaults import HFConfig
from megatron_gspo.models.model_shape import experts_of, layers_of


def check_parallel(parallel: ParallelConfig) -> None:
    """Keys that need another one have it."""
    virtual = parallel.virtual_pipeline_model_parallel_size
    if virtual is not None and parallel.pipeline_model_parallel_size == 1:
        fix = "set parallel.pipeline_model_parallel_size above 1, or this to null"
        raise ConfigError(
            "parallel.virtual_pipeline_model_parallel_size", virtual, "needs a pipeline", fix
        )
    if parallel.sequence_parallel and parallel.tensor_model_parallel_size == 1:
        problem = "splits tokens between tensor-parallel ranks and there is one"
        raise ConfigError("parallel.sequence_parallel", True, problem, "set it to null")
    if parallel.overlap_param_gather:
        for key in ("use_distributed_optimizer", "overlap_grad_reduce"):
            if not getattr(parallel, key):
                fix = f"set parallel.{key}: true, or this to false"
                raise ConfigError(
                    "parallel.overlap_param_gather", True, f"needs parallel.{key}", fix
                )


def check_layout(parallel: ParallelConfig, world_size: int) -> None:
    """Dense (TP x PP x CP) and expert (ETP x EP x PP) ranks each divide world_size."""
    tensor = parallel.tensor_model_parallel_size
    pipeline = parallel.pipeline_model_parallel_size
    dense = (tensor, pipeline, parallel.context_parallel_size)
    if fault := _remainder("TP x PP x CP", dense, world_size):
        fix = f"start a multiple of {parallel.model_parallel_size} processes or lower a size"
        raise ConfigError("parallel.tensor_model_parallel_size", tensor, fault, fix)
    expert_tensor = parallel.expert_tensor_size
    expert = parallel.expert_model_parallel_size
    if fault := _remainder("ETP x EP x PP", (expert_tensor, expert, pipeline), world_size):
        fix = "lower EP or ETP"
        if expert_tensor == 1:
            fix = f"set a divisor of {world_size // pipeline}"
        raise ConfigError("parallel.expert_model_parallel_size", expert, fault, fix)


def _remainder(names: str, sizes: tuple[int, int, int], world_size: int) -> str | None:
    product = sizes[0] * sizes[1] * sizes[2]
    shown = f"{names} = {' x '.join(map(str, sizes))} = {product}"
    return f"{shown} does not divide {world_size} processes" if world_size % product else None


def check_divisibility(parallel: ParallelConfig, hf: HFConfig) -> None:
    """Heads, key-value groups, widths, layers and experts of a config.json are divisible by the
    parallel sizes.
    """
    tensor = parallel.tensor_model_parallel_size
    pipeline = parallel.pipeline_model_parallel_size
    experts = experts_of(hf) or 0
    has_dense = (
        not experts
        or any(hf.get(key) for key in ("first_k_dense_replace", "mlp_layer_types"))
        or "mlp" in (hf.get("layers_block_type") or ())
        or "-" in (hf.get("hybrid_override_pattern") or ())
    )
    for key in ("num_attention_heads", "num_key_value_heads") + (
        ("intermediate_size",) if has_dense else ()
    ):
        _divides("tensor_model_parallel_size", tensor, key, hf.get(key))
    # Under context parallelism the ranks exchange heads, or groups of them, for tokens.
    for key in ("linear_num_key_heads", "n_groups"):
        if heads := hf.get(key):
            _divides("tensor_model_parallel_size", tensor, key, heads)
            context = parallel.context_parallel_size
            _divides("context_parallel_size", context, f"{key} / {tensor} (TP)", heads // tensor)
    virtual = parallel.virtual_pipeline_model_parallel_size
    extra = parallel.extra_pipeline_layers
    layers = layers_of(hf)
    layers = None if layers is None else layers + extra
    _divides(
        "pipeline_model_parallel_size",
        pipeline,
        f"num_hidden_layers{f' + {extra}' if extra else ''}",
        layers,
    )
    if virtual is not None:
        layers = (layers or 0) // pipeline
        _divides(
            "virtual_pipeline_model_parallel_size", virtual, "layers of a pipeline stage", layers
        )
    if experts:
        _check_experts(parallel, hf, experts)
        return
    for name in ("expert_model_parallel_size", "expert_tensor_parallel_size"):
        if (value := getattr(parallel, name) or 1) > 1:
            raise ConfigError(f"parallel.{name}", value, "the model has no experts", "set it to 1")


def _check_experts(parallel: ParallelConfig, hf: HFConfig, experts: int) -> None:
    tensor = parallel.tensor_model_parallel_size
    _divides(
        "expert_model_parallel_size", parallel.expert_model_parallel_size, "num_experts", experts
    )
    width = hf.get("moe_intermediate_size", hf.get("intermediate_size"))  # gpt-oss has no other
    _divides(
        "expert_tensor_parallel_size", parallel.expert_tensor_size, "moe_intermediate_size", width
    )
    for key in ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"):
        _divides("tensor_model_parallel_size", tensor, key, hf.get(key))
    if width is not None and (number := hf.get("n_shared_experts")):
        _divides(
            "tensor_model_parallel_size",
            tensor,
            "n_shared_experts x moe_intermediate_size",
            number * width,
        )
    if tensor > 1 and not parallel.use_sequence_parallel:
        problem = "a mixture of experts with tensor parallelism needs it"
        raise ConfigError("parallel.sequence_parallel", False, problem, "set it to null or true")


def _divides(name: str, size: int, quantity: str, amount: int | None) -> None:
    if amount is not None and amount % size:
        divisors = [d for d in range(1, amount + 1) if amount % d == 0]
        fix = f"set one of {', '.join(map(str, divisors[:8]))}"
        raise ConfigError(
            f"parallel.{name}", size, f"does not divide the model's {quantity} = {amount}", fix
        )
