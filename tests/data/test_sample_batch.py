"""Rows of samples on every rank, and the samples on those that hold them."""

from dataclasses import replace

import numpy as np
import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

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
    assert chosen.table["prompt_index"].tolist() == [3, 0, 1] and chosen.held == {
        0: samples[3],
        2: samples[1],
    }
    joined = chosen.joined(some.select([2, 3]))
    assert joined.table["prompt_index"].tolist() == [3, 0, 1, 2, 3]
    assert {i: s.prompt_index for i, s in joined.held.items()} == {0: 3, 2: 1, 4: 3}
    assert joined.lengths.tolist() == [6, 3, 4, 5, 6] and joined.lengths.dtype == np.int64


def test_pieces_have_every_sample_once(monkeypatch):
    samples = [make_sample(1, n, seed=i) for i, n in enumerate((2, 3, 9, 1, 1, 4))]
    batch = SampleBatch.of(samples)
    assert [list(piece.held) for piece in batch.pieces()] == [[0, 1, 2, 3, 4, 5]]
    monkeypatch.setattr("megatron_gspo.data.sample_batch._PIECE", 7)
    pieces = list(batch.pieces())
    assert [list(piece.held) for piece in pieces] == [
        [0, 1],
        [2],
        [3, 4],
        [5],
    ], "a longer sample is a piece of its own"
    assert all(piece.table is batch.table and piece.group is batch.group for piece in pieces)
    assert [sample for piece in pieces for sample in piece.samples] == samples
    assert [list(piece.held) for piece in SampleBatch.of([]).pieces()] == [[]]


def test_rewards_follow_their_column():
    batch = SampleBatch.of([make_sample(1, 2, seed=i) for i in range(2)]).with_columns(
        reward=np.array([1.0, np.nan])
    )
    assert batch.samples[0].reward == 1.0 and np.isnan(batch.samples[1].reward)


def over_ranks(rank: int, world: int) -> list:
    samples = [make_sample(1, 3, seed=i, mask=[1, 1, i % 2]) for i in range(5)]
    mine = [i for i in range(5) if i % world == rank]
    batch = SampleBatch.gathered([samples[i] for i in mine], mine, dist.group.WORLD)
    assert list(batch.held) == mine and batch.table["holder"].tolist() == [
        i % world for i in range(5)
    ]
    np.testing.assert_array_equal(batch.table["prompt_index"], np.arange(5))
    masked = batch.map(lambda i, s: replace(s, loss_mask=s.loss_mask & (i != 2))).with_trained()
    nan = float("nan")
    found = [
        masked.table["trained"].tolist(),
        batch.shared({i: 10.0 * i for i in mine}).tolist(),
        batch.sum(rank, len(mine)),
        batch.max(-rank, rank),
        np.isnan(batch.max(nan if rank else 1.0)).tolist(),
    ]
    with pytest.raises(ValueError, match="4 samples do not have the positions 0 to 3"):
        SampleBatch.gathered(samples[:2], [0, 1], dist.group.WORLD)
    return found


def over_stages(rank: int, world: int) -> list:
    """Two replicas of two stages; the last stage of each holds its sample."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage = rank // 2
    replica = rank % 2
    samples = [make_sample(1, 9 + i, seed=i) for i in range(2)]
    held = {replica: samples[replica]}
    batch = replace(
        SampleBatch.of(samples),
        held=held if stage else {},
        group=mesh.get_group("dp"),
        pipeline=mesh.get_group("pp"),
        stage_inputs={} if stage else held,
    )
    swapped = batch.select([1, 0])
    odd = np.arange(12) % 2 == 1
    masked = swapped.map(lambda i, s: replace(s, loss_mask=odd[: s.response_length])).with_trained()
    emptied = masked.map_packed(lambda i, s: replace(s, loss_mask=s.loss_mask & False))
    gathered = batch.gather(b"from %d" % rank)
    return [
        masked.table["trained"].tolist(),
        {
            i: sample.loss_mask.tolist() == odd[: sample.response_length].tolist()
            for i, sample in masked.packed.items()
        },
        [int(sample.loss_mask.sum()) for sample in emptied.packed.values()],
        batch.sum(rank if batch.held else 0.0),
        batch.max(float(rank) if batch.held else float("-inf")),
        batch.shared({i: 10.0 * (i + 1) for i in batch.held}).tolist(),
        None if gathered is None else [part.tobytes() for part in gathered],
    ]


def test_all_stages_know_what_the_last_ones_hold():
    found = run_distributed(over_stages, 4)
    for rank, one in enumerate(found):
        own = 1 - rank % 2  # after the swap
        assert one[:6] == [[5, 4], {own: True}, [0], [5.0], [3.0], [10.0, 20.0]]
        assert one[6] == ([b"from 2", b"from 3"] if rank == 0 else None)


def test_what_ranks_know_of_each_others_samples():
    for found in run_distributed(over_ranks, 2):
        assert found == [[2, 3, 0, 3, 2], [0, 10, 20, 30, 40], [1, 5], [0, 1], [True]]
