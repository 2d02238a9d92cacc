"""Operations on fake device tensors, and what is recorded of them."""

import pytest
import torch

from megatron_gspo.parallel import log_probs_from_hidden
from megatron_gspo.tools.rehearse.fake_device.cuda_api import fake_cuda
from megatron_gspo.tools.rehearse.fake_gpu import FakeGpu
from megatron_gspo.tools.rehearse.rehearsal_error import RehearsalError

from .on_fake_gpu import on_fake_gpu


def kinds(gpu: FakeGpu) -> list[str]:
    return [finding.kind for finding in gpu.host.findings if finding.is_defect]


@on_fake_gpu
def test_two_dtypes_in_a_product_are_found() -> None:
    with FakeGpu() as gpu:
        torch.ones(4, 4, device="cuda", dtype=torch.bfloat16) @ torch.ones(4, 4, device="cuda")
    assert kinds(gpu) == ["dtype_mix"]


@on_fake_gpu
def test_an_unknown_integer_is_an_error_that_names_the_line() -> None:
    with FakeGpu(), pytest.raises(RehearsalError, match="test_fake_gpu.py"):
        torch.randn(4, device="cuda").argmax().item()


@on_fake_gpu
def test_a_size_that_depends_on_unknown_values_is_an_error() -> None:
    with FakeGpu(), pytest.raises(RehearsalError, match="nonzero"):
        (torch.randn(4, device="cuda") > 0).nonzero()


@on_fake_gpu
def test_copies_to_the_device_are_pinned_or_block() -> None:
    with FakeGpu() as gpu:
        host = torch.ones(8)
        host.to("cuda", non_blocking=True)
        host.pin_memory().to("cuda", non_blocking=True)
        torch.empty(8, pin_memory=True).cuda()
        torch.ones(8, device="cuda").copy_(host)
        torch.tensor([1, 2], device="cuda")
    copies = [(copy.bytes, copy.pinned, copy.blocking) for copy in gpu.host.copies]
    assert copies == [
        (32, False, True),
        (32, True, False),
        (32, True, True),
        (32, False, True),
        (16, False, True),
    ]


@on_fake_gpu
def test_a_product_added_in_another_dtype_is_counted_and_takes_no_memory() -> None:
    with FakeGpu() as gpu:
        total = torch.zeros(4, 8, device="cuda")
        a, b = (
            torch.ones(shape, device="cuda", dtype=torch.bfloat16) for shape in ((4, 16), (16, 8))
        )
        before = gpu.memory.total
        assert torch.addmm(total, a, b, out_dtype=torch.float32, out=total) is total
        assert gpu.memory.total == before
    assert gpu.flops.counts["build"] == {"aten::addmm": 2 * 4 * 16 * 8}
    assert not kinds(gpu)


@on_fake_gpu
def test_the_head_keeps_its_logits_where_memory_is_free() -> None:
    """512 MiB of logits, more than its tiles may take: three products, and four without room."""
    tokens, width, vocabulary = 8192, 16, 16384
    for free_gib, products in ((0, 4), (4, 4), (7, 3)):  # a sixteenth of 80 GiB is spared
        gpu = FakeGpu()
        with fake_cuda(gpu.host, free_gib * 2**30), gpu:
            hidden, weight = (
                torch.randn(rows, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
                for rows in (tokens, vocabulary)
            )
            labels = torch.zeros(tokens, dtype=torch.int64, device="cuda")
            with torch.autograd.set_multithreading_enabled(False):
                log_probs_from_hidden(hidden, weight, labels)[0].sum().backward()
        flops = sum(gpu.flops.counts["build"].values())
        assert flops == products * 2 * tokens * width * vocabulary
        assert not kinds(gpu)


@on_fake_gpu
def test_varlen_attention_is_counted_by_its_sequences() -> None:
    from torch.nn.attention.varlen import varlen_attn

    with FakeGpu() as gpu, torch.autograd.set_multithreading_enabled(False):
        query, key, value = (
            torch.randn(16, 2, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for _ in range(3)
        )
        bounds = torch.tensor([0, 4, 16], dtype=torch.int32, device="cuda")
        varlen_attn(query, key, value, bounds, bounds, 12, 12, window_size=(-1, 0)).sum().backward()
        assert query.grad.shape == query.shape
    flops = 4 * 2 * 32 * (10 + 78)  # a query attends its own key and those before it
    assert gpu.flops.counts["build"] == {
        "torch_attn::_varlen_attn": flops,
        "torch_attn::_varlen_attn_backward": flops * 5 // 2,
    }, gpu.flops.counts
