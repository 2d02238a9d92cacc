"""The weights that each rank sends in a rehearsal, and the memory and collectives of it."""

import dataclasses
import functools
from typing import Any

from megatron_gspo.tools.rehearse.records import RankRecord

from .on_fake_gpu import on_fake_gpu
from .test_rehearse_rank import config

# Query, output, key, value and two norms of a head.
ATTENTION = 2 * (4 * 32 * 64) + 2 * (2 * 32 * 64) + 2 * 32
LAYER = ATTENTION + 2 * 64 + 8 * 64  # with norms and router, without experts
EXPERT = 3 * 32 * 64
VOCABULARY = 128 * 64


@functools.lru_cache
def on_servers(rank: int, world: int, bucket_mb: float = 0.04, **parallel: Any) -> RankRecord:
    """A rehearsal of a run with servers that take buckets of so many MiB by broadcast."""
    from megatron_gspo.config import SGLangConfig
    from megatron_gspo.tools.rehearse.fake_device.cuda_api import fake_cuda
    from megatron_gspo.tools.rehearse.fake_gpu import FakeGpu
    from megatron_gspo.tools.rehearse.rehearse_rank import rehearse_rank

    given = config(**parallel)
    rollout = dataclasses.replace(given.rollout, engine="sglang")
    given = dataclasses.replace(
        given, rollout=rollout, sglang=SGLangConfig(num_servers=1, weight_bucket_mb=bucket_mb)
    )
    gpu = FakeGpu(expert_parallel=given.parallel.expert_model_parallel_size)
    with fake_cuda(gpu.host):
        return rehearse_rank(given, rank, world, gpu)


def exported(record: RankRecord) -> list[tuple[str, str, int]]:
    return [(c.op, c.group, c.bytes) for c in record.collectives if c.phase == "weight_export"]


@on_fake_gpu
def test_every_source_sends_its_own_tensors_without_a_collective() -> None:
    layout = {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2}
    records = [on_servers(rank, 4, **layout) for rank in range(4)]
    own_bytes = 2 * 4 * EXPERT  # bytes of bfloat16
    first = 2 * (LAYER + VOCABULARY)
    last = 2 * (LAYER + VOCABULARY + 64)
    assert [record.sent_weights for record in records] == [
        first + own_bytes,
        own_bytes,
        last + own_bytes,
        own_bytes,
    ]
    assert all(exported(record) == [] for record in records)


@on_fake_gpu
def test_a_source_gathers_the_shards_of_its_tensor_parallel_ranks() -> None:
    """Attention and vocabulary are on two ranks; each expert is on one."""
    layout = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}
    first, second = (on_servers(rank, 4, **layout) for rank in range(2))
    sharded = 2 * (2 * VOCABULARY + 2 * (ATTENTION - 2 * 32))  # of two layers
    assert [(op, group) for op, group, _ in exported(first)] == [("gather", "tp")]
    assert exported(first)[0][2] == sharded and exported(second)[0][2] == sharded // 2
    experts = 2 * 2 * 4 * EXPERT
    assert first.sent_weights == sharded + experts + 2 * (2 * (LAYER - ATTENTION + 2 * 32) + 64)
    assert second.sent_weights == experts
    assert on_servers(2, 4, **layout).sent_weights == 0  # another replica


@on_fake_gpu
def test_four_buckets_of_a_source_are_on_the_gpu() -> None:
    small, large = (on_servers(0, 4, size, expert_model_parallel_size=4) for size in (0.04, 0.08))
    buffers = [record.memory.peaks["weight_export"].bytes["buffers"] for record in (small, large)]
    assert buffers[1] - buffers[0] == int(0.08 * 2**20) // 4 * 4 - int(0.04 * 2**20) // 4 * 4
