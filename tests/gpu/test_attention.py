"""Packed attention against one sequence at a time in float64, and its memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from benchmarks.log_prob_worker import peak_bytes
from megatron_gspo.mcore.attention import PackedAttention, packed_sequences
from megatron_gspo.mcore.process_groups import ProcessGroups
from tests.gpu.errors import check, relative
from tests.gpu.tolerances import BACKWARD, tolerance, unit_roundoff

LONG = 8192  # tokens of the sequence whose memory is measured
ROUNDINGS = 2  # the probabilities and the output


@dataclass(frozen=True)
class Heads:
    heads: int
    groups: int
    dim: int
    window: int | None = None
    sinks: bool = False


CASES = [
    Heads(8, 2, 64),
    Heads(4, 4, 128),
    Heads(4, 2, 64, window=33),
    Heads(8, 2, 64, sinks=True),
    Heads(8, 2, 64, window=128, sinks=True),
]


def attend(
    case: Heads, lengths: tuple[int, ...], groups: ProcessGroups, tensors: list[Tensor]
) -> Tensor:
    config = SimpleNamespace(attention_dropout=0.0, kv_channels=case.dim)
    attention = PackedAttention(config, 1, None, "self", pg_collection=groups)
    attention.window = case.window
    attention.sinks = tensors[3] if case.sinks else None
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    sequences = packed_sequences(bounds, max(lengths), groups.cp, tensors[0].device)
    return attention(*tensors[:3], packed_seq_params=sequences)


def draw(case: Heads, tokens: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Query, key, value, and the sinks if there are any; scores of standard deviation 1."""
    g = torch.Generator().manual_seed(tokens)
    shapes = [(tokens, heads, case.dim) for heads in (case.heads, case.groups, case.groups)]
    shapes += [(case.heads,)] * case.sinks
    return [torch.randn(shape, generator=g).to(device, dtype).requires_grad_() for shape in shapes]


def naive(case: Heads, lengths: tuple[int, ...], tensors: list[Tensor]) -> Tensor:
    """Every sequence alone, with all scores."""
    outputs = []
    for sequence in zip(*(tensor.split(lengths) for tensor in tensors[:3]), strict=True):
        query, key, value = (
            x.transpose(0, 1).repeat_interleave(case.heads // x.shape[1], 0) for x in sequence
        )
        scores = query @ key.transpose(1, 2) / case.dim**0.5
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        if case.window is not None:
            later |= torch.ones_like(later).tril(-case.window)
        scores = scores.masked_fill(later, -torch.inf)
        if case.sinks:
            scores = torch.cat(
                (scores, tensors[3][:, None, None].expand(-1, scores.shape[1], 1)), -1
            )
        weights = scores.softmax(-1)[..., : key.shape[1]]
        outputs.append((weights @ value).transpose(0, 1).flatten(1))
    return torch.cat(outputs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_output_and_gradients(device, groups, sizes, case, dtype, record_property):
    tensors = draw(case, sum(sizes.lengths), getattr(torch, dtype), device)
    output = attend(case, sizes.lengths, groups, tensors)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(device)
    (output.float() * weights).sum().backward()
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    expected = naive(case, sizes.lengths, exact)
    (expected * weights.double()).sum().backward()

    terms = max(sizes.lengths) if dtype == "float32" else 0  # of a sum of products
    allowed = tolerance(unit_roundoff(dtype, device), ROUNDINGS + terms)
    assert relative(output, expected) < allowed
    pairs = zip(("query", "key", "value", "sinks"), tensors, exact, strict=False)
    errors = {name: relative(actual.grad, wanted.grad) for name, actual, wanted in pairs}
    check(record_property, errors, math.sqrt(BACKWARD) * allowed)


def test_memory_grows_with_tokens_not_with_their_square(device, groups):
    if device == "cpu":
        pytest.skip("needs a GPU: the allocator's records of one long sequence")
    case = CASES[0]
    tokens = LONG
    tensors = draw(case, tokens, torch.bfloat16, device)
    attend(case, (tokens,), groups, tensors).sum().backward()
    peak, _ = peak_bytes(lambda: attend(case, (tokens,), groups, tensors).sum().backward(), device)
    assert peak < 2 * case.heads * tokens**2 / 4, "scores of all heads in bfloat16"
