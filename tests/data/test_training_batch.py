"""The columns of a training batch: made of samples, selected, masked, and known on all stages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from megatron_gspo.data.sample_batch import rows_of
from megatron_gspo.data.training_batch import TrainingBatch, TrainingBatchBuilder
from tests.loop.episodes import episode
from tests.support.distributed import run_distributed
from tests.support.random_samples import assert_same, trained_samples
from tests.support.samples import make_routes, make_sample


def test_columns_have_what_the_samples_have():
    samples = [
        make_sample(2, 3, seed=i, prompt_index=i, routed_experts=make_routes(4, 2, 2, 8, seed=i))
        for i in range(3)
    ]
    samples[1].missing_routes = np.array([False, True, False, False])
    samples[2].token_versions = np.array([4, 3, 5], dtype=np.int32)
    samples[2].weight_version = 3
    builder = TrainingBatchBuilder(rows_of(samples), range(3))
    for position in (2, 0, 1):
        builder.add(position, samples[position])
    batch = builder.batch()
    for position, sample in enumerate(trained_samples(batch)):
        given = samples[position]
        versions = np.full(3, given.weight_version, dtype=np.int32)
        if given.token_versions is not None:
            versions = given.token_versions
        assert_same(sample, replace(given, token_versions=versions))
        assert batch.samples[position].tokens.base is batch.inputs.arrays["tokens"]
    assert batch.inputs["trained"].reshape(3, 5)[:, 2:].ravel().tolist() == (
        batch.responses["loss_mask"].tolist()
    )
    assert batch.is_response.tolist() == [False, False, True, True, True] * 3


def test_what_only_some_samples_of_a_step_have_is_left_out():
    samples = [make_sample(1, 2), make_sample(1, 2, seed=1, log_probs=False)]
    samples[0].routed_experts = make_routes(2, 2, 2, 8)
    builder = TrainingBatchBuilder(rows_of(samples), range(2))
    for position, sample in enumerate(samples):
        builder.add(position, sample)
    batch = builder.batch()
    assert "rollout_log_probs" not in batch.responses and "routed_experts" not in batch.inputs


def test_turns_and_observations():
    batch = TrainingBatch.of([make_sample(1, 3, log_probs=False), episode(0.0, 1.0)])
    assert batch.turns.lengths.tolist() == [0, 2] and batch.turns["reward"].tolist() == [0.0, 1.0]
    assert batch.responses["generated"].tolist() == [True] * 5 + [False] + [True] * 2
    assert batch.turns["start"].tolist() == [0, 3] and batch.turns["end"].tolist() == [2, 5]
    selected = batch.select([1])
    assert selected.turns["start"].tolist() == [0, 3] and list(selected.samples) == [0]


def test_a_selection_shares_the_columns():
    samples = [make_sample(1, 2 + i, seed=i, prompt_index=i) for i in range(4)]
    batch = TrainingBatch.of(samples)
    chosen = batch.select([3, 0])
    assert chosen.table["prompt_index"].tolist() == [3, 0] and chosen.lengths.tolist() == [6, 3]
    for position, sample in enumerate((samples[3], samples[0])):
        values = chosen.responses.of_sample("old_log_probs", position)
        assert values.base is batch.responses.arrays["old_log_probs"]
        np.testing.assert_array_equal(values, sample.old_log_probs)
        tokens = chosen.inputs.of_sample("tokens", position)
        np.testing.assert_array_equal(tokens, sample.tokens)


def over_ranks(rank: int, world: int) -> list[Any]:
    samples = [make_sample(1, 3, seed=i, mask=[1, 1, i % 2]) for i in range(5)]
    positions = [i for i in range(5) if i % world == rank]
    builder = TrainingBatchBuilder(rows_of(samples), positions)
    for position in positions:
        builder.add(position, samples[position])
    batch = builder.batch(dist.group.WORLD)
    kept = batch.responses.repeat(batch.responses.positions != 2)
    masked = batch.with_loss_mask(batch.responses["loss_mask"] & kept)
    return [
        masked.table["trained"].tolist(),
        masked.inputs["trained"].sum() == masked.responses["loss_mask"].sum(),
        batch.shared(10.0 * np.array(positions)).tolist(),
    ]


def _resident_bytes(name: str) -> int:
    """Of this process: VmRSS is held now, VmHWM was held at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def test_samples_and_their_columns_do_not_exist_twice():
    length = 2**12
    block = np.empty(16 << 20, dtype=np.uint8)
    del block  # from now on glibc takes smaller blocks from its heap
    samples = {
        position: replace(
            make_sample(1, length - 1, seed=position),
            routed_experts=np.ones((length - 1, 64, 8), dtype=np.uint8),
        )
        for position in range(128)
    }
    table = rows_of(samples.values())
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    before = _resident_bytes("VmRSS")
    builder = TrainingBatchBuilder(table, range(128))
    while samples:
        position = next(iter(samples))
        builder.add(position, samples.pop(position))
    share = builder.batch().inputs.arrays["routed_experts"].nbytes
    assert _resident_bytes("VmHWM") - before < 0.6 * share


def test_what_ranks_know_of_each_others_samples():
    for known in run_distributed(over_ranks, 2):
        assert known == [[2, 3, 0, 3, 2], True, [0, 10, 20, 30, 40]]


def over_stages(rank: int, world: int) -> list[Any]:
    """Two replicas of two stages; the last stage of each has the loss."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage = rank // 2
    replica = rank % 2
    samples = [make_sample(1, 9 + i, seed=i) for i in range(2)]
    builder = TrainingBatchBuilder(
        rows_of(samples), [replica], has_loss=stage == 1, has_tokens=stage == 0 or stage == 1
    )
    builder.add(replica, samples[replica])
    batch = builder.batch(mesh.get_group("dp"), mesh.get_group("pp"))
    swapped = batch.select([1, 0])
    is_odd = np.arange(swapped.responses.num_tokens) % 2 == 1
    masked = swapped.with_loss_mask(is_odd)
    gathered = batch.gather(b"from %d" % rank)
    return [
        masked.table["trained"].tolist(),
        masked.inputs.of_sample("trained", 1 - replica)[1:].tolist(),
        batch.sum(rank if batch.has_loss else 0.0),
        batch.max(float(rank) if batch.has_loss else float("-inf")),
        batch.shared(10.0 * (batch.responses.positions + 1)).tolist(),
        None if gathered is None else [part.tobytes() for part in gathered],
    ]


def test_all_stages_know_what_the_last_ones_hold():
    for rank, known in enumerate(run_distributed(over_stages, 4)):
        length = 9 + rank % 2
        is_odd = [token % 2 == 1 for token in range(length)]
        assert known[:5] == [[5, 4], is_odd, [5.0], [3.0], [10.0, 20.0]]
        assert known[5] == ([b"from 2", b"from 3"] if rank == 0 else None)
