"""Rows of samples on every rank, and the samples on those that hold them."""

from dataclasses import replace

import numpy as np
import pytest
import torch.distributed as dist

from megatron_gspo.data.micro_batch_plan import PackingRules
from megatron_gspo.data.sample_batch import ROW, SampleBatch, rows_of
from tests.loop.episodes import episode
from tests.support.distributed import run_distributed
from tests.support.samples import make_routes, make_sample


def test_a_row_by_hand():
    sample = make_sample(
        2,
        3,
        mask=[1, 0, 1],
        prompt_index=7,
        sample_index=1,
        reward=0.5,
        finish_reason="length",
        weight_version=3,
        token_versions=np.array([4, 3, 5], dtype=np.int32),
        routed_experts=make_routes(4, 2, 2, 8),
    )
    [row] = rows_of([sample], holder=6)
    assert {name: row[name].item() for name in ROW.names} == {
        "prompt_index": 7,
        "sample_index": 1,
        "reward": 0.5,
        "prompt_length": 2,
        "response_length": 3,
        "trained": 2,
        "oldest_version": 3,
        "newest_version": 5,
        "turns": 0,
        "turn_tokens": 0,
        "rows": 1,
        "holder": 6,
        "finish": 1,
        "has_rollout_log_probs": True,
        "has_versions": True,
        "has_routes": True,
    }
    [row] = rows_of([episode(0.0, 1.0)])
    assert (row["turns"], row["turn_tokens"], row["response_length"]) == (2, 4, 5)
    assert ROW.itemsize <= 64


def test_selection_and_joining_keep_rows_and_samples_together():
    samples = [make_sample(1, 2 + i, seed=i) for i in range(4)]
    whole = SampleBatch.of(samples)
    some = replace(whole, held={1: samples[1], 3: samples[3]})  # as on one of several ranks
    chosen = some.select([3, 0, 1])
    assert chosen.table["prompt_index"].tolist() == [3, 0, 1]
    assert chosen.held == {
        0: samples[3],
        2: samples[1],
    }
    joined = chosen.joined(some.select([2, 3]))
    assert joined.table["prompt_index"].tolist() == [3, 0, 1, 2, 3]
    assert {i: s.prompt_index for i, s in joined.held.items()} == {0: 3, 2: 1, 4: 3}
    assert joined.lengths.tolist() == [6, 3, 4, 5, 6] and joined.lengths.dtype == np.int64


def test_rewards_are_in_the_table_and_in_the_samples():
    samples = [make_sample(1, 2, seed=i) for i in range(2)]
    batch = SampleBatch.of(samples).with_rewards(np.array([1.0, np.nan]))
    assert batch.samples[0].reward == 1.0 and np.isnan(batch.samples[1].reward)
    assert batch.table["reward"].tolist()[0] == 1.0


def over_ranks(rank: int, world: int) -> list:
    samples = [make_sample(1, 3, seed=i, mask=[1, 1, i % 2]) for i in range(5)]
    positions = [i for i in range(5) if i % world == rank]
    batch = SampleBatch.gathered([samples[i] for i in positions], positions, dist.group.WORLD)
    assert list(batch.held) == positions
    assert batch.table["holder"].tolist() == [i % world for i in range(5)]
    np.testing.assert_array_equal(batch.table["prompt_index"], np.arange(5))
    nan = float("nan")
    known = [
        batch.shared({i: 10.0 * i for i in positions}).tolist(),
        batch.sum(rank, len(positions)),
        batch.max(-rank, rank),
        np.isnan(batch.max(nan if rank else 1.0)).tolist(),
    ]
    with pytest.raises(ValueError, match="4 samples do not have the positions 0 to 3"):
        SampleBatch.gathered(samples[:2], [0, 1], dist.group.WORLD)
    return known


def test_what_ranks_know_of_each_others_samples():
    for known in run_distributed(over_ranks, 2):
        assert known == [[0, 10, 20, 30, 40], [1, 5], [0, 1], [True]]


@pytest.mark.parametrize("multiple", [1, 2, 4, 8])
def test_the_rows_of_a_sample_fit_into_what_was_planned_for_it(multiple: int) -> None:
    rng = np.random.default_rng(0)
    rules = PackingRules(1, 4096, sequence_multiple=multiple, total_multiple=multiple)
    for _ in range(50):
        lengths = rng.integers(1, 12, rng.integers(1, 6))
        mask = np.zeros(lengths.sum() - 1, dtype=bool)
        sample = make_sample(1, len(mask), mask=mask, row_lengths=lengths)
        batch = SampleBatch.of([sample])
        planned = int(rules.padded(batch.packing_lengths(multiple))[0])
        packed = int((-(-lengths // multiple) * multiple).sum())
        assert packed <= planned
        if len(lengths) == 1:
            assert packed == planned and batch.packing_lengths(multiple)[0] == batch.lengths[0]
