"""Layer specs: Transformer Engine's where installed, else torch modules that support packing and every parallelism."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

from megatron_gspo.mcore.attention import PackedAttention


class RMSNorm(torch.nn.RMSNorm):
    """Torch's RMSNorm with the mark that lets Megatron add its gradient up under sequence parallelism.

    Megatron's own torch norm refuses sequence parallelism, which MoE with tensor parallelism needs.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=_device(config))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def _device(config: Any) -> torch.device | str:
    return "cpu" if config.use_cpu_initialization else torch.cuda.current_device()  # type: ignore[return-value]


def transformer_engine_available() -> bool:
    """Whether Transformer Engine is installed beside a CUDA device."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


def block_spec(config: Any, *, transformer_engine: bool, vp_stage: int | None = None) -> Any:
    """The layers that this pipeline stage builds, as Megatron's ``TransformerBlockSubmodules``."""
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=transformer_engine, normalization="RMSNorm", vp_stage=vp_stage
    )
    if transformer_engine:
        return block
    block.layer_norm = RMSNorm
    for layer in block.layer_specs:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = PackedAttention
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
    return block
