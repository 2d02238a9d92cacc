"""Numbers of latent attention worked by hand; ``agreement`` compares whole layers with rehearsals."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_gspo.models.model_shape import LatentSizes
from megatron_gspo.tools.plan.latent_attention import (
    Kept,
    Latents,
    attention_numbers,
    latent_bytes,
    latents_of,
    recomputed_numbers,
)
from tests.support.model_shapes import dense_shape

# latents of 3 and 5 numbers; two heads with keys of 4 + 2 dimensions and values of 4
SMALL = Latents(key_value=3, query=5, rotated=2, heads=2, query_dim=6, plain=4, value_dim=4)
# dimensions of 8 + 8 and 8, which kernels on a GPU take
EVEN = dataclasses.replace(SMALL, rotated=8, query_dim=16, plain=8, value_dim=8)


def test_sizes_of_a_rank() -> None:
    sizes = LatentSizes(query_rank=None, key_value_rank=3, plain_dim=4, value_dim=4)
    shape = dense_shape(latent=sizes)
    found = latents_of(shape, 2)
    assert found is not None and found.heads == shape.num_attention_heads // 2
    assert (found.query, found.key_value, found.gathered) == (0, 3, 3)
    assert found.query_dim == 4 + shape.rotary.dim
    assert latents_of(dense_shape(), 1) is None


@pytest.mark.parametrize(
    ("latents", "kept", "expected"),
    [
        # 2 bytes of rotated keys, both latents and their norms' outputs; 4 bytes of each norm's row
        (SMALL, Kept(), 2 * (2 + 2 * 3 + 2 * 5) + 2 * 4),
        (dataclasses.replace(SMALL, query=0), Kept(), 2 * (2 + 2 * 3) + 4),
        (SMALL, Kept(key_values=0), 2 * (2 + 3 + 2 * 5) + 2 * 4),
        (SMALL, Kept(queries=0), 2 * (2 + 2 * 3 + 5) + 2 * 4),
    ],
)
def test_latents_of_a_token(latents: Latents, kept: Kept, expected: int) -> None:
    assert latent_bytes(latents, 2, 4, kept) == expected


@pytest.mark.parametrize(
    ("latents", "keys", "on_gpu", "kept", "expected"),
    [
        # a CPU: keys and values padded to 6, queries and the output as wide, the output cut to 4
        (SMALL, 15, False, Kept(), 2 * (2 * 15 * 6 + 2 * 10 * 6 + 10 * 4)),
        (SMALL, 15, False, Kept(output=0), 2 * (2 * 15 * 6 + 2 * 10 * 6)),
        (SMALL, 10, True, Kept(), 2 * (2 * 10 * 8 + 2 * 10 * 8 + 10 * 4)),  # all padded to 8
        (EVEN, 10, True, Kept(), 2 * (10 * 16 + 10 * 16 + 2 * 10 * 16 + 10 * 8)),  # keys put together, values padded
        # gathered: the product of keys and values, and the padded values
        (EVEN, 15, True, Kept(), 2 * (15 * (16 + 8) + 15 * 16 + 2 * 10 * 16 + 10 * 8)),
        # values as wide as keys: they lie in the product, beside the keys without position
        (dataclasses.replace(EVEN, value_dim=16), 10, True, Kept(), 2 * (10 * (8 + 16) + 10 * 16 + 2 * 10 * 16)),
    ],
)
def test_attention_of_ten_tokens(latents: Latents, keys: int, on_gpu: bool, kept: Kept, expected: int) -> None:
    assert attention_numbers(latents, 10, keys, on_gpu=on_gpu, kept=kept) == expected


def test_attention_that_runs_again() -> None:
    assert recomputed_numbers(SMALL, 10, Kept()) == 2 * 10 * (2 * 6 + 4 + 4 + 4)
    assert recomputed_numbers(SMALL, 10, Kept(output=0)) == 2 * 10 * (2 * 6 + 4 + 4)
