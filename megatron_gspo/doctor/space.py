"""How many bytes a run writes, from the sizes of its model. Upper bounds that are close, not promises."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_gspo.conversion import ModelShape

_MASTER_AND_MOMENTS = 12  # bytes a parameter: float32 weights and Adam's two moments, as a checkpoint holds them


def parameter_count(shape: ModelShape) -> int:
    """Parameters of the whole model, every expert counted, as its Hugging Face checkpoint has them."""
    hidden, head = shape.hidden_size, shape.head_dim
    queries, pairs = shape.num_attention_heads * head, 2 * shape.num_query_groups * head
    attention = (
        hidden * (queries + pairs) + queries * hidden + 2 * head + 2 * hidden
    )  # 2 norms of heads, 2 of the layer
    dense = 3 * hidden * shape.ffn_hidden_size
    experts = shape.num_experts * (3 * hidden * shape.moe_ffn_hidden_size + hidden)  # the router's row of each
    layers = sum(attention + (experts if is_moe else dense) for is_moe in shape.moe_layers)
    return layers + hidden + shape.vocab_size * hidden * (1 if shape.tied_embeddings else 2)


@dataclass(frozen=True)
class Needs:
    """Bytes. checkpoint: one of the run's own, with optimizer state. checkpoints: how many there are at most, the one
    being written among them. export: the Hugging Face directory at the end; weights: copies for servers (weight_route:
    disk)."""

    checkpoint: int
    checkpoints: int
    export: int
    weights: int = 0

    @property
    def total(self) -> int:
        return self.checkpoint * self.checkpoints + self.export + self.weights

    @property
    def smallest(self) -> int:
        """What the run can't do with less than: two checkpoints, since the last stays until the next is whole."""
        return max(min(self.checkpoints, 2) * self.checkpoint, self.export) + self.weights


def needs(
    parameters: int, *, weight_bytes: int, keep: int, saves: bool, exports: bool, weight_copies: int = 0
) -> Needs:
    """weight_bytes: of a parameter in the model's dtype. keep: checkpoints that stay. weight_copies: for servers."""
    model = parameters * weight_bytes
    return Needs(
        checkpoint=model + parameters * _MASTER_AND_MOMENTS if saves else 0,
        checkpoints=keep + 1 if saves else 0,
        export=model if exports else 0,
        weights=model * weight_copies,
    )
