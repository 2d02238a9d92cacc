"""Operations are logged with their phase, direction and call site."""

import torch

from megatron_gspo.tools.rehearse.fake_gpu import FakeGpu

from .on_fake_gpu import on_fake_gpu


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


@on_fake_gpu
def test_a_backward_is_logged_at_the_place_of_its_forward() -> None:
    with FakeGpu() as gpu, torch.autograd.set_multithreading_enabled(False):
        with gpu.phase("forward_backward", "activations"):
            x = torch.ones(8, 4, device="cuda", requires_grad=True)
            weight = torch.ones(4, 2, device="cuda", requires_grad=True)
            Doubled.apply(product(x, weight)).sum().backward()
    logged = [
        (op.op, op.is_backward, op.where.partition(" ")[2], op.count)
        for op in gpu.ops.totals
        if op.op.startswith(("aten.mm", "aten.mul"))
    ]
    assert logged == [
        ("aten.mm.default", False, "product", 1),
        ("aten.mul.Tensor", False, "forward", 1),
        ("aten.mul.Tensor", True, "backward", 1),
        ("aten.mm.default", True, "product", 1),  # the gradient of one factor, then of the other
        ("aten.mm.default", True, "product", 1),
    ], logged
    assert {op.phase for op in gpu.ops.totals} == {"forward_backward"}


@on_fake_gpu
def test_equal_calls_are_counted_together_and_views_cost_nothing() -> None:
    with FakeGpu() as gpu:
        x = torch.empty(8, 4, device="cuda", dtype=torch.bfloat16)
        for _ in range(3):
            x.t().mul_(2.0)
    [total] = gpu.ops.totals
    assert (total.op_class, total.count, total.launches) == ("elementwise, strided", 3, 1)
    assert (total.read, total.written, total.tensors) == (64, 64, "bfloat16 [4, 8]")
    assert gpu.ops.issued == {"build": 7}  # the allocation, and each time a view and a product
