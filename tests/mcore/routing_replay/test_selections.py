"""How far selections of sparse attention differ, against sets of positions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_gspo.data.packing import pack
from megatron_gspo.loop.routing import selections_of
from megatron_gspo.mcore.forward_step import unwrap
from megatron_gspo.mcore.indexer import Indexer
from megatron_gspo.mcore.policy import Policy
from megatron_gspo.mcore.routing_replay.replay_options import ReplayOptions
from megatron_gspo.mcore.routing_replay.selections import (
    QUERIES,
    SampledSelections,
    changed_counts,
    changed_shares,
    names_of,
    rollout_counts,
    sampled_queries,
    shared_share,
)
from tests.support.configs import parallel
from tests.support.distributed import run_distributed
from tests.support.routing_cases import policy_of, run_pass, scored_samples, shape_of
from tests.support.tiny_models import save_tiny_model

TOPK = 6  # of the tiny models


def test_shares_by_hand() -> None:
    one = torch.tensor([[0, 2, 5, 9], [1, 2, 3, 4]], dtype=torch.int32)
    other = torch.tensor([[2, 3, 9, 11], [5, 6, 7, 8]], dtype=torch.int32)
    assert shared_share(one, other).tolist() == [0.5, 0.0]
    assert shared_share(one, one).tolist() == [1.0, 1.0]


def test_queries_are_spread_over_those_that_select() -> None:
    samples = scored_samples(12)
    batch = pack(samples, num_sequences=12, num_tokens=99, total_multiple=4)
    rows = sampled_queries(batch, TOPK)
    able = [
        row
        for row in range(len(batch.tokens))
        if batch.is_fed[row] and batch.position_ids[row] >= TOPK
    ]
    assert len(rows) == QUERIES < len(able)
    assert rows.tolist() == sorted(set(rows.tolist())) and set(rows.tolist()) <= set(able)
    assert rows[0] == able[0] and rows[-1] == able[-1]
    first = batch.sequences[batch.segment_ids[able[0]]]
    assert names_of(batch, rows)[0] == (*first, TOPK)


@contextmanager
def whole_selections(policy: Policy) -> Iterator[list[np.ndarray]]:
    """What the indexers select while the block runs, in the order of their calls: ``[t, topk]``."""
    calls: list[np.ndarray] = []

    def keep(module: torch.nn.Module, arguments: object, selected: Tensor) -> None:
        calls.append(selected.numpy().copy())

    modules = [module for chunk in policy.chunks for module in unwrap(chunk).modules()]
    hooks = [m.register_forward_hook(keep) for m in modules if isinstance(m, Indexer)]
    yield calls
    for hook in hooks:
        hook.remove()


def measure(rank: int, world_size: int, path: str) -> tuple[float | None, float | None, float]:
    """The measured share between two passes with the same weights, and after a change of them; the
    latter again from the whole selections, with sets."""
    policy = policy_of(path, parallel(tensor=world_size))
    options = ReplayOptions(shape_of(policy), selected_positions=TOPK)
    samples = scored_samples()
    tp = policy.groups.tp
    with whole_selections(policy) as old:
        _, _, before = run_pass(policy, samples, options)
    _, _, again = run_pass(policy, samples, options)
    with torch.no_grad():
        for chunk in policy.chunks:
            unwrap(chunk).decoder.layers[0].mlp.linear_fc2.weight.mul_(3.0)
    with whole_selections(policy) as new:
        _, _, after = run_pass(policy, samples, options)
    old_selections = selections_of(before)
    unchanged, changed = changed_shares(
        [changed_counts(old_selections, selections_of(done), tp) for done in (again, after)]
    )
    shares = []
    calls = iter(zip(old, new, strict=True))
    for sampled in selections_of(before):
        for _ in sampled.by_layer:
            one, other = next(calls)
            for row in sampled.rows.tolist():
                shares.append(1 - len({*one[row]} & {*other[row]}) / TOPK)
    return unchanged, changed, float(np.mean(shares))


def test_the_share_is_that_of_sets(tmp_path) -> None:
    path = save_tiny_model(tmp_path / "model", "glm_dsa")
    for unchanged, changed, by_sets in run_distributed(measure, 2, path):
        assert unchanged == 0.0
        assert changed == pytest.approx(by_sets) and 0 < by_sets < 1


def test_an_engines_selections_are_compared_where_this_rank_has_them() -> None:
    """Of two queries the engine's rank has one, two of whose four positions are others in the second
    layer."""
    sampled = SampledSelections([(0, 0, 7), (0, 1, 7)], torch.tensor([3, 5], dtype=torch.int32))
    selected = torch.arange(24, dtype=torch.int32).view(6, 4)
    for layer in (1, 2):
        sampled.record(layer, selected)
    of_engine = np.array([[20, 21, 22, 23], [19, 21, 23, 24]], dtype=np.int32)
    given = {(0, 1, 7): of_engine, (0, 1, 6): of_engine + 1}
    assert rollout_counts([sampled], given).tolist() == [0.5, 2.0]


def test_other_micro_batches_are_not_compared() -> None:
    selected = torch.arange(TOPK, dtype=torch.int32)[None]
    rows = torch.zeros(1, dtype=torch.int32)
    one = SampledSelections([(0, 0, 7)], rows)
    other = SampledSelections([(0, 1, 7)], rows)
    for sampled in (one, other):
        sampled.record(1, selected)
    assert run_distributed(compare, 1, one, other) == [None]
    assert run_distributed(compare, 1, one, one) == [0.0]


def compare(
    rank: int, world_size: int, before: SampledSelections, now: SampledSelections
) -> float | None:
    counts = changed_counts([before], [now], torch.distributed.group.WORLD)
    [share] = changed_shares([counts])
    return share
