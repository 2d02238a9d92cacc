"""torch.cuda without a GPU."""

import torch
from torch._subclasses import fake_tensor

from megatron_gspo.tools.rehearse.fake_device.cuda_api import fake_cuda
from megatron_gspo.tools.rehearse.host_log import HostLog


def test_a_cuda_build_is_not_asked_for_its_driver(monkeypatch) -> None:
    """torch with CUDA and without a GPU: fake tensors make a real one first, optimizers ask for
    graphs.
    """

    def no_driver(*args: object) -> None:
        raise RuntimeError("CUDA driver version is insufficient")

    monkeypatch.setattr(fake_tensor, "init_gpu_context", no_driver)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", no_driver)
    with fake_cuda(HostLog()):
        fake_tensor.init_gpu_context(torch.device("cuda"))
        assert not torch.cuda.is_current_stream_capturing()
