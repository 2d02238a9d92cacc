"""Sizes of the tests: for a GPU large enough to use its kernels' tiles, for a CPU tiny."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Sizes:
    """``model``: changes to `tiny_config`. ``scale``: of the lengths of `make_samples`. ``tokens``:
    of one layer or the head alone, ``vocabulary``: of the head alone, ``lengths``: of the sequences
    of attention alone. ``lr``: a learning rate whose first three steps stay within the clipped
    objective's slope."""

    model: dict[str, Any]
    scale: int
    tokens: int
    vocabulary: int
    lengths: tuple[int, ...]
    lr: float


SIZES = {
    "cpu": Sizes(
        dict(num_hidden_layers=2), 1, tokens=60, vocabulary=300, lengths=(5, 1, 17), lr=1e-3
    ),
    "cuda": Sizes(
        dict(
            num_hidden_layers=2,
            hidden_size=512,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=64,
            moe_intermediate_size=256,
            num_experts=16,
            num_experts_per_tok=4,
            vocab_size=2048,
            initializer_range=0.05,
            max_position_embeddings=4096,
        ),
        16,
        tokens=4096,
        vocabulary=32_000,
        lengths=(700, 1, 257, 2048, 33),
        lr=3e-5,
    ),
}
