"""A mini-batch computed whole and in pieces: micro-batches (or data ranks) by sequence, context
ranks by token.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from megatron_gspo.algorithms import Objective, finish_metrics, reduction_of
from megatron_gspo.algorithms.segments import SumOverContext

from .reference import Batch, call_policy_loss


@dataclass(frozen=True)
class Outcome:
    """Of one policy_loss call or of several added up: loss, gradients [T], metric shares."""

    loss: Tensor
    grad: Tensor
    entropy_grad: Tensor
    metrics: dict[str, Tensor]


def evaluate(
    objective: Objective,
    batch: Batch,
    whole: Batch | None = None,
    sum_over_context: SumOverContext | None = None,
    dtype: torch.dtype = torch.float64,
) -> Outcome:
    """policy_loss of `batch`, as a share of the mini-batch `whole`."""
    arguments = batch.arguments(dtype)
    counts = whole or batch
    loss, metrics = call_policy_loss(
        objective,
        **arguments,
        num_sequences=max(counts.num_sequences, 1),
        num_tokens=max(counts.num_tokens, 1),
        sum_over_context=sum_over_context,
    )
    loss.backward()
    grads = [arguments[name].grad for name in ("log_probs", "entropy")]
    grads = [torch.zeros_like(arguments["log_probs"]) if g is None else g for g in grads]
    return Outcome(loss.detach(), *grads, metrics)


def evaluate_on_ranks(
    objective: Objective,
    batch: Batch,
    whole: Batch,
    owner: Tensor,
    ranks: int,
    dtype: torch.dtype = torch.float64,
) -> list[Outcome]:
    """One outcome a context rank; `owner` [T] is the rank of each token. A first pass collects what
    each rank would bring to the collective, a second one gets the total.
    """
    shards = [batch.take((owner == rank).nonzero().flatten()) for rank in range(ranks)]
    brought: list[Tensor] = []
    for shard in shards:
        evaluate(objective, shard, whole, lambda x: brought.append(x) or x)
    assert len(brought) == ranks  # exactly one collective each
    [(length, segments)] = {tuple(x.shape) for x in brought}
    assert length <= 4 and segments == batch.num_segments
    assert not any(x.requires_grad for x in brought)
    total = torch.stack(brought).sum(0)
    return [evaluate(objective, shard, whole, lambda x: total, dtype) for shard in shards]


def evaluate_in_pieces(
    objective: Objective, batch: Batch, piece: list[int], owner: Tensor, ranks: int
) -> Outcome:
    """Sequence i goes to micro-batch piece[i], token t to context rank owner[t]; everything is
    added up.
    """
    grad, entropy_grad = (torch.full_like(batch.log_probs, float("nan")) for _ in range(2))
    outcomes = []
    for members in (
        [i for i, p in enumerate(piece) if p == chosen] for chosen in sorted(set(piece))
    ):
        renumber = torch.full((batch.num_segments,), -1)
        renumber[torch.tensor(members)] = torch.arange(len(members))
        where = (renumber[batch.segment_ids] >= 0).nonzero().flatten()
        subset = batch.take(where)
        subset = replace(
            subset, segment_ids=renumber[subset.segment_ids], num_segments=len(members)
        )
        for rank, outcome in enumerate(
            evaluate_on_ranks(objective, subset, batch, owner[where], ranks)
        ):
            held = where[owner[where] == rank]
            grad[held], entropy_grad[held] = outcome.grad, outcome.entropy_grad
            outcomes.append(outcome)
    loss = torch.stack([o.loss for o in outcomes]).sum()
    return Outcome(loss, grad, entropy_grad, add_up([o.metrics for o in outcomes]))


def add_up(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Metric shares of all pieces to the mini-batch's."""
    return {
        name: functools.reduce(reduction_of(name).combine, [metrics[name] for metrics in parts])
        for name in parts[0]
    }


def assert_same(got: Outcome, expected: Outcome) -> None:
    """Equal but for the rounding of sums in another order."""
    scale = float(expected.grad.abs().max()) if expected.grad.numel() else 0.0
    torch.testing.assert_close(got.loss, expected.loss, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(got.grad, expected.grad, rtol=1e-10, atol=1e-14 + 1e-13 * scale)
    torch.testing.assert_close(got.entropy_grad, expected.entropy_grad, rtol=1e-10, atol=1e-14)
    assert finish_metrics(got.metrics) == pytest.approx(
        finish_metrics(expected.metrics), rel=1e-6, abs=1e-7
    )
