"""One rank's part of the log-probabilities and of their gradient, tile by tile; no communication.

A tile is [tokens, vocabulary] of the logits. Loops have the vocabulary outermost, so that a tile of the
weight (and of its gradient) is converted once; a tile on the CPU is small enough to stay in cache through all
element-wise steps.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

TILE = {"cpu": (1024, 512), "cuda": (8192, 8192)}
"""Preferred (tokens, vocabulary) of a tile: what a CPU core's cache holds, what fills a GPU."""


@dataclass(frozen=True)
class Tiling:
    """How one rank's logits are cut, and in which numbers they are computed."""

    tile: tuple[int, int]  # tokens, vocabulary
    rows: int  # leading rows of the local weight that are true vocabulary; the others are padding
    first: int  # global id of the local weight's first row
    scale: float  # factor on the logits, 1 / temperature
    dtype: torch.dtype  # of logits, statistics and accumulated gradients
    keep_logits: bool  # store them in the forward, [tokens, rows], and spare the backward their product


@dataclass(frozen=True)
class RowFactors:
    """Per token [T]: d loss / d x_j = exp(x_j - m) * (slope * (x_j - m) + constant) + [j = label] * label."""

    maximum: Tensor  # m
    slope: Tensor | None  # None: no gradient comes through the entropy
    constant: Tensor
    label: Tensor | None  # None: no gradient comes through the log-probabilities

    def cut(self, start: int, end: int) -> "RowFactors":
        """Of tokens [start, end), as columns [t, 1]."""
        return RowFactors(
            maximum=self.maximum[start:end, None],
            slope=None if self.slope is None else self.slope[start:end, None],
            constant=self.constant[start:end, None],
            label=None if self.label is None else self.label[start:end, None],
        )


def tile_elements(tokens: int, vocabulary: int, width: int) -> int:
    """Elements alive for one tile: logits, exponentials, a low-precision copy; weight and its gradient."""
    return vocabulary * (3 * tokens + 2 * width)


def tile_shape(
    tokens: int, rows: int, width: int, budget: int, preferred: tuple[int, int]
) -> tuple[int, int]:
    """(tokens, vocabulary) of a tile: the preferred area, or less to stay within ``budget`` elements."""
    chunk = max(1, min(tokens, preferred[0]))
    vocabulary = max(1, min(rows, preferred[0] * preferred[1] // chunk))
    while chunk * vocabulary > 1 and tile_elements(chunk, vocabulary, width) > budget:
        if vocabulary >= chunk:
            vocabulary = (vocabulary + 1) // 2
        else:
            chunk = (chunk + 1) // 2
    return chunk, vocabulary


def operand(hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """``hidden`` in the dtype of the matrix products, which tiles of ``weight`` follow.

    That is ``dtype``, except where the device itself multiplies bfloat16 or float16 into float32.
    """
    low_precision = hidden.dtype == weight.dtype and hidden.dtype in (torch.bfloat16, torch.float16)
    if low_precision and hidden.is_cuda and "dtype_out" in torch.ops.aten.mm.overloads():
        return hidden
    return hidden.to(dtype)


def local_statistics(
    hidden: Tensor, weight: Tensor, labels: Tensor, tiling: Tiling, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Per-token statistics over this rank's rows, [3 or 4, T], and the logits [T, rows] if they are kept.

    Rows: maximum m; s = sum exp(x - m); the label's logit, 0 where the label is another rank's; and with
    entropy e = sum exp(x - m)(x - m). hidden: [T, h] from ``operand``.
    """
    tokens = hidden.shape[0]
    stats = hidden.new_zeros((4 if with_entropy else 3, tokens), dtype=tiling.dtype)
    stats[0].fill_(torch.finfo(tiling.dtype).min)  # not -inf: with padding only, -inf * 0 is NaN
    kept = hidden.new_empty((tokens, tiling.rows), dtype=tiling.dtype) if tiling.keep_logits else None
    buffers = _buffers(hidden, tiling, 2 if with_entropy else 1)
    for v0, v1 in _spans(tiling.rows, tiling.tile[1]):
        rows = weight[v0:v1].to(hidden.dtype)
        for t0, t1 in _spans(tokens, tiling.tile[0]):
            scratch = _views(buffers, t1 - t0, v1 - v0)
            logits = scratch[0] if kept is None else kept[t0:t1, v0:v1]
            _logits(hidden[t0:t1], rows, tiling.scale, logits)
            column, inside = _find(labels[t0:t1] - (tiling.first + v0), v1 - v0)
            stats[2, t0:t1] += torch.where(inside, logits.gather(1, column), 0.0).squeeze(1)
            _accumulate(stats[:, t0:t1], logits, scratch)
    return stats, kept


def local_gradients(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    kept: Tensor | None,
    factors: RowFactors,
    tiling: Tiling,
    needed: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """This rank's part of hidden's gradient, [T, h] in tiling.dtype, and the weight's, in its own dtype.

    Both are summed in tiling.dtype; one that is not needed is None. hidden: [T, h] from ``operand``; kept:
    the logits of the forward, or None.
    """
    tokens = hidden.shape[0]
    grad_hidden = hidden.new_zeros(hidden.shape, dtype=tiling.dtype) if needed[0] else None
    grad_weight = weight.new_zeros(weight.shape) if needed[1] else None
    buffers = _buffers(hidden, tiling, 1 if factors.slope is None else 2)
    for v0, v1 in _spans(tiling.rows, tiling.tile[1]):
        rows = weight[v0:v1].to(hidden.dtype)
        # A view where the dtype is the weight's own, else a copy of zeros that is written back below.
        grad_rows = None if grad_weight is None else grad_weight[v0:v1].to(tiling.dtype)
        for t0, t1 in _spans(tokens, tiling.tile[0]):
            scratch = _views(buffers, t1 - t0, v1 - v0)
            logits = scratch[0] if kept is None else kept[t0:t1, v0:v1]
            if kept is None:
                _logits(hidden[t0:t1], rows, tiling.scale, logits)
            own_labels = labels[t0:t1] - (tiling.first + v0)
            grad_logits = _grad_logits(logits, own_labels, factors.cut(t0, t1), scratch)
            if grad_rows is not None:
                _add_product(grad_rows, grad_logits.t(), hidden[t0:t1])
            if grad_hidden is not None:
                _add_product(grad_hidden[t0:t1], grad_logits, rows)
        if grad_weight is not None and grad_rows is not None and grad_weight.dtype != tiling.dtype:
            grad_weight[v0:v1] = grad_rows
    return grad_hidden, grad_weight


def _spans(total: int, step: int) -> list[tuple[int, int]]:
    return [(start, min(start + step, total)) for start in range(0, total, step)]


def _buffers(like: Tensor, tiling: Tiling, count: int) -> list[Tensor]:
    return [like.new_empty(tiling.tile[0] * tiling.tile[1], dtype=tiling.dtype) for _ in range(count)]


def _views(buffers: list[Tensor], tokens: int, vocabulary: int) -> list[Tensor]:
    """Each buffer's head as a contiguous [tokens, vocabulary]: the last, smaller tiles are compact too."""
    return [buffer[: tokens * vocabulary].view(tokens, vocabulary) for buffer in buffers]


def _logits(hidden: Tensor, rows: Tensor, scale: float, out: Tensor) -> None:
    """out = scale * hidden @ rows.T, summed and written in out's dtype."""
    if hidden.dtype == out.dtype:
        torch.addmm(out, hidden, rows.t(), beta=0, alpha=scale, out=out)
    else:
        torch.mm(hidden, rows.t(), out_dtype=out.dtype, out=out)
        if scale != 1.0:
            out.mul_(scale)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, summed in total's dtype; ``a`` is rounded to b's dtype if that is a lower precision."""
    if b.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total.add_(torch.mm(a.to(b.dtype), b, out_dtype=total.dtype))


def _find(labels: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """For labels relative to a tile of ``count`` ids: a valid column, and whether it is the label's own."""
    column = labels[:, None]
    return column.clamp(0, count - 1), (column >= 0) & (column < count)


def _accumulate(stats: Tensor, logits: Tensor, scratch: list[Tensor]) -> None:
    """Fold a tile of logits into the running m, s (and e): the online softmax. Overwrites scratch."""
    maximum = torch.maximum(stats[0], logits.amax(1))
    shift = stats[0] - maximum
    factor = shift.exp()
    centred = torch.sub(logits, maximum[:, None], out=scratch[0])
    if len(stats) == 4:
        exponentials = torch.exp(centred, out=scratch[1])
        tile_sum = exponentials.sum(1)
        stats[3].add_(stats[1] * shift).mul_(factor).add_(exponentials.mul_(centred).sum(1))
    else:
        tile_sum = centred.exp_().sum(1)
    stats[1].mul_(factor).add_(tile_sum)
    stats[0] = maximum


def _grad_logits(logits: Tensor, labels: Tensor, factors: RowFactors, scratch: list[Tensor]) -> Tensor:
    """The loss's gradient for one tile of logits, in scratch[0]. Logits elsewhere are left alone."""
    grad = torch.sub(logits, factors.maximum, out=scratch[0])
    if factors.slope is None:
        grad.exp_().mul_(factors.constant)
    else:
        exponentials = torch.exp(grad, out=scratch[1])
        grad.mul_(factors.slope).add_(factors.constant).mul_(exponentials)
    if factors.label is not None:
        column, inside = _find(labels, grad.shape[1])
        own = grad.gather(1, column)
        # Assigned, not added: one column a row needs no sum, and CUDA's scatter_add_ is not deterministic.
        grad.scatter_(1, column, torch.where(inside, own + factors.label, own))
    return grad
