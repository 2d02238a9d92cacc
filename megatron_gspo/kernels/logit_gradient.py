"""The gradient of a loss of log-probabilities and entropies, for logits.

For a row x of logits whose softmax has the maximum m and the log-sum-exp m + log_total, over the
whole vocabulary:

    d loss / d x_j = exp(x_j - m - log_total) (slope (x_j - m) + constant)    + label_k where j is it

In plain torch: ``_grad_logits`` in ``parallel/vocabulary_tiles.py``, and the conversion after it,
four passes. Here float32 is read once, and what the next product multiplies is written once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 2048
"""Of a row, for each program."""


@triton.jit(do_not_specialize=["first"])
def logit_gradient_kernel(
    logits_pointer,
    label_pointer,
    factors_pointer,
    out_pointer,
    first,
    width,
    factors_stride,
    label_count,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * COLUMNS
    columns = start + tl.arange(0, COLUMNS)
    inside = columns < width
    factors = factors_pointer + row
    maximum = tl.load(factors)
    log_total = tl.load(factors + factors_stride)
    slope = tl.load(factors + 2 * factors_stride)
    constant = tl.load(factors + 3 * factors_stride)
    x = tl.load(logits_pointer + row * width + columns, mask=inside, other=0.0) - maximum
    gradient = tl.exp(x - log_total) * (slope * x + constant)
    for k in range(label_count):
        column = tl.load(label_pointer + row * label_count + k) - first
        if (column >= start) & (column < start + COLUMNS):
            of_label = tl.load(factors + (4 + k) * factors_stride)
            gradient += tl.where(columns == column, of_label, 0.0)
    at = out_pointer + row * width + columns
    tl.store(at, gradient.to(out_pointer.dtype.element_ty), mask=inside)


def logit_gradient(
    logits: Tensor, labels: Tensor, first: int, factors: Tensor, dtype: torch.dtype
) -> Tensor:
    """[t, v] in ``dtype`` for ``logits`` [t, v] in float32, of the vocabulary from ``first`` on.

    ``labels`` [t, k] int64: any labels, also ones that are in no column. ``factors`` [4 + k, t]
    float32: m, log_total, slope, constant and those of the labels.
    """
    count, width = logits.shape
    assert logits.dtype == factors.dtype == torch.float32
    assert logits.is_contiguous() and labels.is_contiguous() and factors.stride(1) == 1
    out = torch.empty_like(logits, dtype=dtype)
    if out.numel():
        logit_gradient_kernel[(count, triton.cdiv(width, COLUMNS))](
            logits,
            labels,
            factors,
            out,
            first,
            width,
            factors.stride(0),
            labels.shape[1],
            COLUMNS=COLUMNS,
        )
    return out
