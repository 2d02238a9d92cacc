"""Models as inference servers run them, without servers."""

from __future__ import annotations

from megatron_gspo.models import ModelShape
from megatron_gspo.models.rotary import Rotary
from megatron_gspo.rollout.server_engine.server_api import ServedModel


def served_model(
    *,
    moe_layers: tuple[bool, ...] = (),
    k: int = 0,
    num_experts: int = 0,
    stop_ids: tuple[int, ...] = (1,),
    vocab_size: int = 96,
    max_length: int = 64,
    top_log_probs: int = 0,
) -> ServedModel:
    """Routes are returned if there are MoE layers. The other sizes do not matter to a client."""
    shape = ModelShape(
        model_type="qwen3_moe",
        num_layers=len(moe_layers),
        hidden_size=8,
        num_attention_heads=2,
        num_query_groups=1,
        head_dim=4,
        ffn_hidden_size=16,
        vocab_size=vocab_size,
        rms_norm_eps=1e-6,
        rotary=Rotary(1e4, 4),
        max_position_embeddings=max_length,
        tied_embeddings=False,
        moe_layers=moe_layers,
        num_experts=num_experts,
        experts_per_token=k,
    )
    return ServedModel(shape, stop_ids, return_routes=bool(moe_layers), top_log_probs=top_log_probs)
