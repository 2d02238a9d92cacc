"""The table of GPUs."""

from __future__ import annotations

from megatron_gspo.tools.plan.hardware import GPUS, find_gpu


def test_every_gpu_has_sane_figures() -> None:
    for gpu in GPUS.values():
        assert 2**35 < gpu.memory < 2**38 and 1e14 < gpu.flops < 1e16
        assert 1e11 < gpu.nvlink < 1e12 and 1e10 < gpu.network < gpu.nvlink
    assert find_gpu("H100-SXM") is find_gpu("h100")
