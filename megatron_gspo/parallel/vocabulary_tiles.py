"""One rank's part of the log-probabilities and of their gradient, tile by tile; no communication.

A tile is [tokens, vocabulary] of the logits. Loops have the vocabulary outermost, so that a tile of the
weight (and of its gradient) is converted once; a tile on the CPU is small enough to stay in cache through all
element-wise steps.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

TILE = {"cpu": (1024, 384), "cuda": (8192, 8192)}
"""Preferred (tokens, vocabulary) of a tile: what a CPU core's cache holds (a width that is no power of two: rows
that fall on the same cache lines cost the weight gradient's product a sixth), what fills a GPU."""


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
    """Per token [T]: d loss / d x_j = p_j * (slope * (x_j - m) + constant) + [j = label] * label."""

    maximum: Tensor  # m
    shares: Tensor  # [tiles, T], the probability of each of the rank's tiles of the vocabulary
    slope: Tensor | None  # None: no gradient comes through the entropy
    constant: Tensor
    label: Tensor | None  # None: no gradient comes through the log-probabilities

    def cut(self, start: int, end: int) -> "RowFactors":
        """Of tokens [start, end), as columns [t, 1]; shares as [tiles, t, 1]."""
        return RowFactors(
            maximum=self.maximum[start:end, None],
            shares=self.shares[:, start:end, None],
            slope=None if self.slope is None else self.slope[start:end, None],
            constant=self.constant[start:end, None],
            label=None if self.label is None else self.label[start:end, None],
        )


def tile_elements(tokens: int, vocabulary: int, width: int) -> int:
    """Elements alive for one tile: logits, exponentials, a low-precision copy; weight and its gradient."""
    return vocabulary * (3 * tokens + 2 * width)


def tile_shape(tokens: int, rows: int, width: int, budget: int, preferred: tuple[int, int]) -> tuple[int, int]:
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


@dataclass(frozen=True)
class LocalStatistics:
    """What one rank's rows say of every token [T], in tiling.dtype."""

    maximum: Tensor  # m
    total: Tensor  # sum exp(x - m)
    label: Tensor  # the label's logit, 0 where the label is another rank's
    moment: Tensor | None  # sum exp(x - m)(x - m), for the entropy
    tile_maxima: Tensor  # [tiles, T], of each tile of the vocabulary
    tile_totals: Tensor  # [tiles, T]: sum exp(x - tile's maximum)
    kept: Tensor | None  # the logits, tile after tile

    def packed(self) -> Tensor:
        """[3 or 4, T]: maximum, total, label and, if there is one, moment."""
        rows = (self.maximum, self.total, self.label, self.moment)
        return torch.stack([row for row in rows if row is not None])


def local_statistics(
    hidden: Tensor, weight: Tensor, labels: Tensor, tiling: Tiling, with_entropy: bool
) -> LocalStatistics:
    """Per-token statistics over this rank's rows. hidden: [T, h] from ``operand``.

    A tile's own softmax gives its sum too: its largest entry is exp(0) / sum. One fused pass is cheaper than
    exponentials and their sum, and no running maximum ties the tiles together.
    """
    tokens, spans = hidden.shape[0], _spans(tiling.rows, tiling.tile[1])
    # One tile at least, of nothing: with padding only there is none. Not -inf, since -inf * 0 is NaN.
    tiles = hidden.new_zeros((3 if with_entropy else 2, max(1, len(spans)), tokens), dtype=tiling.dtype)
    tiles[0].fill_(torch.finfo(tiling.dtype).min)
    label = hidden.new_zeros((tokens, 1), dtype=tiling.dtype)
    kept = hidden.new_empty(tokens * tiling.rows, dtype=tiling.dtype) if tiling.keep_logits else None
    scratch, place = _Scratch.of(hidden, tiling, 2 if with_entropy else 1), _place(labels, tiling)
    chunks = [
        (t0, t1, hidden[t0:t1], place.cut(t0, t1), label[t0:t1]) for t0, t1 in _spans(tokens, tiling.tile[0])
    ]
    for i, (v0, v1) in enumerate(spans):
        columns = weight[v0:v1].to(hidden.dtype).t()
        for t0, t1, own_hidden, own_place, own_label in chunks:
            buffers = scratch.views(t1 - t0, v1 - v0)
            logits = buffers[0] if kept is None else _kept_tile(kept, tokens, t0, t1, v0, v1)
            _logits(own_hidden, columns, tiling.scale, logits)
            column, inside = own_place.in_tile(i, v1 - v0)
            torch.where(inside, logits.gather(1, column), own_label, out=own_label)
            _summarize(tiles[:, i, t0:t1], logits, buffers)
    if spans:
        tiles[1].reciprocal_()
    maximum = tiles[0].amax(0)
    shift = tiles[0] - maximum
    weights = tiles[1] * shift.exp()
    moment = (weights * shift.add_(tiles[2])).sum(0) if with_entropy else None
    return LocalStatistics(maximum, weights.sum(0), label.squeeze(1), moment, tiles[0], tiles[1], kept)


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
    grad_weight = weight.new_empty(weight.shape) if needed[1] else None
    if grad_weight is not None:
        grad_weight[tiling.rows if tokens else 0 :].zero_()
    scratch, place = _Scratch.of(hidden, tiling, 1 if factors.slope is None else 2), _place(labels, tiling)
    chunks = [
        (t0, t1, hidden[t0:t1], place.cut(t0, t1), factors.cut(t0, t1),
         None if grad_hidden is None else grad_hidden[t0:t1])
        for t0, t1 in _spans(tokens, tiling.tile[0])
    ]  # fmt: skip
    for i, (v0, v1) in enumerate(_spans(tiling.rows, tiling.tile[1])):
        rows = weight[v0:v1].to(hidden.dtype)
        # A view where the dtype is the weight's own, else a buffer that is written back below.
        grad_rows = None if grad_weight is None else grad_weight[v0:v1]
        if grad_rows is not None and grad_rows.dtype != tiling.dtype:
            grad_rows = torch.empty_like(grad_rows, dtype=tiling.dtype)
        for t0, t1, own_hidden, own_place, own_factors, own_grad in chunks:
            buffers = scratch.views(t1 - t0, v1 - v0)
            logits = buffers[0] if kept is None else _kept_tile(kept, tokens, t0, t1, v0, v1)
            if kept is None:
                _logits(own_hidden, rows.t(), tiling.scale, logits)
            grad_logits = _grad_logits(logits, own_place.in_tile(i, v1 - v0), own_factors, i, buffers)
            if grad_rows is not None:
                _add_product(grad_rows, grad_logits.t(), own_hidden, first=t0 == 0)
            if own_grad is not None:
                _add_product(own_grad, grad_logits, rows)
        if grad_weight is not None and grad_rows is not None and grad_weight.dtype != tiling.dtype and tokens:
            grad_weight[v0:v1] = grad_rows
    return grad_hidden, grad_weight


def _spans(total: int, step: int) -> list[tuple[int, int]]:
    return [(start, min(start + step, total)) for start in range(0, total, step)]


@dataclass(frozen=True)
class _Scratch:
    """Buffers that every tile uses again, and their views by shape: a call has few shapes and many tiles."""

    buffers: list[Tensor]
    made: dict[tuple[int, int], list[Tensor]]

    @classmethod
    def of(cls, like: Tensor, tiling: Tiling, count: int) -> "_Scratch":
        return cls([like.new_empty(tiling.tile[0] * tiling.tile[1], dtype=tiling.dtype) for _ in range(count)], {})

    def views(self, tokens: int, vocabulary: int) -> list[Tensor]:
        """Each buffer's head as a contiguous [tokens, vocabulary]: the last, smaller tiles are compact too."""
        shape = tokens, vocabulary
        if shape not in self.made:
            self.made[shape] = [buffer[: tokens * vocabulary].view(shape) for buffer in self.buffers]
        return self.made[shape]


def _kept_tile(kept: Tensor, tokens: int, t0: int, t1: int, v0: int, v1: int) -> Tensor:
    """The tile [t1 - t0, v1 - v0] of the kept logits, contiguous: tiles lie one after the other."""
    start = v0 * tokens + t0 * (v1 - v0)
    return kept[start : start + (t1 - t0) * (v1 - v0)].view(t1 - t0, v1 - v0)


def _logits(hidden: Tensor, columns: Tensor, scale: float, out: Tensor) -> None:
    """out = scale * hidden @ columns, summed and written in out's dtype."""
    if hidden.dtype == out.dtype:
        torch.addmm(out, hidden, columns, beta=0, alpha=scale, out=out)
    else:
        torch.mm(hidden, columns, out_dtype=out.dtype, out=out)
        if scale != 1.0:
            out.mul_(scale)


def _add_product(total: Tensor, a: Tensor, b: Tensor, *, first: bool = False) -> None:
    """total += a @ b, summed in total's dtype; ``a`` is rounded to b's dtype if that is a lower precision. What total
    held is ignored, NaN too, if this is the ``first``."""
    if b.dtype == total.dtype:
        total.addmm_(a, b, beta=0 if first else 1)
    elif first:
        torch.mm(a.to(b.dtype), b, out_dtype=total.dtype, out=total)
    else:
        total.add_(torch.mm(a.to(b.dtype), b, out_dtype=total.dtype))


@dataclass(frozen=True)
class _Place:
    """Where each label lies, [T, 1] each: its tile of the vocabulary, -1 if it is another rank's, and the column in
    it; ``width`` of a tile."""

    tile: Tensor
    column: Tensor
    width: int

    def cut(self, start: int, end: int) -> "_Place":
        """Of tokens [start, end)."""
        return _Place(self.tile[start:end], self.column[start:end], self.width)

    def in_tile(self, i: int, count: int) -> tuple[Tensor, Tensor]:
        """A column [T, 1] that is valid in tile ``i`` of ``count`` ids, and whether the label is there."""
        return self.column if count == self.width else self.column.clamp(max=count - 1), self.tile == i


def _place(labels: Tensor, tiling: Tiling) -> _Place:
    own, width = labels[:, None] - tiling.first, tiling.tile[1]
    tile = torch.where((own >= 0) & (own < tiling.rows), own.div(width, rounding_mode="floor"), -1)
    return _Place(tile, own.remainder(width), width)


def _summarize(stats: Tensor, logits: Tensor, scratch: list[Tensor]) -> None:
    """Of a tile of logits into ``stats`` [2 or 3, t]: maximum m, 1 / sum exp(x - m) and sum p (x - m), p being the
    tile's own softmax. Overwrites scratch."""
    maximum = torch.amax(logits, 1, out=stats[0])
    softmax = torch.softmax(logits, 1, out=scratch[-1])
    torch.amax(softmax, 1, out=stats[1])
    if len(stats) == 3:
        torch.sub(logits, maximum[:, None], out=scratch[0])
        torch.sum(softmax.mul_(scratch[0]), 1, out=stats[2])


def _grad_logits(
    logits: Tensor, place: tuple[Tensor, Tensor], factors: RowFactors, tile: int, scratch: list[Tensor]
) -> Tensor:
    """The loss's gradient for one tile of logits, in scratch[0]; p is the tile's softmax times its share.
    Logits elsewhere are left alone."""
    share = factors.shares[tile]
    softmax = torch.softmax(logits, 1, out=scratch[-1])
    if factors.slope is None:
        grad = softmax.mul_(factors.constant * share)
    else:
        grad = torch.sub(logits, factors.maximum, out=scratch[0])
        grad.mul_(factors.slope * share).add_(factors.constant * share).mul_(softmax)
    if factors.label is not None:
        column, inside = place
        own = grad.gather(1, column)
        # Assigned, not added: one column a row needs no sum, and CUDA's scatter_add_ is not deterministic.
        grad.scatter_(1, column, torch.where(inside, own + factors.label, own))
    return grad
