"""A gated unit times a probability for each row, and its gradients.

For gate g, linear part l and probability p of a row, with g' = min(g, limit) and
l' = clamp(l, -limit, limit):

    s = sigmoid(alpha g')        y = p g' s (l' + offset)

SwiGLU has limit inf, alpha 1 and offset 0. With the gradient d of y:

    d loss / d p = sum d g' s (l' + offset)                           over the row
    d loss / d g = d p (l' + offset) s (1 + alpha g' (1 - s))         0 where g > limit
    d loss / d l = d p g' s                                           0 where |l| > limit

In plain torch: ``GatedUnit`` in ``mcore/gated_units.py``. Forward: one read of g and l, one write of
y. Backward: one read of g, l and d, one write of y, which the product with the next weight needs
again, and of the two gradients.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 8
"""Of a program."""
COLUMNS = 256
"""That a program holds at a time."""


@triton.jit
def _unit(gate, linear, limit, alpha, offset):
    """g', its sigmoid, and l' + offset. ``where`` keeps NaN, which ``minimum`` would drop."""
    gate = tl.where(gate > limit, limit, gate)
    linear = tl.where(linear > limit, limit, tl.where(linear < -limit, -limit, linear))
    return gate, tl.sigmoid(alpha * gate), linear + offset


@triton.jit(do_not_specialize=["count"])
def scaled_product_kernel(
    hidden_pointer,
    probs_pointer,
    out_pointer,
    count,
    limit,
    alpha,
    offset,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = rows < count
    probs = tl.load(probs_pointer + rows, mask=is_row, other=0.0).to(tl.float32)
    for first in range(0, WIDTH, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        inside = is_row[:, None] & (columns < WIDTH)[None, :]
        at = rows[:, None] * (2 * WIDTH) + columns[None, :]
        gate = tl.load(hidden_pointer + at, mask=inside, other=0.0).to(tl.float32)
        linear = tl.load(hidden_pointer + at + WIDTH, mask=inside, other=0.0).to(tl.float32)
        gate, share, linear = _unit(gate, linear, limit, alpha, offset)
        out = gate * share * linear * probs[:, None]
        at_out = rows[:, None] * WIDTH + columns[None, :]
        tl.store(out_pointer + at_out, out.to(out_pointer.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count"])
def scaled_product_backward_kernel(
    grad_pointer,
    hidden_pointer,
    probs_pointer,
    out_pointer,
    grad_hidden_pointer,
    grad_probs_pointer,
    count,
    limit,
    alpha,
    offset,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = rows < count
    probs = tl.load(probs_pointer + rows, mask=is_row, other=0.0).to(tl.float32)
    along = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, WIDTH, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        inside = is_row[:, None] & (columns < WIDTH)[None, :]
        at = rows[:, None] * (2 * WIDTH) + columns[None, :]
        at_out = rows[:, None] * WIDTH + columns[None, :]
        raw_gate = tl.load(hidden_pointer + at, mask=inside, other=0.0).to(tl.float32)
        raw_linear = tl.load(hidden_pointer + at + WIDTH, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_pointer + at_out, mask=inside, other=0.0).to(tl.float32)
        gate, share, linear = _unit(raw_gate, raw_linear, limit, alpha, offset)
        active = gate * share
        product = active * linear
        along += product * grad
        grad = grad * probs[:, None]
        grad_gate = grad * linear * (share + alpha * active * (1.0 - share))
        grad_gate = tl.where(raw_gate > limit, 0.0, grad_gate)
        grad_linear = tl.where(tl.abs(raw_linear) > limit, 0.0, grad * active)
        out = product * probs[:, None]
        tl.store(out_pointer + at_out, out.to(out_pointer.dtype.element_ty), mask=inside)
        dtype = grad_hidden_pointer.dtype.element_ty
        tl.store(grad_hidden_pointer + at, grad_gate.to(dtype), mask=inside)
        tl.store(grad_hidden_pointer + at + WIDTH, grad_linear.to(dtype), mask=inside)
    tl.store(grad_probs_pointer + rows, tl.sum(along, axis=1), mask=is_row)


def scaled_product(
    hidden: Tensor, probs: Tensor, limit: float, alpha: float, offset: float
) -> Tensor:
    """y [n, f] of ``hidden`` [n, 2 f], g before l, and ``probs`` [n]; in hidden's dtype."""
    count = hidden.shape[0]
    width = hidden.shape[1] // 2
    out = hidden.new_empty(count, width)
    if count:
        scaled_product_kernel[(triton.cdiv(count, ROWS),)](
            hidden.contiguous(),
            probs.contiguous(),
            out,
            count,
            limit,
            alpha,
            offset,
            WIDTH=width,
            ROWS=ROWS,
            COLUMNS=COLUMNS,
        )
    return out


def scaled_product_backward(
    grad: Tensor, hidden: Tensor, probs: Tensor, limit: float, alpha: float, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    """y, and the gradients of ``hidden`` and, in float32, of ``probs``; ``grad`` [n, f]."""
    count, width = grad.shape
    out = torch.empty_like(grad, memory_format=torch.contiguous_format)
    grad_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    grad_probs = torch.empty_like(probs, dtype=torch.float32)
    if count:
        scaled_product_backward_kernel[(triton.cdiv(count, ROWS),)](
            grad.contiguous(),
            hidden.contiguous(),
            probs.contiguous(),
            out,
            grad_hidden,
            grad_probs,
            count,
            limit,
            alpha,
            offset,
            WIDTH=width,
            ROWS=ROWS,
            COLUMNS=COLUMNS,
        )
    return out, grad_hidden, grad_probs
