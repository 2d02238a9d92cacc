"""Numbers of parameters: of a model, of one token's share of it, and of what a rank holds."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_gspo.models.model_shape import ModelShape


@dataclass(frozen=True)
class LayerParameters:
    """Of one transformer layer. attention: of what mixes its tokens. mlp: of its dense MLP, or the
    router and the shared expert. experts: of all routed experts together. norms: of the two norms
    before them."""

    attention: int
    mlp: int
    experts: int
    norms: int

    @property
    def dense(self) -> int:
        """All but the routed experts."""
        return self.attention + self.mlp + self.norms


def layer_parameters(shape: ModelShape, layer: int) -> LayerParameters:
    """The parameters of a layer of the whole model."""
    hidden = shape.hidden_size
    mixer = shape.mixers[layer]
    if mixer == "latent_attention":
        attention = _latent_attention(shape)
    elif mixer == "gated_delta_net":
        attention = _gated_delta_net(shape)
    else:
        attention = _attention(shape, mixer)
    if not shape.moe_layers[layer]:
        return LayerParameters(attention, 3 * shape.ffn_hidden_size * hidden, 0, 2 * hidden)
    width = shape.moe_ffn_hidden_size
    count = shape.num_experts
    router = count * hidden + (count if shape.linear_bias else 0)
    shared = 3 * shape.shared_expert_size * hidden + (hidden if shape.shared_expert_gate else 0)
    expert = 3 * width * hidden + (2 * width + hidden if shape.linear_bias else 0)
    return LayerParameters(attention, router + shared, count * expert, 2 * hidden)


def _attention(shape: ModelShape, mixer: str) -> int:
    hidden = shape.hidden_size
    query = shape.num_attention_heads * shape.head_dim
    keys = shape.num_query_groups * shape.head_dim
    rows = (1 + shape.attention_gate) * query + 2 * keys
    total = rows * hidden + query * hidden
    if shape.attention_bias:
        total += rows
    if shape.linear_bias:
        total += hidden
    if mixer == "sink_attention":
        total += shape.num_attention_heads
    if shape.query_key_norms:
        total += query + keys if mixer == "joint_norm_attention" else 2 * shape.head_dim
    return total


def _latent_attention(shape: ModelShape) -> int:
    sizes = shape.latent
    hidden = shape.hidden_size
    heads = shape.num_attention_heads
    assert sizes is not None
    query = heads * (sizes.plain_dim + shape.rotary.dim)
    keys = sizes.key_value_rank
    total = (
        (keys + shape.rotary.dim) * hidden
        + keys
        + heads * (sizes.plain_dim + sizes.value_dim) * keys
    )
    total += heads * sizes.value_dim * hidden
    if sizes.query_rank is None:
        return total + query * hidden
    return total + sizes.query_rank * (hidden + 1 + query)


def _gated_delta_net(shape: ModelShape) -> int:
    sizes = shape.delta_net
    hidden = shape.hidden_size
    assert sizes is not None
    projections = (
        sizes.key_heads * sizes.projected * hidden + sizes.value_heads * sizes.value_size * hidden
    )
    filters = sizes.key_heads * sizes.convolved * sizes.kernel
    rates_and_norm = 2 * sizes.value_heads + sizes.value_size
    return projections + filters + rates_and_norm


def embedding_parameters(shape: ModelShape) -> int:
    """Of the embedding; the output weight has as many, unless it is the same tensor."""
    return shape.vocab_size * shape.hidden_size


def total_parameters(shape: ModelShape) -> int:
    """Parameters of the whole model, without padding."""
    return _parameters(shape, shape.num_experts)


def active_parameters(shape: ModelShape) -> int:
    """Parameters that one token uses: all but the experts that it isn't routed to."""
    return _parameters(shape, shape.experts_per_token)


def _parameters(shape: ModelShape, experts: int) -> int:
    """With so many routed experts in a layer."""
    total = (1 if shape.tied_embeddings else 2) * embedding_parameters(shape) + shape.hidden_size
    for layer in range(shape.num_layers):
        parameters = layer_parameters(shape, layer)
        total += parameters.dense + parameters.experts * experts // max(shape.num_experts, 1)
    return total
