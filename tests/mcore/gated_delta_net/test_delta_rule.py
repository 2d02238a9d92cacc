"""The delta rule in chunks against its recurrence in float64, and that recurrence against
Transformers' two forms.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from megatron_gspo.mcore.gated_delta_net.delta_rule import chunked_delta_rule

HEADS = 2
PER_HEAD = 3
KEY = 5
VALUE = 4


def inputs(length: int, seed: int = 0) -> tuple[Tensor, ...]:
    """Query and key [t, heads, d] of length 1 and less; value [t, heads * r, e]; gate and beta
    [t, heads * r].
    """
    g = torch.Generator().manual_seed(seed)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=g, dtype=torch.float64)

    query, key = (torch.nn.functional.normalize(draw(length, HEADS, KEY), dim=-1) for _ in range(2))
    values = HEADS * PER_HEAD
    return (
        query / KEY**0.5,
        key,
        draw(length, values, VALUE),
        -draw(length, values).abs() * 2,
        draw(length, values).sigmoid(),
    )


def naive(query: Tensor, key: Tensor, value: Tensor, gate: Tensor, beta: Tensor) -> Tensor:
    """[t, heads * r, e] of one sequence, token by token."""
    groups = [h // PER_HEAD for h in range(HEADS * PER_HEAD)]
    state = query.new_zeros(len(groups), KEY, VALUE)
    outputs = []
    for q, k, v, g, b in zip(query[:, groups], key[:, groups], value, gate, beta, strict=True):
        state = state * torch.exp(g)[:, None, None]
        known = torch.einsum("hde,hd->he", state, k)
        state = state + torch.einsum("hd,he->hde", k, b[:, None] * (v - known))
        outputs.append(torch.einsum("hde,hd->he", state, q))
    return torch.stack(outputs)


@pytest.mark.parametrize("theirs", [torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule])
def test_the_recurrence_is_transformers(theirs):
    query, key, value, gate, beta = inputs(150)
    output, _ = theirs(
        query[None] * KEY**0.5, key[None], value[None], g=gate[None], beta=beta[None]
    )
    torch.testing.assert_close(
        output[0], naive(query, key, value, gate, beta), rtol=2e-6, atol=2e-6
    )


@pytest.mark.parametrize(
    ("size", "lengths"), [(4, (4,)), (4, (13, 8, 1, 9)), (16, (3, 40)), (64, (150, 64, 65))]
)
def test_chunks_equal_the_recurrence(size, lengths):
    """Values and every gradient, for sequences of uneven lengths, whose last chunks are padded
    with nonsense.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i] // size)
    steps = [
        [i for i in order if lengths[i] > step * size] for step in range(-(-max(lengths) // size))
    ]
    whole = [
        tuple(x.requires_grad_() for x in inputs(length, seed=i))
        for i, length in enumerate(lengths)
    ]
    chunks: list[list[Tensor]] = []
    for step, members in enumerate(steps):
        for i in members:
            tokens = [x[step * size : (step + 1) * size] for x in whole[i]]
            missing = size - len(tokens[0])
            filler = (
                [x.detach() * (n < 3) for n, x in enumerate(inputs(missing, seed=99))]
                if missing
                else tokens
            )
            chunks.append(
                [torch.cat((x, f)) if missing else x for x, f in zip(tokens, filler, strict=True)]
            )
    query, key, value, gate, beta = (torch.stack(parts) for parts in zip(*chunks, strict=True))
    split = [x.unflatten(2, (HEADS, PER_HEAD)) for x in (value, gate, beta)]
    outputs = (
        chunked_delta_rule(
            query.transpose(1, 2),
            key.transpose(1, 2),
            split[0].permute(0, 2, 3, 1, 4),
            split[1].permute(0, 2, 3, 1),
            split[2].permute(0, 2, 3, 1),
            tuple(map(len, steps)),
        )
        .permute(0, 3, 1, 2, 4)
        .flatten(2, 3)
    )
    places = [(step, i) for step, members in enumerate(steps) for i in members]
    computed = [
        torch.cat([outputs[n] for n, (_, j) in enumerate(places) if j == i])[: lengths[i]]
        for i in range(len(lengths))
    ]
    expected = [naive(*tensors) for tensors in whole]
    weights = [
        torch.randn(x.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
        for x in expected
    ]
    leaves = [x for tensors in whole for x in tensors]
    ours = torch.autograd.grad(
        sum((x * w).sum() for x, w in zip(computed, weights, strict=True)), leaves
    )
    theirs = torch.autograd.grad(
        sum((x * w).sum() for x, w in zip(expected, weights, strict=True)), leaves
    )
    for a, b in zip((*computed, *ours), (*expected, *theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
