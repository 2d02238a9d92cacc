"""Operations whose result depends on values."""

import torch

from megatron_gspo.tools.rehearse.fake_gpu import FakeGpu

from .on_fake_gpu import on_fake_gpu


@on_fake_gpu
def test_known_values_decide_sizes() -> None:
    with FakeGpu() as gpu:
        counts = torch.tensor([2, 0, 3], device="cuda")
        assert torch.repeat_interleave(counts).tolist() == [0, 0, 2, 2, 2]
        assert counts.nonzero().flatten().tolist() == [0, 2]
        assert torch.bincount(counts).tolist() == [1, 0, 1, 1]
        assert counts.unique().tolist() == [0, 2, 3]
        assert torch.equal(counts, counts.clone())
    assert not [finding for finding in gpu.host.findings if finding.is_defect]


@on_fake_gpu
def test_routes_of_long_micro_batches_to_many_experts_decide_sizes() -> None:
    with FakeGpu():
        chosen = torch.zeros(18_432, 10, dtype=torch.long, device="cuda")
        probabilities = torch.zeros(18_432, 512, device="cuda").scatter(1, chosen, 1.0)
        assert (probabilities > 0).sum(0)[:2].tolist() == [18_432, 0]


@on_fake_gpu
def test_floats_and_flags_that_are_unknown_are_made_up_and_listed() -> None:
    with FakeGpu() as gpu:
        norm = torch.randn(4, device="cuda").norm()
        assert norm.item() == 1.0
        assert not bool(norm.isnan())
        assert torch.randn(3, device="cuda").cpu().tolist() == [1.0] * 3
    assert [finding.kind for finding in gpu.host.findings] == ["made_up_value"] * 3


@on_fake_gpu
def test_filling_by_a_mask_does_not_wait_but_putting_several_values_does() -> None:
    with FakeGpu() as gpu:
        values = torch.randn(4, device="cuda")
        mask = torch.tensor([True, False, True, True], device="cuda")
        values[mask] = 0.0
        assert not gpu.host.syncs
        values[mask] = torch.randn(3, device="cuda")
    assert len(gpu.host.syncs) == 1


@on_fake_gpu
def test_an_asynchronous_copy_into_pinned_memory_does_not_wait() -> None:
    with FakeGpu() as gpu:
        device = torch.arange(3, device="cuda")
        pinned = torch.empty(3, dtype=torch.long, pin_memory=True)
        pinned.copy_(device, non_blocking=True)
        assert not gpu.host.syncs
        assert pinned.tolist() == [0, 1, 2]
        torch.empty(3, dtype=torch.long).copy_(device, non_blocking=True)
    assert len(gpu.host.syncs) == 1
