"""Collectives of a group without other members."""

import torch
import torch.distributed as dist

from megatron_gspo.tools.rehearse.fake_gpu import FakeGpu
from megatron_gspo.tools.rehearse.fake_world import fake_world

from .on_fake_gpu import on_fake_gpu


def kinds(gpu: FakeGpu) -> list[str]:
    return [finding.kind for finding in gpu.host.findings if finding.is_defect]


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
def test_what_another_rank_sends_is_unknown() -> None:
    gpu = FakeGpu()
    with fake_world(1, 2, gpu.collectives), gpu:
        received = torch.zeros(2, dtype=torch.long, device="cuda")
        dist.recv(received, src=0)
        assert gpu.values.get(received) is None
