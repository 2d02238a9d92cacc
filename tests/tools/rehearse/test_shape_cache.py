"""Remembered shapes are those of torch's fake tensors."""

import dataclasses
from typing import Any
from unittest import mock

import torch

from megatron_gspo.tools.rehearse.fake_gpu import FakeGpu
from megatron_gspo.tools.rehearse.shape_cache import ShapeCache

from .on_fake_gpu import on_fake_gpu
from .test_rehearse_rank import config


def uncached(self: ShapeCache, func: Any, args: Any, kwargs: Any) -> Any:
    return self._mode.dispatch(func, (), args, kwargs)


@on_fake_gpu
def test_a_result_is_new_or_shares_memory_as_at_first() -> None:
    with FakeGpu():
        for _ in range(2):  # computed, then remembered
            x = torch.zeros(4, 6, device="cuda")
            row, part, made = x[1], x.t()[2:4], x + 1
            assert row.untyped_storage()._cdata == part.untyped_storage()._cdata == x.untyped_storage()._cdata
            assert made.untyped_storage()._cdata != x.untyped_storage()._cdata
            assert (row.shape, row.storage_offset()) == ((6,), 6)
            assert (part.shape, part.stride(), part.storage_offset()) == ((2, 4), (1, 6), 2)
            assert x.add_(made) is x
            assert torch.mul(x, 2, out=made) is made
            first, second = x.split(2)
            assert second.storage_offset() == 12 and first.shape == second.shape == (2, 6)


@on_fake_gpu
def test_what_decides_a_result_is_told_apart() -> None:
    with FakeGpu():
        for _ in range(2):
            x, y = torch.zeros(4, 4, device="cuda"), torch.zeros(4, 4, device="cuda", dtype=torch.bfloat16)
            assert (x + 1).dtype is torch.float32 and (y + 1).dtype is torch.bfloat16
            assert (x.t() + 0).stride() == (1, 4) and (x + 0).stride() == (4, 1)
            assert x.sum(0).shape == (4,) and x.sum(0, keepdim=True).shape == (1, 4)
            assert (x.bool() * True).dtype is torch.bool and (x.bool() * 1).dtype is torch.int64
            assert x.cpu().device.type == "cpu" and x.clone().device.type == "cuda"
            assert x.t_().is_contiguous() is False


@on_fake_gpu
def test_a_rehearsal_is_the_same_without_it() -> None:
    from megatron_gspo.tools.rehearse.fake_device.cuda_api import fake_cuda

    def record() -> dict[str, Any]:
        layout = config(tensor_model_parallel_size=2, expert_model_parallel_size=2)
        gpu = FakeGpu(expert_parallel=2)
        with fake_cuda(gpu.host):
            from megatron_gspo.tools.rehearse.rehearse_rank import rehearse_rank

            found = dataclasses.asdict(rehearse_rank(layout, 0, 4, gpu))
        return {name: value for name, value in found.items() if name not in ("seconds", "host_peak_bytes")}

    record()  # what Megatron creates once in a process, such as the scale of its auxiliary loss
    found = []
    for run in (ShapeCache.run, uncached):
        with mock.patch.object(ShapeCache, "run", run):
            found.append(record())
    remembered, told = found
    for name, value in told.items():
        assert value == remembered[name], name
