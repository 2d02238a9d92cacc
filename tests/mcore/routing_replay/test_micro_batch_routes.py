"""The routes of one micro-batch without a model: rows, replay, missing routes, measurements and
counted uses.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_gspo.data.packing import PackedBatch, pack
from megatron_gspo.mcore.routing_replay.micro_batch_routes import MicroBatchRoutes
from megatron_gspo.mcore.routing_replay.replay_options import ReplayOptions
from megatron_gspo.routing_replay.perturbation import Perturbation, PerturbedPass, RouterTerms
from megatron_gspo.routing_replay.routes import RouteShape
from tests.support.routing_cases import scored_samples, with_random_routes

SHAPE = RouteShape(layers=2, k=2, num_experts=8)
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="compares tensors on the CPU")


def softmax(scores):
    return scores.softmax(-1)


def groups(tp: tuple[int, int] = (0, 1)) -> Any:
    def group(rank: int, size: int) -> Any:
        return SimpleNamespace(rank=lambda: rank, size=lambda: size)

    return SimpleNamespace(tp=group(*tp), cp=group(0, 1))


def batch_of(missing: float = 0.0) -> PackedBatch:
    samples = with_random_routes(scored_samples(3), SHAPE, missing=missing)
    return pack(samples, num_sequences=3, num_tokens=9, total_multiple=4, routes=SHAPE)


def begun(
    options: ReplayOptions, batch: PackedBatch, layers: tuple[int, ...] = (0, 1)
) -> MicroBatchRoutes:
    routes = MicroBatchRoutes(options, batch, groups(), sequence_parallel=False)
    routes.begin_chunk(batch, layers)
    return routes


def top_2(scores: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = scores.topk(2, dim=-1)
    return values, ids


def scores_for(batch: PackedBatch) -> Tensor:
    return torch.from_numpy(
        np.random.default_rng(5).normal(size=(len(batch.tokens), 8))
    ).requires_grad_()


def reversed_by_position(terms: RouterTerms, *, weights: bool = False) -> Any:
    """The logits with another sign in the later half of a sequence and in odd layers."""
    later = (terms.tokens.positions >= 2) ^ bool(terms.layer % 2)
    changed = torch.where(later[:, None], -terms.logits, terms.logits)
    return (changed, changed) if weights else changed


def perturbed(batch: PackedBatch, *, replay: bool = False, **options: Any) -> MicroBatchRoutes:
    perturbation = PerturbedPass(Perturbation(reversed_by_position, options), "trainer", seed=3)
    return begun(ReplayOptions(SHAPE, replay=replay, perturbed_pass=perturbation), batch)


def changed_scores(batch: PackedBatch, scores: Tensor, layer: int) -> Tensor:
    later = (batch.position_ids >= 2) ^ bool(layer % 2)
    return torch.where(later[:, None], -scores, scores)


def test_a_perturbation_changes_the_choice_and_not_the_weights():
    batch = batch_of()
    scores = scores_for(batch)
    values, ids = perturbed(batch).route(1, scores, top_2, are_logits=True, shares=softmax)
    assert torch.equal(ids, top_2(changed_scores(batch, scores, 1))[1])
    assert (
        (ids != top_2(scores)[1]).any()
        and torch.equal(values, scores.gather(1, ids))
        and values.requires_grad
    )
    probabilities = scores.detach().softmax(-1)
    assert torch.equal(
        perturbed(batch).route(1, probabilities, top_2, are_logits=False, shares=softmax)[1], ids
    )


def test_a_perturbation_changes_the_weights_where_asked():
    batch = batch_of()
    scores = scores_for(batch)
    values, ids = perturbed(batch, weights=True).route(
        0, scores, top_2, are_logits=True, shares=softmax
    )
    changed = changed_scores(batch, scores, 0)
    assert torch.equal(values, changed.gather(1, ids)) and values.requires_grad
    values, _ = perturbed(batch, weights=True, replay=True).route(
        0, scores, top_2, are_logits=True, shares=softmax
    )
    assert torch.equal(values, changed.gather(1, batch.routed_experts[:, 0].long()))


def test_a_replayed_choice_wins_over_a_perturbation():
    batch = batch_of(missing=0.5)
    scores = scores_for(batch)
    _, ids = perturbed(batch, replay=True).route(1, scores, top_2, are_logits=True, shares=softmax)
    live = perturbed(batch).route(1, scores, top_2, are_logits=True, shares=softmax)[1]
    given = batch.routed_experts[:, 1].long()
    assert torch.equal(ids, torch.where(batch.missing_routes[:, None], live, given))
