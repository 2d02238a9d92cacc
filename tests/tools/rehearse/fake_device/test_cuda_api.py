"""torch.cuda without a GPU."""

import pytest
import torch
from torch._subclasses import fake_tensor

from megatron_gspo.tools.rehearse.fake_device.cuda_api import fake_cuda
from megatron_gspo.tools.rehearse.host_log import HostLog


def test_everything_is_restored() -> None:
    before = (
        torch.cuda.is_available(),
        torch.cuda.Stream,
        torch.Tensor.tolist,
        torch.nn.Module._apply,
        torch.tensor,
    )
    with fake_cuda(HostLog()):
        assert torch.cuda.is_available()
        assert torch.cuda.get_device_capability() == (9, 0)
    after = (
        torch.cuda.is_available(),
        torch.cuda.Stream,
        torch.Tensor.tolist,
        torch.nn.Module._apply,
        torch.tensor,
    )
    assert after == before


@pytest.mark.parametrize(
    "wait",
    [
        lambda: torch.cuda.synchronize(),
        lambda: torch.cuda.current_stream().synchronize(),
        lambda: torch.cuda.Event().synchronize(),
        lambda: torch.cuda.Stream().record_event().synchronize(),
    ],
)
def test_waiting_for_the_device_is_recorded(wait) -> None:
    log = HostLog()
    with fake_cuda(log):
        wait()
    assert [sync.count for sync in log.syncs] == [1]


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
