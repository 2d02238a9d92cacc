"""Copies of rows, and sums over each row's copies.

    copy    y_i = x[source_i]
    sum     y_i = sum_j x[slot_j]           over j = first_i, ..., first_(i+1) - 1, in this order

Where these are the copies of row i, each is the gradient of the other. In plain torch:
``index_select`` and ``embedding_bag`` in ``mcore/token_copies.py``, which move a few bytes at a time.
Here a thread moves 16 bytes, and the loads of a row's copies do not wait for each other.
"""

import triton
import triton.language as tl
from torch import Tensor

ROWS = 4
"""That a program copies."""
SUMS = 2
"""That a program adds up: it holds all copies of a part of them."""
COLUMNS = 512
"""That a program holds at a time."""


@triton.jit(do_not_specialize=["count"])
def copy_rows_kernel(
    x_pointer,
    source_pointer,
    out_pointer,
    count,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = rows < count
    source = tl.load(source_pointer + rows, mask=is_row, other=0)
    for first in range(0, WIDTH, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        inside = is_row[:, None] & (columns < WIDTH)[None, :]
        x = tl.load(x_pointer + source[:, None] * WIDTH + columns[None, :], mask=inside)
        tl.store(out_pointer + rows[:, None] * WIDTH + columns[None, :], x, mask=inside)


@triton.jit(do_not_specialize=["count", "slots"])
def sum_rows_kernel(
    x_pointer,
    slot_pointer,
    first_pointer,
    out_pointer,
    count,
    slots,
    WIDTH: tl.constexpr,
    MOST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = rows < count
    begin = tl.load(first_pointer + rows, mask=is_row, other=0)
    end = tl.load(first_pointer + rows + 1, mask=rows + 1 < count, other=slots)
    end = tl.where(is_row, end, begin)
    for first in range(0, WIDTH, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        inside = columns < WIDTH
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for j in tl.static_range(MOST):
            is_copy = begin + j < end
            slot = tl.load(slot_pointer + begin + j, mask=is_copy, other=0)
            at = slot[:, None] * WIDTH + columns[None, :]
            mask = is_copy[:, None] & inside[None, :]
            total += tl.load(x_pointer + at, mask=mask, other=0.0).to(tl.float32)
        at_out = rows[:, None] * WIDTH + columns[None, :]
        mask = is_row[:, None] & inside[None, :]
        tl.store(out_pointer + at_out, total.to(out_pointer.dtype.element_ty), mask=mask)


def copy_rows(x: Tensor, source: Tensor) -> Tensor:
    """y [c, d] of ``x`` [n, d] and ``source`` [c] int64."""
    count = len(source)
    width = x.shape[1]
    out = x.new_empty(count, width)
    if count:
        copy_rows_kernel[(triton.cdiv(count, ROWS),)](
            x.contiguous(),
            source.contiguous(),
            out,
            count,
            WIDTH=width,
            ROWS=ROWS,
            COLUMNS=COLUMNS,
        )
    return out


def sum_rows(x: Tensor, slot: Tensor, first: Tensor, most: int) -> Tensor:
    """y [n, d] of ``x`` [c, d], ``slot`` [c] and ``first`` [n], both int64, in x's dtype; no row has
    more than ``most`` copies.
    """
    count = len(first)
    width = x.shape[1]
    out = x.new_empty(count, width)
    if count:
        sum_rows_kernel[(triton.cdiv(count, SUMS),)](
            x.contiguous(),
            slot.contiguous(),
            first.contiguous(),
            out,
            count,
            len(slot),
            WIDTH=width,
            MOST=most,
            ROWS=SUMS,
            COLUMNS=COLUMNS,
        )
    return out
