"""A policy's logits beside a teacher's: statistics of a tile for both KL divergences, and the gradient
of a loss of them and of log-probabilities, for the policy's logits.

For rows x of the policy and z of the teacher, with p and t their softmax, maxima m and n, and
``d = (x - m) - (z - n)``:

    n        sum exp(z - n)        sum exp(x - m) d        -sum exp(z - n) d

    d loss / d x_j = p_j (slope (x_j - m) + constant - reverse (z_j - n)) - t_j forward
                     + label_k where j is it

In plain torch: ``compare_tile`` and ``TeacherFactors.subtract_from`` in
``parallel/teacher_tiles.py``, two dozen passes over both. Here both are read once for the statistics
and once for the gradient. As in ``logit_statistics.py``, a lane scales its sums where its maximum
grows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 1024
"""That a program holds at a time, of one row."""
WARPS = 8


@triton.jit
def logit_comparison_kernel(
    logits_pointer,
    teacher_pointer,
    statistics_pointer,
    width,
    logits_stride,
    teacher_stride,
    statistics_stride,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    # Not -inf: its difference from itself is NaN.
    lowest: tl.constexpr = -3.4028234663852886e38
    maximum = tl.full((COLUMNS,), lowest, tl.float32)
    teacher_maximum = tl.full((COLUMNS,), lowest, tl.float32)
    total = tl.zeros((COLUMNS,), tl.float32)
    teacher_total = tl.zeros((COLUMNS,), tl.float32)
    reverse = tl.zeros((COLUMNS,), tl.float32)
    forward = tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, width, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        inside = columns < width
        x = tl.load(logits_pointer + row * logits_stride + columns, mask=inside, other=lowest)
        z = tl.load(teacher_pointer + row * teacher_stride + columns, mask=inside, other=lowest)
        higher = tl.where(x > maximum, x, maximum)
        teacher_higher = tl.where(z > teacher_maximum, z, teacher_maximum)
        factor = tl.exp(maximum - higher)
        teacher_factor = tl.exp(teacher_maximum - teacher_higher)
        shift = (maximum - higher) - (teacher_maximum - teacher_higher)
        term = tl.where(inside, tl.exp(x - higher), 0.0)
        teacher_term = tl.where(inside, tl.exp(z - teacher_higher), 0.0)
        difference = (x - higher) - (z - teacher_higher)
        reverse = (reverse + total * shift) * factor + term * difference
        forward = (forward - teacher_total * shift) * teacher_factor - teacher_term * difference
        total = total * factor + term
        teacher_total = teacher_total * teacher_factor + teacher_term
        maximum = higher
        teacher_maximum = teacher_higher
    row_maximum = tl.max(maximum, axis=0)
    teacher_row_maximum = tl.max(teacher_maximum, axis=0)
    factor = tl.exp(maximum - row_maximum)
    teacher_factor = tl.exp(teacher_maximum - teacher_row_maximum)
    shift = (maximum - row_maximum) - (teacher_maximum - teacher_row_maximum)
    of_row = statistics_pointer + row
    tl.store(of_row, teacher_row_maximum)
    tl.store(of_row + statistics_stride, tl.sum(teacher_total * teacher_factor, axis=0))
    tl.store(of_row + 2 * statistics_stride, tl.sum((reverse + total * shift) * factor, axis=0))
    tl.store(
        of_row + 3 * statistics_stride,
        tl.sum((forward - teacher_total * shift) * teacher_factor, axis=0),
    )


@triton.jit(do_not_specialize=["first"])
def comparison_gradient_kernel(
    logits_pointer,
    teacher_pointer,
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
    of_teacher = factors + (4 + label_count) * factors_stride
    teacher_maximum = tl.load(of_teacher)
    teacher_log_total = tl.load(of_teacher + factors_stride)
    reverse = tl.load(of_teacher + 2 * factors_stride)
    forward = tl.load(of_teacher + 3 * factors_stride)
    at = row * width + columns
    x = tl.load(logits_pointer + at, mask=inside, other=0.0) - maximum
    z = tl.load(teacher_pointer + at, mask=inside, other=0.0) - teacher_maximum
    gradient = tl.exp(x - log_total) * (slope * x + constant - reverse * z)
    gradient -= tl.exp(z - teacher_log_total) * forward
    for k in range(label_count):
        column = tl.load(label_pointer + row * label_count + k) - first
        if (column >= start) & (column < start + COLUMNS):
            of_label = tl.load(factors + (4 + k) * factors_stride)
            gradient += tl.where(columns == column, of_label, 0.0)
    tl.store(out_pointer + at, gradient.to(out_pointer.dtype.element_ty), mask=inside)


def logit_comparison(logits: Tensor, teacher_logits: Tensor, statistics: Tensor) -> None:
    """Write the four statistics of ``logits`` and ``teacher_logits`` [t, v] to ``statistics`` [4, t];
    all in float32, with neighbours in memory along the last dimension.
    """
    count, width = logits.shape
    assert logits.dtype == teacher_logits.dtype == statistics.dtype == torch.float32
    assert logits.stride(1) == teacher_logits.stride(1) == statistics.stride(1) == 1
    if count:
        logit_comparison_kernel[(count,)](
            logits,
            teacher_logits,
            statistics,
            width,
            logits.stride(0),
            teacher_logits.stride(0),
            statistics.stride(0),
            COLUMNS=COLUMNS,
            num_warps=WARPS,
        )


def comparison_gradient(
    logits: Tensor,
    teacher_logits: Tensor,
    labels: Tensor,
    first: int,
    factors: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """[t, v] in ``dtype`` for ``logits`` and ``teacher_logits`` [t, v] in float32, of the vocabulary
    from ``first`` on.

    ``labels`` [t, k] int64, as of ``logit_gradient``. ``factors`` [8 + k, t] float32: m, the policy's
    log-total, slope, constant, those of the labels, n, the teacher's log-total, reverse, forward.
    """
    count, width = logits.shape
    assert logits.dtype == teacher_logits.dtype == factors.dtype == torch.float32
    assert logits.is_contiguous() and teacher_logits.is_contiguous()
    assert labels.is_contiguous() and factors.stride(1) == 1
    out = torch.empty_like(logits, dtype=dtype)
    if out.numel():
        comparison_gradient_kernel[(count, triton.cdiv(width, COLUMNS))](
            logits,
            teacher_logits,
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
