"""Adds rows to the rows of a table that their ids name.

    total[id] += sum of rows[i] with ids[i] = id

In plain torch: ``index_add_``, which adds in any order on a GPU. Here the ids are sorted. A program
has one run of equal ids, adds up its rows in their order, and adds the sum to the table once.
"""

import triton
import triton.language as tl
from torch import Tensor

ROWS = 4
"""Of a run, that a program reads at a time."""
COLUMNS = 1024
"""Of a row, for each program."""


@triton.jit
def add_embedding_gradient_kernel(
    total_pointer,
    rows_pointer,
    sorted_ids_pointer,
    order_pointer,
    ends_pointer,
    count,
    width,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    first = tl.program_id(0)
    row_id = tl.load(sorted_ids_pointer + first).to(tl.int64)
    before = tl.load(sorted_ids_pointer + first - 1, mask=first > 0, other=-1).to(tl.int64)
    # Of the programs of a run the first works; rows that another rank has are left out.
    works = (row_id != before) & (row_id >= 0) & (row_id < count)
    end = tl.load(ends_pointer + first, mask=works, other=0).to(tl.int32)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    start = first
    while start < end:  # of `range` Triton 3.6's interpreter takes no loaded bound
        places = start + tl.arange(0, ROWS)
        source = tl.load(order_pointer + places, mask=places < end, other=0)
        inside = (places < end)[:, None] & (columns < width)[None, :]
        at = rows_pointer + source[:, None] * width + columns[None, :]
        sums += tl.load(at, mask=inside, other=0.0).to(tl.float32)
        start += ROWS
    inside = columns < tl.where(works, width, 0)
    at = total_pointer + row_id * width + columns
    total = tl.load(at, mask=inside, other=0.0).to(tl.float32) + tl.sum(sums, axis=0)
    tl.store(at, total.to(total_pointer.dtype.element_ty), mask=inside)


def add_embedding_gradient(
    total: Tensor, rows: Tensor, sorted_ids: Tensor, order: Tensor, ends: Tensor
) -> None:
    """Add ``rows`` [t, h] to ``total`` [v, h]: row ``order[i]`` to row ``sorted_ids[i]``, if there
    is one.

    ``sorted_ids`` [t] int32 or int64; ``order``, ``ends`` [t] int64; a run of equal ids that has
    position i ends before ``ends[i]``.
    """
    tokens, width = rows.shape
    assert total.is_contiguous() and total.shape[1] == width
    if tokens:
        add_embedding_gradient_kernel[(tokens, triton.cdiv(width, COLUMNS))](
            total,
            rows.contiguous(),
            sorted_ids,
            order,
            ends,
            len(total),
            width,
            ROWS=ROWS,
            COLUMNS=COLUMNS,
        )
