"""Host copies of small device tensors."""

import torch

from megatron_gspo.tools.rehearse.fake_gpu import FakeGpu

from .on_fake_gpu import on_fake_gpu


@on_fake_gpu
def test_views_share_what_is_written() -> None:
    with FakeGpu():
        base = torch.zeros(4, dtype=torch.long, device="cuda")
        base[1:3] = 7
        base[0].add_(5)
        assert base.tolist() == [5, 7, 7, 0]


@on_fake_gpu
def test_unknown_values_make_what_they_are_written_to_unknown() -> None:
    with FakeGpu() as gpu:
        base = torch.zeros(4, dtype=torch.long, device="cuda")
        unknown = torch.randn(4, device="cuda").argsort()
        base[:2].copy_(unknown[:2])
        assert gpu.values.get(base) is None


@on_fake_gpu
def test_overwriting_makes_known_again() -> None:
    with FakeGpu() as gpu:
        unknown = torch.randn(4, device="cuda").argsort()
        assert gpu.values.get(unknown) is None
        unknown.fill_(3)
        assert unknown.tolist() == [3] * 4


@on_fake_gpu
def test_large_float_tensors_have_no_copy() -> None:
    with FakeGpu() as gpu:
        assert gpu.values.get(torch.zeros(100, 2048, device="cuda")) is None
        assert gpu.values.get(torch.randn(10, 8, device="cuda")) is None
        assert gpu.values.get(torch.zeros(10, 8, device="cuda")) is not None


@on_fake_gpu
def test_a_host_tensor_is_its_own_value_and_its_device_copy_is_apart() -> None:
    with FakeGpu() as gpu:
        host = torch.arange(3)
        device = host.cuda()
        host.add_(1)
        assert gpu.values.get(host) is host
        assert device.tolist() == [0, 1, 2]
