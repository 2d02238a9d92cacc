"""Rehearsed steps in worlds of hundreds and thousands of GPUs: nothing that one rank exchanges
grows with the world.
"""

import dataclasses
import functools

from megatron_gspo.tools.rehearse.records import Collective, RankRecord

from .on_fake_gpu import on_fake_gpu
from .test_rehearse_rank import config

MIB = 2**20
# Of gradients and new weights.
OF_PARAMETERS = ("reduce_scatter_tensor_coalesced", "allgather_into_tensor_coalesced")
TENSOR = 2
STAGES = 2


@functools.lru_cache
def in_world(world: int) -> RankRecord:
    """The last rank, with two sequences of 1,024 tokens for each data-parallel rank: 2 MiB of
    token ids at 512.
    """
    from megatron_gspo.config import SGLangConfig
    from megatron_gspo.tools.rehearse.fake_device.cuda_api import fake_cuda
    from megatron_gspo.tools.rehearse.fake_gpu import FakeGpu
    from megatron_gspo.tools.rehearse.rehearse_rank import rehearse_rank

    given = config(
        tensor_model_parallel_size=TENSOR,
        pipeline_model_parallel_size=STAGES,
        expert_model_parallel_size=8,
    )
    given = dataclasses.replace(
        given,
        data=dataclasses.replace(given.data, max_prompt_length=512),
        rollout=dataclasses.replace(given.rollout, engine="sglang", max_response_length=512),
        sglang=SGLangConfig(num_servers=1),
        training=dataclasses.replace(
            given.training,
            global_batch_size=2 * world // TENSOR // STAGES,
            max_tokens_per_micro_batch=1024,
        ),
    )
    gpu = FakeGpu(expert_parallel=8)
    with fake_cuda(gpu.host):
        return rehearse_rank(given, world - 1, world, gpu)


def across_replicas(played: RankRecord) -> list[Collective]:
    """Collectives of a step whose group grows with the world."""
    replicas = played.world // TENSOR // STAGES // 8
    return [
        c
        for c in played.collectives
        if len(c.ranks) >= replicas and c.phase not in ("build", "checkpoint_plan")
    ]


def too_large(played: RankRecord) -> list[Collective]:
    """Those larger than a MiB or of unknown size, without gradients and parameters."""
    return [
        c
        for c in across_replicas(played)
        if (c.bytes > MIB and c.op not in OF_PARAMETERS) or c.dtype == "object"
    ]


@on_fake_gpu
def test_collectives_of_a_step_do_not_grow_with_the_world() -> None:
    for world in (512, 4096):
        played = in_world(world)
        assert len(played.micro_batches) >= 2
        assert "optimizer" in {c.phase for c in across_replicas(played)}
        assert too_large(played) == []


@on_fake_gpu
def test_process_groups_at_the_start() -> None:
    """A rank is in the same number in any world; the number of all is about five times that of
    the ranks.
    """
    small = in_world(512)
    large = in_world(4096)
    assert len(set(small.groups.values())) <= small.groups_of_rank == large.groups_of_rank <= 24
    for played in (small, large):
        assert 4 * played.world < played.groups_of_world < 6 * played.world
