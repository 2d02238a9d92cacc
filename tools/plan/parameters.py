"""Numbers of parameters: of a model, of one token's share of it, and of what a rank holds."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_gspo.models.flops import indexer_weights, mixer_weights
from megatron_gspo.models.model_shape import NO_MIXER, ModelShape


@dataclass(frozen=True)
class LayerParameters:
    """Parameters of one transformer layer. attention: of what mixes its tokens. mlp: of its dense
    MLP, or the router and the shared expert. experts: of all routed experts together. norms: of the
    norms before them."""

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
    attention = mixer_weights(shape, layer) + indexer_weights(shape)
    attention += _vectors_of_mixer(shape, shape.mixers[layer])
    norms = (shape.mixers[layer] != NO_MIXER) + shape.mlp_layers[layer]
    matrices = shape.mlp_matrices
    if not shape.moe_layers[layer]:
        width = shape.ffn_hidden_size if shape.mlp_layers[layer] else 0
        return LayerParameters(attention, matrices * width * hidden, 0, norms * hidden)
    width = shape.moe_ffn_hidden_size
    count = shape.num_experts
    router = count * hidden + (count if shape.linear_bias else 0)
    shared = matrices * shape.shared_expert_size * hidden + (
        hidden if shape.shared_expert_gate else 0
    )
    expert = matrices * width * hidden + (2 * width + hidden if shape.linear_bias else 0)
    return LayerParameters(attention, router + shared, count * expert, norms * hidden)


def _vectors_of_mixer(shape: ModelShape, mixer: str) -> int:
    """Parameters of attention, or of what a layer has in its place, that multiply no matrix:
    biases, norms, sinks, filters, rates.
    """
    if mixer == NO_MIXER:
        return 0
    if mixer == "mamba2":
        mamba = shape.mamba
        assert mamba is not None
        filters = mamba.convolved * (mamba.kernel + 1)
        return mamba.groups * (filters + mamba.values) + 3 * mamba.heads
    if mixer == "gated_delta_net":
        net = shape.delta_net
        assert net is not None
        filters = net.key_heads * net.convolved * net.kernel
        return filters + 2 * net.value_heads + net.value_size
    if shape.latent is not None:
        norms = shape.latent.key_value_rank + (shape.latent.query_rank or 0)
        return norms + (2 * shape.indexer.head_dim if shape.indexer else 0)
    query = shape.num_attention_heads * shape.head_dim
    keys = shape.num_query_groups * shape.head_dim
    total = 0
    if shape.attention_bias:
        total += (1 + shape.attention_gate) * query + 2 * keys
    if shape.linear_bias:
        total += shape.hidden_size
    if mixer == "sink_attention":
        total += shape.num_attention_heads
    if shape.query_key_norms:
        total += query + keys if mixer == "joint_norm_attention" else 2 * shape.head_dim
    return total


def embedding_parameters(shape: ModelShape) -> int:
    """Parameters of the embedding; the output weight has as many, unless it is the same tensor."""
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
