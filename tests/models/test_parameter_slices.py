"""Parts and chunks: pieces of a chunk are the chunk, and a part's elements are at the chunk's
offsets.
"""

from __future__ import annotations

import pytest
import torch

from megatron_gspo.models.families import FAMILIES
from megatron_gspo.models.parameter_slices import CheckpointChunk, ParameterSlice

GATED = next(rule for rule in FAMILIES["qwen3"].dense if "linear_fc1.weight" in rule.megatron[0])


def chunks() -> list[CheckpointChunk]:
    """Gate and up projection of one rank of two, [6, 4] together, in a whole of [12, 4] with an
    axis of experts.
    """
    part = ParameterSlice(GATED, 0, 0, (6, 4), rank=1, ranks=2)
    return [
        CheckpointChunk("fc1", (5, 12, 4), (3, 3, 0), (1, 3, 4), part, (4, 1), 0),
        CheckpointChunk("fc1", (5, 12, 4), (3, 9, 0), (1, 3, 4), part, (4, 1), 12),
    ]


def test_a_chunk_is_a_view_of_the_part():
    value = torch.arange(24.0).view(6, 4)
    gate, up = chunks()
    assert torch.equal(gate.view_in(value), value[None, :3]) and torch.equal(
        up.view_in(value), value[None, 3:]
    )
    shifted = torch.arange(-10.0, 24.0)[10:].view(6, 4)  # not at the beginning of its storage
    assert torch.equal(up.view_in(shifted), value[None, 3:])
    up.view_in(value).zero_()
    assert float(value.sum()) == sum(range(12))


@pytest.mark.parametrize(
    ("most", "rows"), [(1, [1, 1, 1]), (4, [1, 1, 1]), (9, [2, 1]), (12, [3]), (100, [3])]
)
def test_pieces_of_a_chunk(most, rows):
    value = torch.arange(24.0).view(6, 4)
    up = chunks()[1]
    pieces = list(up.pieces(most))
    assert [piece.sizes for piece in pieces] == [(1, count, 4) for count in rows]
    assert [piece.offsets for piece in pieces] == [
        (3, 9 + sum(rows[:i]), 0) for i in range(len(rows))
    ]
    assert torch.equal(
        torch.cat([piece.view_in(value) for piece in pieces], dim=1), up.view_in(value)
    )


def test_a_vector_is_cut_too():
    part = ParameterSlice(FAMILIES["qwen3"].outer[1], -1, 0, (10,))
    norm = CheckpointChunk("norm", (10,), (0,), (10,), part, (1,), 0)
    assert [(piece.offsets, piece.sizes) for piece in norm.pieces(4)] == [
        ((0,), (4,)),
        ((4,), (4,)),
        ((8,), (2,)),
    ]
