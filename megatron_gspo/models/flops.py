"""Floating-point operations of a model's matrix products, attention and recurrences, exactly as its
layers compute them for sequences of given lengths.

A product of [m, k] with [k, n] has 2 m k n. Attention counts the pairs of a query with the keys
that it attends. Norms, rotations, softmax and other element-wise work are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from megatron_gspo.models.model_shape import NO_MIXER, DeltaNetSizes, Mamba2Sizes, ModelShape

RECURRENCE_CHUNK = 64
"""Tokens of a chunk of the delta rule and of the scan of Mamba-2."""

Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class ForwardFlops:
    """A forward pass over n sequences: float64 [n] each."""

    layers: np.ndarray
    """Products of tokens with the weights of layers."""

    scores: np.ndarray
    """Attention's products of queries with keys."""

    sums: np.ndarray
    """Attention's sums of values."""

    recurrence: np.ndarray
    """The delta rule, or the scan of Mamba-2."""

    recurrence_backward: np.ndarray
    """Its backward pass: that of the delta rule is not twice its forward pass."""

    indexer: np.ndarray
    """Products of the indexers of sparse attention, which have no gradient."""

    head: np.ndarray
    """Logits of the scored positions, or values of them."""

    @property
    def total(self) -> np.ndarray:
        """FLOPs of the forward pass."""
        mixing = self.scores + self.sums + self.recurrence + self.indexer
        return self.layers + mixing + self.head

    def training(self, *, frozen: bool = False) -> np.ndarray:
        """FLOPs of the forward and the backward pass, each product once.

        frozen: the weights have no gradient, as under adapters, whose own products are not counted.
        """
        products = 2 if frozen else 3
        rule = self.recurrence + self.recurrence_backward
        attention = 3 * (self.scores + self.sums) + self.indexer
        return products * (self.layers + self.head) + attention + rule

    def recomputed(self, recompute: Recompute) -> np.ndarray:
        """What the backward pass computes again on top of `training`: the layers or the attention
        of ``model.recompute_granularity``, the recurrence, the scores of flash attention, and the
        logits.
        """
        again = self.scores + self.recurrence + self.head
        if recompute == "full":
            again = again + self.layers + self.indexer
        if recompute != "none":
            again = again + self.scores + self.sums
        return again


def forward_flops(shape: ModelShape, lengths: np.ndarray, scored: np.ndarray) -> ForwardFlops:
    """A forward pass over sequences of `lengths` [n], each with `scored` [n] positions of the
    log-prob head.
    """
    lengths = np.asarray(lengths, dtype=np.float64)
    weights = sum(mixer_weights(shape, i) + mlp_weights(shape, i) for i in range(shape.num_layers))
    scores = np.zeros_like(lengths)
    sums = np.zeros_like(lengths)
    rule = np.zeros_like(lengths)
    rule_backward = np.zeros_like(lengths)
    for mixer, window in zip(shape.mixers, shape.windows, strict=True):
        if mixer == "gated_delta_net":
            assert shape.delta_net is not None
            forward, backward = _delta_rule(shape.delta_net, lengths)
            rule += forward
            rule_backward += backward
        elif mixer == "mamba2":
            assert shape.mamba is not None
            forward = _scan(shape.mamba, lengths)
            rule += forward
            rule_backward += 2 * forward
        elif mixer != NO_MIXER:
            key_size, value_size = _head_sizes(shape)
            window = shape.indexer.topk if shape.indexer else window  # as many, not the last
            pairs = 2 * shape.num_attention_heads * attended_pairs(lengths, window)
            scores += key_size * pairs
            sums += value_size * pairs
    outputs = 1 if shape.value_head else shape.vocab_size
    return ForwardFlops(
        layers=2.0 * weights * lengths,
        scores=scores,
        sums=sums,
        recurrence=rule,
        recurrence_backward=rule_backward,
        indexer=_indexers(shape, lengths),
        head=2.0 * outputs * shape.hidden_size * np.asarray(scored, dtype=np.float64),
    )


def attended_pairs(lengths: np.ndarray, window: int | None) -> np.ndarray:
    """Queries times the keys that each attends, in causal sequences of `lengths` [n]. window: the
    last keys that a query attends, its own among them; None: all.
    """
    if window is None:
        return lengths * (lengths + 1) / 2
    full = np.minimum(lengths, window)
    return full * (full + 1) / 2 + (lengths - full) * full


def mixer_weights(shape: ModelShape, layer: int) -> int:
    """Numbers of the matrices by which a layer's attention, or what it has in its place, multiplies
    a token.
    """
    hidden = shape.hidden_size
    mixer = shape.mixers[layer]
    if mixer == NO_MIXER:
        return 0
    if mixer == "mamba2":
        assert shape.mamba is not None
        return shape.mamba.groups * (shape.mamba.projected + shape.mamba.values) * hidden
    if mixer == "gated_delta_net":
        net = shape.delta_net
        assert net is not None
        return (net.key_heads * net.projected + net.value_heads * net.value_size) * hidden
    heads = shape.num_attention_heads
    latent = shape.latent
    if latent is not None:
        rank = latent.key_value_rank
        query = heads * (latent.plain_dim + shape.rotary.dim)
        keys = (rank + shape.rotary.dim) * hidden
        keys += heads * (latent.plain_dim + latent.value_dim) * rank
        output = heads * latent.value_dim * hidden
        if latent.query_rank is None:
            return query * hidden + keys + output
        return latent.query_rank * (hidden + query) + keys + output
    query = heads * shape.head_dim
    keys = shape.num_query_groups * shape.head_dim
    return ((2 + shape.attention_gate) * query + 2 * keys) * hidden


def mlp_weights(shape: ModelShape, layer: int) -> int:
    """Numbers of the matrices by which a layer's MLP multiplies a token, or its router, its shared
    expert and the chosen experts.
    """
    hidden = shape.hidden_size
    if not shape.mlp_layers[layer]:
        return 0
    matrices = shape.mlp_matrices
    if not shape.moe_layers[layer]:
        return matrices * shape.ffn_hidden_size * hidden
    shared = matrices * shape.shared_expert_size + shape.shared_expert_gate
    experts = matrices * shape.moe_ffn_hidden_size * shape.experts_per_token
    return (shape.num_experts + shared + experts) * hidden


def _head_sizes(shape: ModelShape) -> tuple[int, int]:
    """Sizes of a head of queries and keys, and of values."""
    if shape.latent is None:
        return shape.head_dim, shape.head_dim
    return shape.latent.plain_dim + shape.rotary.dim, shape.latent.value_dim


def indexer_weights(shape: ModelShape) -> int:
    """Numbers of the matrices of a layer's indexer; 0 without one."""
    if shape.indexer is None:
        return 0
    assert shape.latent is not None and shape.latent.query_rank is not None
    sizes = shape.indexer
    queries = sizes.heads * sizes.head_dim * shape.latent.query_rank
    return queries + (sizes.head_dim + sizes.heads) * shape.hidden_size


def _indexers(shape: ModelShape, lengths: np.ndarray) -> np.ndarray:
    """Projections, and the scores of the queries that have more keys than are selected. Sequences
    without such a query need no indexer."""
    if shape.indexer is None:
        return np.zeros_like(lengths)
    sizes = shape.indexer
    chosen = np.where(lengths > sizes.topk, lengths, 0.0)
    pairs = attended_pairs(chosen, None) - attended_pairs(np.minimum(chosen, sizes.topk), None)
    scores = (sizes.head_dim + 1) * sizes.heads * pairs
    return 2.0 * shape.num_layers * (indexer_weights(shape) * chosen + scores)


def _delta_rule(sizes: DeltaNetSizes, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Forward and backward pass of ``mcore/gated_delta_net/delta_rule.py``, chunk by chunk.

    A chunk that ends early is computed whole, and the last one of a sequence hands on no state.
    """
    chunks = np.ceil(lengths / RECURRENCE_CHUNK)
    handed_on = np.maximum(chunks - 1, 0)
    size = RECURRENCE_CHUNK
    key = sizes.key_size
    value = sizes.value_size
    of_keys = 2 * (2 * size * size * key) * sizes.key_heads  # keys and queries with keys
    solved = size * size * (key + value) * sizes.value_heads  # half of a product
    within = 2 * size * size * value * sizes.value_heads
    with_state = 2 * size * key * value * sizes.value_heads
    forward = (of_keys + solved + within + 2 * with_state) * chunks + with_state * handed_on
    # The system is solved once more, and its own gradient is a whole product.
    once = 2 * of_keys + 3 * solved + 2 * within + (2 + 3) * with_state
    return forward, once * chunks + with_state * handed_on


def _scan(sizes: Mamba2Sizes, lengths: np.ndarray) -> np.ndarray:
    """Forward pass of ``mcore/mamba2/scan.py``, chunk by chunk; one that ends early is computed
    whole."""
    size = RECURRENCE_CHUNK
    scores = 2 * size * size * sizes.state_size * sizes.groups  # of C and B
    within = 2 * size * size * sizes.head_size * sizes.heads
    with_state = 2 * size * sizes.state_size * sizes.head_size * sizes.heads
    return (scores + within + 2 * with_state) * np.ceil(lengths / size)
