"""`mcore/offload.py` between the host and a second device, which is fake: what is copied, how,
and who waits.
"""

from tests.tools.rehearse.on_fake_gpu import on_fake_gpu


@on_fake_gpu
def test_copies_are_pinned_and_the_host_waits_once_a_release() -> None:
    import torch

    from megatron_gspo.mcore.offload import DeviceMemory
    from megatron_gspo.tools.rehearse.fake_device.cuda_api import fake_cuda
    from megatron_gspo.tools.rehearse.fake_gpu import FakeGpu

    gpu = FakeGpu()
    gpu.fake_host_bytes = 0
    with fake_cuda(gpu.host), gpu:
        weight = torch.empty(30, 4, device="cuda", dtype=torch.bfloat16)
        moment = torch.empty(7, device="cuda")
        view = weight[3:5]
        memory = DeviceMemory(lambda: (weight, moment, view), keeps=True)
        memory.release()
        assert [tensor.untyped_storage().nbytes() for tensor in (weight, moment, view)] == [0, 0, 0]
        assert [sync.kind for sync in gpu.host.syncs] == ["torch.cuda.synchronize"]
        memory.restore()
        assert [tensor.untyped_storage().nbytes() for tensor in (weight, moment, view)] == [
            240,
            28,
            240,
        ]
        assert view.device.type == "cuda" and (view + 1).shape == (2, 4)
    assert sum(sync.count for sync in gpu.host.syncs) == 1
    [copied] = gpu.host.copies  # back to the device, from one line
    assert (copied.bytes, copied.count, copied.pinned, copied.blocking) == (
        240 + 28,
        2,
        True,
        False,
    )
