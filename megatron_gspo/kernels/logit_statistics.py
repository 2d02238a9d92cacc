"""The maximum of each row of logits, its softmax's largest entry, and its moment.

For a row x of a tile of logits:

    m = max x        1 / sum exp(x - m)        sum p (x - m)  with  p = exp(x - m) / sum exp(x - m)

In plain torch: ``_summarize`` in ``parallel/vocabulary_tiles.py``, four passes over the logits. Here
the logits are read once: each lane keeps the maximum of what it has seen, and scales its sums where
that grows (Milakov and Gimelshein, arXiv:1805.02867).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 2048
"""That a program holds at a time, of one row."""
WARPS = 8


@triton.jit
def logit_statistics_kernel(
    logits_pointer,
    statistics_pointer,
    width,
    logits_stride,
    statistics_stride,
    WITH_MOMENT: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    # Not -inf: its difference from itself is NaN.
    lowest: tl.constexpr = -3.4028234663852886e38
    maximum = tl.full((COLUMNS,), lowest, tl.float32)
    total = tl.zeros((COLUMNS,), tl.float32)
    moment = tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, width, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        inside = columns < width
        x = tl.load(logits_pointer + row * logits_stride + columns, mask=inside, other=lowest)
        higher = tl.where(x > maximum, x, maximum)
        shift = maximum - higher
        factor = tl.exp(shift)
        term = tl.where(inside, tl.exp(x - higher), 0.0)
        if WITH_MOMENT:
            moment = (moment + total * shift) * factor + term * (x - higher)
        total = total * factor + term
        maximum = higher
    row_maximum = tl.max(maximum, axis=0)
    shift = maximum - row_maximum
    factor = tl.exp(shift)
    row_total = tl.sum(total * factor, axis=0)
    tl.store(statistics_pointer + row, row_maximum)
    tl.store(statistics_pointer + statistics_stride + row, 1.0 / row_total)
    if WITH_MOMENT:
        row_moment = tl.sum((moment + total * shift) * factor, axis=0)
        tl.store(statistics_pointer + 2 * statistics_stride + row, row_moment / row_total)


def logit_statistics(logits: Tensor, statistics: Tensor) -> None:
    """Write m, 1 / sum exp(x - m) and, where there is a third row, the moment of ``logits`` [t, v]
    to ``statistics`` [2 or 3, t]; both in float32, with neighbours in memory along the last
    dimension.
    """
    count, width = logits.shape
    assert logits.dtype == statistics.dtype == torch.float32
    assert logits.stride(1) == statistics.stride(1) == 1
    if count:
        logit_statistics_kernel[(count,)](
            logits,
            statistics,
            width,
            logits.stride(0),
            statistics.stride(0),
            WITH_MOMENT=len(statistics) == 3,
            COLUMNS=COLUMNS,
            num_warps=WARPS,
        )
