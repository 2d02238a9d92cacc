"""Small random Hugging Face models for tests, saved to a directory."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen2MoeConfig, Qwen3Config, Qwen3MoeConfig


def tiny_config(kind: str = "moe", **overrides: object) -> Qwen2MoeConfig | Qwen3Config | Qwen3MoeConfig:
    """A Qwen3 (``dense``), Qwen3-MoE (``moe``) or Qwen2-MoE (``shared``, for its shared expert) config.

    It has a few thousand parameters, which every layout divides.
    """
    common: dict[str, object] = dict(
        vocab_size=96,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=48,
        max_position_embeddings=512,
        rope_theta=10000.0,
        tie_word_embeddings=False,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    if kind == "dense":
        return Qwen3Config(**{**common, **overrides})
    moe: dict[str, object] = dict(
        moe_intermediate_size=16,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )
    if kind == "shared":  # a head is hidden / heads there
        shared: dict[str, object] = dict(
            shared_expert_intermediate_size=24, norm_topk_prob=False, num_experts=4, head_dim=8
        )
        return Qwen2MoeConfig(**{**common, **moe, **shared, **overrides})
    return Qwen3MoeConfig(**{**common, **moe, **overrides})


def save_tiny_model(
    path: str | Path,
    kind: str = "moe",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **overrides: object,
) -> str:
    """Write a random model; returns the directory. Norms and biases are drawn too, so that a swap of two shows."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(kind, **overrides)).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith(".bias"):
                parameter.uniform_(-0.5, 0.5)
    model.save_pretrained(path)
    return str(path)
