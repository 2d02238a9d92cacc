"""Decoding on a CPU: faster attention and experts.

They are registered through the extension interfaces of Transformers. Results are the same up to
rounding. Measured with 256 rows of a model of hidden size 128, 16 experts, 4 active, on one thread:
24 decoding steps take 0.30 s; with Transformers' fastest pair ("sdpa", "grouped_mm") 0.33 s.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "cpu_decode"


def use_cpu_kernels(model: PreTrainedModel) -> None:
    """Use this module's attention in `model`, and its experts if the model has fused ones.

    No gradients.
    """
    use_decode_attention(model)
    if _experts_are_standard(model):
        ALL_EXPERTS_FUNCTIONS.register(NAME, sorted_experts)
        model.set_experts_implementation(NAME)


def use_decode_attention(model: PreTrainedModel) -> None:
    """Use this module's attention in `model`. No gradients."""
    AttentionInterface.register(NAME, decode_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)


def _experts_are_standard(model: PreTrainedModel) -> bool:
    experts = [
        module
        for module in model.modules()
        if hasattr(module, "is_transposed") and hasattr(module, "_apply_gate")
    ]
    return bool(experts) and all(map(_is_standard, experts))


def _is_standard(experts: nn.Module) -> bool:
    """Whether a layer's experts are gated units without a bias or a norm, not transposed."""
    standard = {
        "is_transposed": False,
        "has_gate": True,
        "has_bias": False,
        "has_post_expert_norm": False,
    }
    return all(getattr(experts, name, value) == value for name, value in standard.items())


def decode_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention of one query per row as two batched products over key/value heads; longer queries:
    SDPA.

    Args:
        query: [B, heads, 1, dim].
        key: [B, kv_heads, S, dim].
        value: [B, kv_heads, S, e].
        attention_mask: [B, 1, 1, S] bool or None.
        options: Transformers' own; `scaling` is read, `s_aux`, the sinks [heads]: a score without a
            value for each head, and `indices` [B, queries, k]: the columns that sparse attention
            attends, of those in the mask.
    """
    batch, heads, queries, dim = query.shape
    indices = options.get("indices")
    if indices is not None:
        assert attention_mask is not None
        attention_mask = attention_mask & _columns(indices, key.shape[2])
    sinks = options.get("s_aux")
    scaling = options.get("scaling")
    scale = dim**-0.5 if scaling is None else scaling
    if queries > 1:
        if sinks is not None:
            return _with_sinks(query, key, value, attention_mask, sinks, scale), None
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    kv_heads = key.shape[1]
    scores = torch.matmul(
        query.reshape(batch, kv_heads, heads // kv_heads, dim) * scale, key.transpose(2, 3)
    )
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, float("-inf"))
    if sinks is not None:
        column = sinks.to(scores.dtype).view(1, kv_heads, -1, 1).expand(batch, -1, -1, -1)
        scores = torch.cat((scores, column), dim=-1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    return torch.matmul(weights, value).view(batch, 1, heads, value.shape[-1]), None


def _columns(indices: Tensor, count: int) -> Tensor:
    """[B, 1, queries, count] bool: whether a column is among a query's ``indices`` [B, queries, k]."""
    chosen = torch.zeros(*indices.shape[:2], count, dtype=torch.bool, device=indices.device)
    return chosen.scatter_(-1, indices.long(), True)[:, None]


def _with_sinks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sinks: Tensor, scale: float
) -> Tensor:
    """SDPA with the sinks as a first key: their scores are the queries' products with it, in a
    dimension of its own.
    """
    batch, heads, queries, _ = query.shape
    if mask is None:
        mask = torch.ones(queries, key.shape[2], dtype=torch.bool, device=query.device).tril(
            key.shape[2] - queries
        )
    scores = (sinks / scale).to(query.dtype).view(1, -1, 1, 1).expand(batch, -1, queries, 1)
    query = torch.cat((query, scores), dim=-1)
    sink_key = nn.functional.pad(torch.zeros_like(key[:, :, :1]), (0, 1), value=1.0)
    key = torch.cat((sink_key, nn.functional.pad(key, (0, 1))), dim=2)
    value = nn.functional.pad(value, (0, 1, 1, 0))
    out = nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=nn.functional.pad(mask, (1, 0), value=True),
        scale=scale,
        enable_gqa=True,
    )
    return out[..., :-1].transpose(1, 2)


class _Experts(Protocol):
    """A module of Transformers with the weights of all experts of a layer."""

    num_experts: int
    gate_up_proj: Tensor
    """[experts, 2 f, h], or its transpose."""

    down_proj: Tensor

    def _apply_gate(self, gate_up: Tensor) -> Tensor: ...


def sorted_experts(
    self: _Experts, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Experts over rows sorted by expert. Only the two matrix products run once per expert.

    hidden_states: [T, h]; top_k_index: [T, k] int64; top_k_weights: [T, k]. Returns [T, h].
    """
    tokens, k = top_k_index.shape
    experts = top_k_index.reshape(-1)
    order = experts.argsort(stable=True)
    counts = torch.bincount(experts, minlength=self.num_experts).tolist()
    inputs = hidden_states.index_select(0, order.div(k, rounding_mode="floor"))
    gate_up = inputs.new_empty(tokens * k, self.gate_up_proj.shape[1])
    _mm_per_expert(inputs, self.gate_up_proj, gate_up, counts)
    out = torch.empty_like(inputs)
    _mm_per_expert(self._apply_gate(gate_up), self.down_proj, out, counts)
    position = torch.empty_like(order)  # of each (token, expert) among the sorted rows
    position[order] = torch.arange(tokens * k, device=order.device)
    out = out.index_select(0, position).view(tokens, k, -1)
    return torch.bmm(top_k_weights[:, None].to(out.dtype), out)[:, 0]


def _mm_per_expert(inputs: Tensor, weight: Tensor, out: Tensor, counts: list[int]) -> None:
    experts = zip(
        inputs.split(counts), weight.transpose(1, 2).unbind(0), out.split(counts), strict=True
    )
    for expert_input, expert_weight, expert_output in experts:
        torch.mm(expert_input, expert_weight, out=expert_output)
