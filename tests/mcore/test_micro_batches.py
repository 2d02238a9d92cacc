"""Micro-batches of a mini-batch: every response token exactly once, ranks in step, values back
to their samples.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import megatron_gspo.mcore.train_step  # noqa: F401  the fork server of the tests imports it once
from megatron_gspo.config import ParallelConfig
from megatron_gspo.data.packing import context_parallel_shard
from megatron_gspo.data.sample import Sample
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.mcore.micro_batches import (
    MicroBatches,
    plan_of,
    planned_micro_batches,
    values_everywhere,
    values_of_replica,
)
from megatron_gspo.mcore.process_groups import ProcessGroups
from tests.support.configs import micro_batches_of, parallel
from tests.support.distributed import run_distributed
from tests.support.parallel_groups import groups_of

CASES: list[tuple[ParallelConfig, dict[str, Any]]] = [
    (parallel(), dict(max_tokens=40)),
    (parallel(), dict(max_tokens=400)),
    (parallel(), dict(max_tokens=0, micro_batch_size=1)),
    (parallel(), dict(max_tokens=0, micro_batch_size=4)),
    (parallel(context=2), dict(max_tokens=43)),
    (parallel(context=2), dict(max_tokens=0, micro_batch_size=3)),
    (parallel(tensor=2), dict(max_tokens=41)),
    (parallel(tensor=2, expert=2), dict(max_tokens=40, dispatcher="allgather")),
    (parallel(pipeline=2), dict(max_tokens=40)),
    (parallel(pipeline=2, virtual_pipeline=2), dict(max_tokens=40)),
    (parallel(pipeline=2, virtual_pipeline=2), dict(max_tokens=0, micro_batch_size=4)),
]


def numbered_samples(count: int) -> list[Sample]:
    """Uneven samples whose tokens are all different numbers, so that a value identifies its
    position.
    """
    g = np.random.default_rng(count)
    samples = []
    start = 1
    for i in range(count):
        prompt = int(g.integers(1, 9))
        response = int(g.integers(1, 20))
        samples.append(
            Sample(
                prompt_index=i,
                sample_index=0,
                tokens=np.arange(start, start + prompt + response),
                prompt_length=prompt,
                loss_mask=np.arange(response) % 3 != 1,
                rollout_log_probs=None,
                finish_reason="stop",
                advantages=np.ones(response, dtype=np.float32),
            )
        )
        start += prompt + response
    return samples


def check_layouts(rank: int, world_size: int) -> None:
    for (layout, options), count in product(CASES, (11, 1)):  # 1: a replica without samples
        groups = groups_of(layout)
        config = SimpleNamespace(
            sequence_parallel=layout.use_sequence_parallel,
            virtual_pipeline_model_parallel_size=layout.virtual_pipeline_model_parallel_size,
            moe_token_dispatcher_type=options.get("dispatcher", "alltoall"),
        )
        limits = {key: value for key, value in options.items() if key != "dispatcher"}
        samples = numbered_samples(count)
        batch = TrainingBatch.of(samples)
        training = micro_batches_of(limits["max_tokens"] or 1, limits.get("micro_batch_size"))
        plan = plan_of(batch, training, config, groups)
        local_positions = np.flatnonzero(plan.replica_of() == groups.dp.rank())
        # The others' payload is not here.
        held = replace(batch, inputs=batch.inputs.chosen(local_positions))
        planned = planned_micro_batches(held, plan, groups)
        check_shapes(planned, samples, groups, config, limits)
        shards = [
            context_parallel_shard(batch, groups.cp.rank(), groups.cp.size())
            for batch in planned.batches
        ]
        values = [shard.labels.float() for shard in shards] if groups.is_last_stage else []
        back = values_of_replica(values, planned.layouts, batch, groups)
        assert back.dtype == np.float32
        for i, value in batch.responses.split(back).items():
            # a token that two ranks filled in would have twice its value, one that none did, none
            expected = samples[i].response_ids if i in local_positions else 0 * value
            assert value.tolist() == expected.tolist(), (layout, options)
        everything = values_everywhere(back, groups)
        assert everything.tolist() == batch.inputs["tokens"][batch.is_response].tolist()


def check_shapes(
    planned: MicroBatches,
    samples: list[Sample],
    groups: ProcessGroups,
    config: SimpleNamespace,
    limits: dict[str, int],
) -> None:
    everyone: list[Any] = [None] * dist.get_world_size()
    own_samples = [batch.sample_ids for batch in planned.batches]
    dist.all_gather_object(everyone, (own_samples, groups.dp.rank(), planned.seq_length))
    assert len({len(ids) for ids, _, _ in everyone}) == 1, "ranks have unequally many micro-batches"
    assert len({length for _, _, length in everyone}) == 1
    by_rank = {dp: ids for ids, dp, _ in everyone}
    assert sorted(i for ids in by_rank.values() for row in ids for i in row) == list(
        range(len(samples))
    )
    totals = [len(batch.tokens) for batch in planned.batches]
    for layout, packed in zip(planned.layouts, planned.batches, strict=True):
        assert layout.cu_seqlens.tolist() == packed.cu_seqlens.tolist()
        assert (layout.rows, layout.micro_batch) == (packed.rows, packed.micro_batch)
    step = groups.cp.size() * (groups.tp.size() if config.sequence_parallel else 1)
    assert all(total % step == 0 for total in totals) and max(totals) <= planned.seq_length
    if groups.pp.size() > 1 or config.moe_token_dispatcher_type == "allgather":
        assert set(totals) == {planned.seq_length}
    if config.virtual_pipeline_model_parallel_size:
        assert len(totals) % groups.pp.size() == 0
    if limits["max_tokens"]:
        assert max(totals) <= limits["max_tokens"]
    else:
        assert max(len(batch.sample_ids) for batch in planned.batches) <= limits["micro_batch_size"]
    assert all(batch.num_sequences == len(samples) for batch in planned.batches)
    assert {batch.num_tokens for batch in planned.batches} == {
        sum(int(s.loss_mask.sum()) for s in samples)
    }
    assert planned.real_tokens == sum(sample.length for sample in samples)
    packed = torch.tensor(sum(totals))
    dist.all_reduce(packed, group=groups.dp)
    assert planned.packed_tokens == int(packed)


def test_every_response_token_comes_back_once_in_every_layout():
    run_distributed(check_layouts, 2)
