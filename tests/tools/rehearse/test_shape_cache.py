"""Remembered shapes are those of torch's fake tensors."""

import dataclasses
from typing import Any
from unittest import mock

from megatron_gspo.tools.rehearse.fake_gpu import FakeGpu
from megatron_gspo.tools.rehearse.shape_cache import ShapeCache

from .on_fake_gpu import on_fake_gpu
from .test_rehearse_rank import config


def uncached(self: ShapeCache, func: Any, args: Any, kwargs: Any) -> Any:
    return self._mode.dispatch(func, (), args, kwargs)


@on_fake_gpu
def test_a_rehearsal_is_the_same_without_it() -> None:
    from megatron_gspo.tools.rehearse.fake_device.cuda_api import fake_cuda

    def record() -> dict[str, Any]:
        layout = config(tensor_model_parallel_size=2, expert_model_parallel_size=2)
        gpu = FakeGpu(expert_parallel=2)
        with fake_cuda(gpu.host):
            from megatron_gspo.tools.rehearse.rehearse_rank import rehearse_rank

            records = dataclasses.asdict(rehearse_rank(layout, 0, 4, gpu))
        return {
            name: value
            for name, value in records.items()
            if name not in ("seconds", "host_peak_bytes")
        }

    record()  # what Megatron creates once in a process, such as the scale of its auxiliary loss
    records = []
    for run in (ShapeCache.run, uncached):
        with mock.patch.object(ShapeCache, "run", run):
            records.append(record())
    remembered, told = records
    for name, value in told.items():
        assert value == remembered[name], name
