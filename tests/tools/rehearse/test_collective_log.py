"""Collectives of a group without other members."""

import torch
import torch.distributed as dist

from megatron_gspo.tools.rehearse.fake_gpu import FakeGpu
from megatron_gspo.tools.rehearse.fake_world import fake_world

from .on_fake_gpu import on_fake_gpu


def kinds(gpu: FakeGpu) -> list[str]:
    return [finding.kind for finding in gpu.host.findings if finding.is_defect]


@on_fake_gpu
def test_calls_are_recorded_in_order_with_group_and_bytes() -> None:
    gpu = FakeGpu()
    with fake_world(1, 4, gpu.collectives), gpu:
        group = dist.new_group([1, 3], group_desc="TENSOR_MODEL_PARALLEL_GROUP")
        rows = torch.ones(6, 2, device="cuda")
        dist.all_reduce(rows, op=dist.ReduceOp.MAX)
        dist.all_gather_into_tensor(torch.empty(12, 2, device="cuda"), rows, group=group)
        dist.send(rows, dst=3, group=group)
        dist.all_to_all_single(torch.empty(3, 2, device="cuda"), rows, [1, 2], [2, 4], group=group)
    found = gpu.collectives.collectives
    assert [(c.op, c.group, c.ranks, c.bytes) for c in found] == [
        ("allreduce", "world", (0, 1, 2, 3), 48),
        ("allgather_base", "tp", (1, 3), 96),
        ("send", "tp", (1, 3), 48),
        ("alltoall_base", "tp", (1, 3), 48),
    ]
    assert (found[0].reduction, found[2].peer) == ("max", 3)
    assert (found[3].sent, found[3].received) == ((16, 32), (8, 16))
    assert "test_collective_log.py" in found[0].where[0]
    assert not kinds(gpu)


@on_fake_gpu
def test_tensors_of_the_host_and_wrong_sizes_are_found() -> None:
    gpu = FakeGpu()
    with fake_world(0, 2, gpu.collectives), gpu:
        dist.all_reduce(torch.ones(2))
        dist.all_gather_into_tensor(torch.empty(6, device="cuda"), torch.ones(2, device="cuda"))
        dist.all_gather_into_tensor(torch.empty(4, device="cuda"), torch.ones(2))
        dist.all_to_all_single(
            torch.empty(2, device="cuda"), torch.ones(2, device="cuda"), [2, 1], [1, 1]
        )
    assert kinds(gpu) == [
        "collective_on_cpu",
        "collective_shape",
        "collective_device_mix",
        "collective_shape",
    ]


@on_fake_gpu
def test_a_gloo_group_takes_host_tensors() -> None:
    gpu = FakeGpu()
    with fake_world(0, 2, gpu.collectives), gpu:
        group = dist.new_group([0, 1], backend="gloo", group_desc="DATA_PARALLEL_GROUP_GLOO")
        assert (dist.get_backend(group), dist.get_backend()) == ("gloo", "nccl")
        dist.all_reduce(torch.ones(2), group=group)
    assert not kinds(gpu)
    assert gpu.collectives.collectives[0].group == "dp_gloo"


@on_fake_gpu
def test_known_counts_survive_a_gather_and_a_sum() -> None:
    gpu = FakeGpu()
    with fake_world(1, 2, gpu.collectives), gpu:
        counts = torch.tensor([3, 4], device="cuda")
        gathered = torch.empty(4, dtype=torch.long, device="cuda")
        dist.all_gather_into_tensor(gathered, counts)
        assert gathered.tolist() == [3, 4, 3, 4]
        dist.all_reduce(counts)
        assert counts.tolist() == [6, 8]
        part = torch.empty(2, dtype=torch.long, device="cuda")
        dist.reduce_scatter_tensor(part, gathered)
        assert part.tolist() == [6, 8]
        bytes_ = torch.tensor([9], dtype=torch.uint8, device="cuda")
        dist.all_reduce(bytes_)
        assert bytes_.tolist() == [9]


@on_fake_gpu
def test_what_another_rank_sends_is_unknown() -> None:
    gpu = FakeGpu()
    with fake_world(1, 2, gpu.collectives), gpu:
        received = torch.zeros(2, dtype=torch.long, device="cuda")
        dist.recv(received, src=0)
        assert gpu.values.get(received) is None
