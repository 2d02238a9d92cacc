"""Bytes, kernels and class of an operation, by hand; real tensors stand for the device's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_gspo.kernels import operators
from megatron_gspo.tools.rehearse.op_cost import OpCost, cost_of
from megatron_gspo.tools.rehearse.operation import Operation

aten = torch.ops.aten
kernels = torch.ops.megatron_gspo
F32 = torch.zeros(6, 4)  # 96 bytes
OTHER = torch.ones(6, 4)
HALF = torch.zeros(6, 4, dtype=torch.bfloat16)  # 48 bytes
IDS = torch.tensor([0, 5, 5])  # 24 bytes


def cost(func: Operation, *args: Any, **kwargs: Any) -> OpCost | None:
    return cost_of(func, args, kwargs, func(*args, **kwargs))


CASES: dict[str, tuple[Callable[[], OpCost | None], OpCost | None]] = {
    "two read, one written": (
        lambda: cost(aten.mul.Tensor, F32, OTHER),
        OpCost("elementwise", 1, 192, 96),
    ),
    "the same tensor twice": (
        lambda: cost(aten.mul.Tensor, F32, F32),
        OpCost("elementwise", 1, 96, 96),
    ),
    "in place": (lambda: cost(aten.mul_.Scalar, F32, 2.0), OpCost("elementwise", 1, 96, 96)),
    "two dtypes": (
        lambda: cost(aten.add_.Tensor, F32, HALF),
        OpCost("elementwise, mixed dtypes", 1, 96 + 48, 96),
    ),
    "strided": (
        lambda: cost(aten.silu.default, F32[:, :2]),
        OpCost("elementwise, strided", 1, 48, 48),
    ),
    "a list of unequal tensors": (
        lambda: cost(aten._foreach_mul_.Scalar, [F32.clone(), IDS.float()], 2.0),
        OpCost("elementwise", 1, 96 + 12, 96 + 12),
    ),
    "a row for all rows": (
        lambda: cost(aten.mul.Tensor, F32, torch.ones(4)),
        OpCost("elementwise, strided", 1, 96 + 16, 96),
    ),
    "expanded memory is read once": (
        lambda: cost(aten.clone.default, torch.ones(6, 1).expand(6, 4)),
        OpCost("copy, strided", 1, 24, 96),
    ),
    "overwritten": (lambda: cost(aten.copy_.default, F32, OTHER), OpCost("copy", 1, 96, 96)),
    "filled": (lambda: cost(aten.zero_.default, F32), OpCost("copy", 1, 0, 96)),
    "filled as another": (
        lambda: cost(aten.zeros_like.default, HALF, dtype=torch.float32),
        OpCost("copy", 1, 0, 96),
    ),
    "out=": (
        lambda: cost(aten.mul.out, F32, OTHER, out=torch.empty(6, 4)),
        OpCost("elementwise", 1, 192, 96),
    ),
    "a view": (lambda: cost(aten.view.default, F32, [24]), None),
    "an allocation": (lambda: cost(aten.empty_like.default, F32), None),
    "a cast": (
        lambda: cost(aten._to_copy.default, F32, dtype=torch.bfloat16),
        OpCost("copy, mixed dtypes", 1, 96, 48),
    ),
    "a product": (
        lambda: cost(aten.mm.default, HALF, HALF.t().contiguous()),
        OpCost("product", 1, 96, 72),
    ),
    "a product of float32": (
        lambda: cost(aten.mm.default, F32, OTHER.t()),
        OpCost("float32 product", 1, 192, 144),
    ),
    "rows by index": (
        lambda: cost(aten.index_select.default, F32, 0, IDS),
        OpCost("gather, scatter", 1, 48 + 24, 48),
    ),
    "an embedding": (
        lambda: cost(aten.embedding.default, F32, IDS),
        OpCost("gather, scatter", 1, 48 + 24, 48),
    ),
    "rows written by index": (
        lambda: cost(aten.index_copy_.default, F32.clone(), 0, IDS[:2], OTHER[:2]),
        OpCost("gather, scatter", 1, 16 + 32, 32),
    ),
    "rows added by index": (
        lambda: cost(aten.index_add_.default, F32.clone(), 0, IDS, OTHER[:3]),
        OpCost("gather, scatter", 1, 24 + 48 + 48, 48),
    ),
    "rows added to a table": (
        lambda: cost_of(
            operators.add_embedding_gradient._opoverload, (F32, OTHER[:3], IDS, IDS, IDS), {}, None
        ),
        OpCost("gather, scatter", 1, 48 + 48 + 24, 48),
    ),
    "a number at each index, in a copy": (
        lambda: cost(aten.scatter.value, F32, 1, torch.zeros(6, 1, dtype=torch.int64), 1.0),
        OpCost("gather, scatter", 1, 48 + 96, 96 + 24),
    ),
    "sums of rows": (
        lambda: cost(aten._embedding_bag.default, F32, IDS, torch.tensor([0, 2])),
        OpCost("gather, scatter", 1, 3 * 16 + 24 + 16, 2 * 16),
    ),
    "a row kernel's sums of rows": (
        lambda: cost_of(kernels.sum_rows.default, (F32, IDS, IDS[:2], 2), {}, HALF[:2].float()),
        OpCost("other", 1, 3 * 16 + 24 + 16, 2 * 16),
    ),
    "a row kernel's copies of rows": (
        lambda: cost_of(kernels.copy_rows.default, (F32, IDS), {}, HALF[:3].float()),
        OpCost("other", 1, 48 + 24, 48),
    ),
    "the backward of a slice": (
        lambda: cost(aten.slice_backward.default, F32[:2], [6, 4], 0, 0, 2, 1),
        OpCost("copy, strided", 2, 32, 96 + 32),
    ),
    "concatenation": (
        lambda: cost(aten.cat.default, [F32, OTHER]),
        OpCost("concatenation", 1, 192, 192),
    ),
    "softmax": (
        lambda: cost(aten._softmax.default, F32, 1, False),
        OpCost("reduction", 1, 96, 96),
    ),
    "top-k": (
        lambda: cost(aten.topk.default, F32, 2),
        OpCost("sort", 1, 96, 12 * 4 + 12 * 8),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_cost_of(name: str) -> None:
    run, expected = CASES[name]
    assert run() == expected


def test_adam_writes_weights_and_moments_but_no_gradients() -> None:
    weight, gradient, first, second = (torch.ones(10) for _ in range(4))
    args = [weight], [gradient], [first], [second], [], [torch.ones(())]
    numbers = dict(
        lr=0.1, beta1=0.9, beta2=0.9, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False
    )
    assert cost(aten._fused_adam_.default, *args, **numbers) == OpCost(
        "optimizer", 1, 4 * 40 + 4, 3 * 40
    )


def test_a_step_of_adam_moves_30_bytes_for_each_parameter() -> None:
    """It reads and writes weight and moments, reads the gradient, and writes the copy."""
    lists = [[torch.ones(10)] for _ in range(4)]
    copies = [torch.ones(10, dtype=torch.bfloat16)]
    numbers = [1.0, 0.1, 0.9, 0.9, 1e-8, 0.0, 1.0]
    expected = OpCost("optimizer", 1, 4 * 40, 3 * 40 + 20)
    assert cost_of(kernels.adam_step.default, (*lists, copies, *numbers), {}, None) == expected


def test_a_custom_operation_is_one_kernel_over_its_tensors() -> None:
    """As one that launches a Triton kernel: nothing has to be declared."""

    @torch.library.custom_op("rehearsal_test::gated", mutates_args={"total"})
    def gated(x: Tensor, gate: Tensor, total: Tensor) -> Tensor:
        total += 1
        return x * gate

    total = torch.zeros(2)
    args = F32, OTHER, total
    func = torch.ops.rehearsal_test.gated.default
    assert cost_of(func, args, {}, gated(*args)) == OpCost("other", 1, 192 + 8, 96 + 8)
