"""Adds the weight gradients of experts to their totals.

    total[e] += gradient[e]        for each expert e that has rows

In plain torch: ``torch._foreach_add_`` in ``mcore/expert_products.py``, one kernel for each expert
where the dtypes differ. The totals lie at equal distances in one buffer, in the order of the
experts or in reverse. The gradient of an expert without rows is not read: the product that makes
them does not write it on every GPU.
"""

import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 2048
"""Of an expert's elements, for each program."""


@triton.jit
def add_expert_gradients_kernel(
    totals_pointer,
    gradients_pointer,
    ends_pointer,
    size,
    step,
    COLUMNS: tl.constexpr,
):
    expert = tl.program_id(1)
    end = tl.load(ends_pointer + expert)
    start = tl.load(ends_pointer + expert - 1, mask=expert > 0, other=0)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < tl.where(end > start, size, 0)
    at = totals_pointer + expert.to(tl.int64) * step + columns
    gradient = tl.load(
        gradients_pointer + expert.to(tl.int64) * size + columns, mask=inside, other=0.0
    )
    total = tl.load(at, mask=inside, other=0.0).to(tl.float32) + gradient.to(tl.float32)
    tl.store(at, total.to(totals_pointer.dtype.element_ty), mask=inside)


def add_expert_gradients(totals: Tensor, gradients: Tensor, ends: Tensor, reverse: bool) -> None:
    """Add ``gradients`` [experts, ...] to ``totals`` of the same shape, whose first dimension may
    have any stride.

    ``ends`` [experts] int32: where each expert's rows end. reverse: the totals are those of the
    last expert first.
    """
    assert totals.shape == gradients.shape and totals[0].is_contiguous()
    experts = len(totals)
    size = totals[0].numel()
    step = totals.stride(0)
    if reverse:
        totals = totals[experts - 1]
        step = -step
    add_expert_gradients_kernel[(triton.cdiv(size, COLUMNS), experts)](
        totals, gradients.contiguous(), ends, size, step, COLUMNS=COLUMNS
    )
