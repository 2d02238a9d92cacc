"""Functions of one kernel."""

import os
from unittest import mock

import torch
import torch.nn.functional as F

from megatron_gspo.kernels import SWITCH, row_kernels_apply
from megatron_gspo.kernels.operators import (
    logit_gradient,
    logit_statistics,
    scaled_gated_unit,
    scaled_gated_unit_backward,
)
from megatron_gspo.tools.rehearse.fake_device.fused_functions import fused_functions
from megatron_gspo.tools.rehearse.fake_gpu import FakeGpu

from ..on_fake_gpu import on_fake_gpu


def saved_bytes(gpu: FakeGpu, before: int) -> int:
    return gpu.memory.total - before


@on_fake_gpu
def test_a_norm_saves_its_input_and_one_number_a_row() -> None:
    with (
        FakeGpu() as gpu,
        fused_functions(gpu.host),
        torch.autograd.set_multithreading_enabled(False),
    ):
        x = torch.randn(16, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        weight = torch.randn(64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        before = gpu.memory.total
        out = F.rms_norm(x, (64,), weight, 1e-6)
        assert saved_bytes(gpu, before) == 16 * 64 * 2 + 16 * 4
        out.sum().backward()
        assert x.grad.shape == x.shape and weight.grad.shape == weight.shape


@on_fake_gpu
def test_attention_saves_no_scores() -> None:
    with (
        FakeGpu() as gpu,
        fused_functions(gpu.host),
        torch.autograd.set_multithreading_enabled(False),
    ):
        query, key, value = (
            torch.randn(1, heads, 4096, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for heads in (4, 2, 2)
        )
        before = gpu.memory.total
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        assert saved_bytes(gpu, before) < 1.1 * (4 * 4096 * 64 * 2 + 4 * 4096 * 4)
        out.sum().backward()
        assert key.grad.shape == key.shape
    assert not gpu.host.findings


@on_fake_gpu
def test_kernels_over_rows_are_called_as_on_a_gpu() -> None:
    with FakeGpu() as gpu, fused_functions(gpu.host):
        hidden = torch.randn(16, 64, device="cuda", dtype=torch.bfloat16)
        probs = torch.rand(16, device="cuda")
        grad = torch.randn(16, 32, device="cuda", dtype=torch.bfloat16)
        assert row_kernels_apply(hidden, "gated_unit")
        with mock.patch.dict(os.environ, {SWITCH: "-gated_unit"}):
            assert not row_kernels_apply(hidden, "gated_unit")
            assert row_kernels_apply(hidden, "row_copies")
        unit = (float("inf"), 1.0, 0.0)
        before = gpu.memory.total
        out = scaled_gated_unit(hidden, probs, *unit)
        assert saved_bytes(gpu, before) == 16 * 32 * 2
        gradients = scaled_gated_unit_backward(grad, hidden, probs, *unit)
        assert saved_bytes(gpu, before) == 16 * (2 * 32 * 2 + 64 * 2 + 4)
        assert [x.shape for x in gradients] == [out.shape, hidden.shape, probs.shape]
        logits = torch.randn(16, 64, device="cuda")
        labels = torch.zeros(16, 1, dtype=torch.int64, device="cuda")
        statistics = torch.empty(3, 16, device="cuda")
        factors = torch.empty(5, 16, device="cuda")
        before = gpu.memory.total
        logit_statistics(logits, statistics)
        gradient = logit_gradient(logits, labels, 0, factors, torch.bfloat16)
        assert saved_bytes(gpu, before) == gradient.numel() * 2
    assert not gpu.host.findings


@on_fake_gpu
def test_a_mask_with_grouped_queries_is_a_finding() -> None:
    with FakeGpu() as gpu, fused_functions(gpu.host):
        query, key = (
            torch.randn(1, heads, 64, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 2)
        )
        mask = torch.ones(1, 1, 64, 64, dtype=torch.bool, device="cuda")
        out = F.scaled_dot_product_attention(query, key, key, attn_mask=mask, enable_gqa=True)
        assert out.shape == query.shape
    assert [finding.kind for finding in gpu.host.findings] == ["slow_attention"]
