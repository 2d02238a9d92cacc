"""Bytes of latent attention on a rank (``mcore/latent_attention.py``), which has torch layers only.

All heads' queries and keys are put together anew; values lie in the product of keys and values. The attention kernels
take queries, keys and values of one dimension, so that the smaller are padded with zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_gspo.models.model_shape import ModelShape

MULTIPLE = 8  # of the dimensions that flash attention takes, as in ``mcore/attention.py``, which imports torch


@dataclass(frozen=True)
class Latents:
    """Numbers of one rank. Of a token: ``key_value`` and ``query`` latents (0: queries come from the hidden state),
    ``rotated`` dimensions that all heads' keys share. Of each of ``heads``: dimensions of queries and keys, of their
    part without position (``plain``), of values."""

    key_value: int
    query: int
    rotated: int
    heads: int
    query_dim: int
    plain: int
    value_dim: int

    @property
    def gathered(self) -> int:
        """Numbers of a token that tensor-parallel ranks exchange."""
        return self.key_value + self.query


def latents_of(shape: ModelShape, tensor_size: int) -> Latents | None:
    """The latent attention of a rank; None where a model has none."""
    sizes, rotated = shape.latent, shape.rotary.dim
    if sizes is None:
        return None
    return Latents(
        key_value=sizes.key_value_rank, query=sizes.query_rank or 0, rotated=rotated,
        heads=shape.num_attention_heads // tensor_size, query_dim=sizes.plain_dim + rotated, plain=sizes.plain_dim,
        value_dim=sizes.value_dim,
    )  # fmt: skip


@dataclass(frozen=True)
class Kept:
    """Of which products the backward needs the input: 1, or 0 for frozen ones without an adapter. From the latents of
    keys and values, from that of queries, and of attention's output."""

    key_values: int = 1
    queries: int = 1
    output: int = 1


def latent_bytes(z: Latents, a: int, per_row: int, kept: Kept) -> float:
    """Saved of an own token by the products to latents and their norms."""
    numbers = z.rotated + z.key_value * (1 + kept.key_values) + z.query * (1 + kept.queries)
    return a * numbers + per_row * (2 if z.query else 1)


def attention_numbers(z: Latents, tokens: float, keys: float, *, on_gpu: bool, kept: Kept) -> float:
    """Numbers saved by the attention of ``tokens`` queries and ``keys`` keys, more than tokens where they are gathered.

    A kernel saves queries, keys, values and its output; what is as wide as it was stays in its product. An output that
    is narrower than the kernel's is copied, on a CPU always.
    """
    width = max(z.query_dim, z.value_dim)
    if on_gpu:
        width = -(-width // MULTIPLE) * MULTIPLE
        pairs = keys * (z.query_dim + z.value_dim) if keys > tokens else tokens * (z.plain + z.value_dim)
        wide_keys, wide_values = width > z.query_dim, width > z.value_dim
        found = 0.0 if wide_values and (wide_keys or keys == tokens) else pairs
        found += keys * width * (wide_values + (wide_keys or keys == tokens))
    else:
        wide_values, found = True, 2 * keys * width
    return z.heads * (found + 2 * tokens * width + kept.output * wide_values * tokens * z.value_dim)


def recomputed_numbers(z: Latents, tokens: float, kept: Kept) -> float:
    """The same where attention runs again in the backward: queries, keys, the product with the values, and its
    output."""
    return z.heads * tokens * (2 * z.query_dim + z.plain + (1 + kept.output) * z.value_dim)
