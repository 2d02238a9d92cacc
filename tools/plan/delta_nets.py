"""Bytes and FLOPs of a gated delta net on a rank (``mcore/gated_delta_net/``), which has torch layers only.

The delta rule computes in float32, float64 for such a model, in chunks of 64 tokens; the last chunk of a sequence is
padded. Under context parallelism a rank has all tokens of a part of its heads: as many numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_gspo.config import ParallelConfig
from megatron_gspo.models.model_shape import ModelShape

CHUNK = 64  # tokens, as in ``mcore/gated_delta_net/chunk_layout.py``, which imports torch


@dataclass(frozen=True)
class DeltaNet:
    """Numbers of one rank. ``tokens``: of its attention, before heads are exchanged for tokens; ``slots``: the same
    with the padding of chunks. Of a token: ``projected`` by the layer's projection, ``exchanged`` of these (the rest
    is the output's gate, which is copied), ``convolved``, ``keys`` and ``values`` (sizes of a head times heads),
    ``keys_of_values`` (the size of a key times value heads), ``states`` (a chunk's share of the states before it),
    ``value_heads``, and ``pairs`` with the tokens of its chunk: of key heads and of value heads."""

    tokens: float
    slots: float
    projected: int
    exchanged: int
    convolved: int
    keys: int
    values: int
    keys_of_values: int
    states: float
    value_heads: int
    pairs: int
    pairs_of_values: int
    kernel: int
    splits_tokens: bool


def delta_net_of(shape: ModelShape, parallel: ParallelConfig, tokens: float, longest: int) -> DeltaNet | None:
    """The gated delta nets of a rank with ``tokens`` tokens of sequences of ``longest``; None where there are none."""
    sizes = shape.delta_net
    if sizes is None:
        return None
    tp = parallel.tensor_model_parallel_size
    heads, values = sizes.key_heads // tp, sizes.value_heads // tp
    return DeltaNet(
        tokens=tokens, slots=tokens * -(-longest // CHUNK) * CHUNK / longest,
        projected=heads * sizes.projected, exchanged=heads * sizes.exchanged, convolved=heads * sizes.convolved,
        keys=heads * sizes.key_size, values=values * sizes.value_size, keys_of_values=values * sizes.key_size,
        states=values * sizes.key_size * sizes.value_size / CHUNK, value_heads=values,
        pairs=heads * CHUNK, pairs_of_values=values * CHUNK, kernel=sizes.kernel,
        splits_tokens=parallel.context_parallel_size > 1,
    )  # fmt: skip


def kept_bytes(net: DeltaNet, a: int) -> float:
    """What the convolution and the delta rule keep for their backward, in a forward pass whose autograd graph is kept:
    with recomputation of whole layers, and else in the backward, where they run again.

    In the order of ``delta_net`` and ``chunked_delta_rule``: the chunks with the tokens before them, the convolution
    and its activation; queries and keys of unit length, and both with their transposed once more in the layout of the
    products; their products; decay, the triangular system before and after its rates, the products within a chunk; the
    system's right side and solution; keys until the chunk's end, queries since its start; new values and states.
    """
    wide = net.convolved * (3 + (net.kernel - 1) / CHUNK)
    heads = 6 * net.keys + 2 * net.pairs + 4 * net.pairs_of_values
    right = 2 * (net.values + net.keys_of_values)
    return max(a, 4) * net.slots * (wide + heads + right + 2 * net.keys_of_values + net.values + net.states)


def gated_norm_bytes(net: DeltaNet, a: int) -> float:
    """Saved by the norm of the outputs and its gate: both in float32, the norm's output and the gate's activation."""
    wide = max(a, 4)
    return net.tokens * (wide * 4 * net.values + wide * net.value_heads)


def saved_bytes(net: DeltaNet, a: int, *, keeps_rule: bool) -> float:
    """Saved by one layer without its linear layers' inputs. keeps_rule: see `kept_bytes`; else the input of the
    convolution is, which without an exchange of heads is a part of the projection."""
    inputs = net.exchanged if net.splits_tokens else net.projected
    rule = kept_bytes(net, a) if keeps_rule else a * net.tokens * inputs
    return rule + gated_norm_bytes(net, a)


def backward_bytes(net: DeltaNet, a: int) -> float:
    """The most that the delta rule's backward holds above what its forward keeps, in the backward of its loop over
    chunks: gradients of the new values, of values, corrections, keys and states, of the states after each chunk, and a
    product of two of them; queries and some products are gone. Besides the gradient of the outputs."""
    above = 2 * net.values + net.keys_of_values + 3 * net.states - net.keys - net.pairs
    return max(a, 4) * net.slots * above + a * net.tokens * net.values


def exchanged_bytes(net: DeltaNet, a: int) -> float:
    """One layer's forward under context parallelism: heads for tokens, and the outputs back."""
    return a * net.tokens * (net.exchanged + net.values)


def flops(net: DeltaNet) -> float:
    """Products of the delta rule in one layer's forward pass."""
    within = 4 * net.keys * CHUNK + (3 * net.values + net.keys_of_values) * CHUNK
    return net.slots * (within + 6 * net.states * CHUNK)
