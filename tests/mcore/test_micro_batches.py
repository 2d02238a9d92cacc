"""Micro-batches of a mini-batch: every response token exactly once, ranks in step, values back to their samples."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import megatron_gspo.mcore.train_step  # noqa: F401  the fork server of the tests imports it once
from megatron_gspo.config import ParallelConfig
from megatron_gspo.data.packing import context_parallel_shard
from megatron_gspo.data.sample import Sample
from megatron_gspo.mcore.micro_batches import _fixed, collect_values, micro_batches
from tests.support.configs import parallel
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
    """Uneven samples whose tokens are all different numbers, so that a value identifies its position."""
    g = np.random.default_rng(count)
    samples, start = [], 1
    for i in range(count):
        prompt, response = int(g.integers(1, 9)), int(g.integers(1, 20))
        samples.append(Sample(
            prompt_index=i, sample_index=0, tokens=np.arange(start, start + prompt + response), prompt_length=prompt,
            loss_mask=np.arange(response) % 3 != 1, rollout_log_probs=None, finish_reason="stop",
            advantages=np.ones(response, dtype=np.float32),
        ))
        start += prompt + response
    return samples


def check_layouts(rank: int, world_size: int) -> None:
    for layout, options in CASES:
        groups = groups_of(layout)
        config = SimpleNamespace(
            sequence_parallel=layout.use_sequence_parallel,
            virtual_pipeline_model_parallel_size=layout.virtual_pipeline_model_parallel_size,
            moe_token_dispatcher_type=options.get("dispatcher", "alltoall"),
        )
        limits = {key: value for key, value in options.items() if key != "dispatcher"}
        samples = numbered_samples(11)
        found = micro_batches(samples, config, groups, **limits)
        check_shapes(found, samples, groups, config, limits)
        shards = [context_parallel_shard(batch, groups.cp.rank(), groups.cp.size()) for batch in found.batches]
        values = [shard.labels.float() for shard in shards] if groups.is_last_stage else []
        back = collect_values(values, found.batches, samples, groups)
        for value, sample in zip(back, samples, strict=True):
            assert value.dtype == np.float32
            # a token that two ranks filled in would have twice its value, one that none did, none
            assert value.tolist() == sample.response_ids.tolist(), (layout, options)


def check_shapes(found: Any, samples: list[Sample], groups: Any, config: Any, limits: dict[str, int]) -> None:
    everyone: list[Any] = [None] * dist.get_world_size()
    mine = [batch.sample_ids for batch in found.batches]
    dist.all_gather_object(everyone, (mine, groups.dp.rank(), found.seq_length))
    assert len({len(ids) for ids, _, _ in everyone}) == 1, "ranks have unequally many micro-batches"
    assert len({length for _, _, length in everyone}) == 1
    by_rank = {dp: ids for ids, dp, _ in everyone}
    assert sorted(i for ids in by_rank.values() for row in ids for i in row) == list(range(len(samples)))
    totals = [len(batch.tokens) for batch in found.batches]
    step = groups.cp.size() * (groups.tp.size() if config.sequence_parallel else 1)
    assert all(total % step == 0 for total in totals) and max(totals) <= found.seq_length
    if groups.pp.size() > 1 or config.moe_token_dispatcher_type == "allgather":
        assert set(totals) == {found.seq_length}
    if config.virtual_pipeline_model_parallel_size:
        assert len(totals) % groups.pp.size() == 0
    if limits["max_tokens"]:
        assert max(totals) <= limits["max_tokens"]
    else:
        assert max(len(batch.sample_ids) for batch in found.batches) <= limits["micro_batch_size"]
    assert all(batch.num_sequences == len(samples) for batch in found.batches)
    assert {batch.num_tokens for batch in found.batches} == {sum(int(s.loss_mask.sum()) for s in samples)}
    assert found.real_tokens == sum(sample.length for sample in samples)
    packed = torch.tensor(sum(totals))
    dist.all_reduce(packed, group=groups.dp)
    assert found.packed_tokens == int(packed)


def test_every_response_token_comes_back_once_in_every_layout():
    run_distributed(check_layouts, 2, timeout=60)


@settings(deadline=None, max_examples=200)
@given(count=st.integers(0, 40), ranks=st.integers(1, 5), size=st.integers(1, 6), step=st.integers(1, 3))
def test_a_fixed_size_deals_every_sample_once(count, ranks, size, step):
    plan = _fixed(count, ranks, size, step)
    assert sorted(i for rank in plan for rows in rank for i in rows) == list(range(count))
    lengths = {len(rank) for rank in plan}
    assert len(plan) == ranks and len(lengths) == 1 and lengths.pop() % step == 0 and len(plan[0]) >= 1
    rows = [rows for rank in plan for rows in rank]
    assert all(len(row) <= size for row in rows)
    assert sum(0 < len(row) < size for row in rows) <= 1, "at most the last one isn't full"
    # no more micro-batches than the most loaded rank needs, up to the multiple
    assert len(plan[0]) < max(-(-count // (size * ranks)), 1) + step
