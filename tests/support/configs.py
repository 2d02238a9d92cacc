"""Config sections for tests of `mcore`: short names for the parallel sizes, float32, no weight
decay.
"""

from __future__ import annotations

from typing import Any

from megatron_gspo.config import ModelConfig, OptimizerConfig, ParallelConfig, TrainingConfig

_SIZES = {
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "context": "context_parallel_size",
    "expert": "expert_model_parallel_size",
    "expert_tensor": "expert_tensor_parallel_size",
    "virtual_pipeline": "virtual_pipeline_model_parallel_size",
    "embedding_as_layer": "account_for_embedding_in_pipeline_split",
    "loss_as_layer": "account_for_loss_in_pipeline_split",
}


def parallel(**sizes: Any) -> ParallelConfig:
    """`parallel(tensor=2, expert=2)`; other fields by their own names."""
    return ParallelConfig(**{_SIZES.get(name, name): size for name, size in sizes.items()})


def model_config(path: str = "", *, dtype: str = "float32", **fields: Any) -> ModelConfig:
    return ModelConfig(path=str(path), dtype=dtype, **fields)


def adam(lr: float, *, weight_decay: float = 0.0, **fields: Any) -> OptimizerConfig:
    return OptimizerConfig(lr=lr, weight_decay=weight_decay, **fields)


def micro_batches_of(max_tokens: int, micro_batch_size: int | None = None) -> TrainingConfig:
    """Micro-batches of at most `max_tokens` tokens, or of `micro_batch_size` sequences."""
    return TrainingConfig(
        steps=1,
        global_batch_size=1,
        max_tokens_per_micro_batch=max_tokens,
        micro_batch_size=micro_batch_size,
    )
