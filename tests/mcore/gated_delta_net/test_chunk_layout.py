"""Chunks of packed sequences against a loop over tokens, and the convolution against torch's."""

from __future__ import annotations

import pytest
import torch

from megatron_gspo.mcore.gated_delta_net.chunk_layout import (
    causal_convolution,
    chunk_layout,
    to_wide_chunks,
)
from megatron_gspo.parallel.context_parallel import zigzag_indices

CASES = [
    ((1,), 4, 3, 1),
    ((9, 4, 1, 12, 5), 4, 3, 1),
    ((8, 24, 4, 12), 8, 2, 2),
    ((16, 8, 40), 8, 0, 4),
    ((6, 6), 4, 4, 1),
]


def tokens_in_slots(
    lengths: tuple[int, ...], size: int
) -> tuple[list[list[int | None]], list[int]]:
    """The tokens of each chunk, and the sequences of each step, by loops."""
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    chunks = []
    active = []
    for step in range(-(-max(lengths) // size)):
        going = [i for i, n in enumerate(lengths) if n > step * size]
        going.sort(key=lambda i: -lengths[i] // size)
        active.append(len(going))
        for i in going:
            positions = range(step * size, (step + 1) * size)
            chunks.append([starts[i] + p if p < lengths[i] else None for p in positions])
    return chunks, active


@pytest.mark.parametrize(("lengths", "size", "before", "cp"), CASES)
def test_layout_equals_a_loop_over_tokens(lengths, size, before, cp):
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    layout = chunk_layout(bounds, before, cp, size=size)
    by_rank = torch.cat([zigzag_indices(bounds, rank, cp) for rank in range(cp)]).tolist()
    row_of = {token: row for row, token in enumerate(by_rank)}
    chunks, active = tokens_in_slots(lengths, size)
    starts = set(bounds.tolist())
    assert layout.active == tuple(active)
    x = torch.arange(1.0, len(by_rank) + 1)[:, None] * torch.tensor([1.0, 10.0])
    wide = to_wide_chunks(x, layout)
    for chunk, tokens in enumerate(chunks):
        history = []
        first = tokens[0]
        while len(history) < before:
            first = None if first is None or first in starts else first - 1
            history.insert(0, first)
        slots = [0.0 if token is None else row_of[token] + 1.0 for token in (*history, *tokens)]
        assert wide[chunk, :, 0].tolist() == slots and wide[chunk, :, 1].tolist() == [
            10 * v for v in slots
        ]
        for offset, token in enumerate(tokens):
            assert bool(layout.valid[chunk, offset]) == (token is not None)
            if token is not None:
                assert layout.rows[chunk * size + offset] == row_of[token]
                assert layout.slots[row_of[token]] == chunk * size + offset


@pytest.mark.parametrize(("lengths", "size", "before", "cp"), CASES)
def test_gradients_of_the_copies_add_up(lengths, size, before, cp):
    layout = chunk_layout(torch.tensor([0, *lengths]).cumsum(0).int(), before, cp, size=size)
    g = torch.Generator().manual_seed(1)
    x = torch.randn(sum(lengths), 2, generator=g, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(to_wide_chunks(x, layout).shape, generator=g, dtype=torch.float64)
    [gradient] = torch.autograd.grad((to_wide_chunks(x, layout) * weight).sum(), x)
    expected = torch.zeros_like(x)
    for row, slot, w in zip(
        layout.wide_rows.tolist(), range(len(layout.wide_rows)), weight.flatten(0, 1), strict=True
    ):
        if slot not in layout.absent.tolist():
            expected[row] += w
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-14)


def test_convolution_equals_torch():
    g = torch.Generator().manual_seed(2)
    x = torch.randn(3, 9, 5, generator=g, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, 4, generator=g, dtype=torch.float64, requires_grad=True)
    output = causal_convolution(x, weight)
    expected = torch.nn.functional.conv1d(x.transpose(1, 2), weight[:, None], groups=5).transpose(
        1, 2
    )
    out = torch.randn(expected.shape, generator=g, dtype=torch.float64)
    ours = torch.autograd.grad((output * out).sum(), (x, weight))
    theirs = torch.autograd.grad((expected * out).sum(), (x, weight))
    for a, b in zip((output, *ours), (expected, *theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


def test_a_kernel_longer_than_a_chunk_is_refused():
    with pytest.raises(ValueError, match="before=5 slots do not fit a chunk of 4"):
        chunk_layout(torch.tensor([0, 8]).int(), 5, size=4)
