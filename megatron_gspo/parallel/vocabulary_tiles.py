"""One rank's part of the log-probabilities and of their gradient, tile by tile; no communication.

A tile is a block [tokens, vocabulary] of the logits. The outer loop is over the vocabulary, so that
a tile of the weight (and of its gradient) is converted once. On a CPU a tile is small enough to
stay in cache through all element-wise steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_gspo.kernels import row_kernels_apply
from megatron_gspo.kernels.operators import (
    comparison_gradient,
    logit_gradient,
    logit_statistics,
)
from megatron_gspo.parallel.main_gradients import add_product
from megatron_gspo.parallel.teacher_tiles import (
    Comparison,
    TeacherFactors,
    TeacherRows,
    compare_tile,
)

TILE = {"cpu": (1024, 384), "cuda": (8192, 8192)}
"""Preferred (tokens, vocabulary) of a tile: one that fits in a CPU core's cache, one that fills a
GPU. On a CPU the width is not a power of two, because rows on the same cache lines slow the weight
gradient's product by a sixth."""


@dataclass(frozen=True)
class Tiling:
    """Tiles of one rank's logits, and the dtype and scale they are computed in."""

    tile: tuple[int, int]  # tokens, vocabulary
    rows: int  # leading rows of the local weight that are true vocabulary; the others are padding
    first: int  # global id of the local weight's first row
    scale: float  # factor on the logits, 1 / temperature
    dtype: torch.dtype  # of logits, statistics and accumulated gradients
    # Keep [tokens, rows] from the forward, so that the backward needs no product for them.
    keep_logits: bool


@dataclass(frozen=True)
class RowFactors:
    """Per token [T]: d loss / d x_j = p_j * (slope * (x_j - m) + constant) + sum_k [j = label_k] *
    label_k.
    """

    maximum: Tensor  # m
    log_total: Tensor  # log sum exp(x - m) over the whole vocabulary
    # [tiles, T], the probability of each of the rank's tiles of the vocabulary.
    tile_probabilities: Tensor
    slope: Tensor | None  # None: no gradient comes through the entropy
    constant: Tensor
    label: Tensor  # [T, K]

    def cut(self, start: int, end: int) -> "RowFactors":
        """The factors of tokens [start, end), as columns [t, 1]; tile_probabilities as [tiles, t,
        1]."""
        return RowFactors(
            maximum=self.maximum[start:end, None],
            log_total=self.log_total[start:end, None],
            tile_probabilities=self.tile_probabilities[:, start:end, None],
            slope=None if self.slope is None else self.slope[start:end, None],
            constant=self.constant[start:end, None],
            label=self.label[start:end],
        )

    def packed(self) -> Tensor:
        """[4 + K, T]: m, log_total, slope (0 in place of None), constant and the labels'."""
        slope = torch.zeros_like(self.maximum) if self.slope is None else self.slope
        rows = torch.stack((self.maximum, self.log_total, slope, self.constant))
        return torch.cat((rows, self.label.t()))


def tile_elements(tokens: int, vocabulary: int, width: int) -> int:
    """Elements allocated for one tile: logits, exponentials, a low-precision copy; weight and
    its gradient.
    """
    return vocabulary * (3 * tokens + 2 * width)


def tile_shape(
    tokens: int, rows: int, width: int, budget: int, preferred: tuple[int, int]
) -> tuple[int, int]:
    """(tokens, vocabulary) of a tile: the preferred area, or a smaller one that fits in
    ``budget`` elements.
    """
    chunk = max(1, min(tokens, preferred[0]))
    vocabulary = max(1, min(rows, preferred[0] * preferred[1] // chunk))
    while chunk * vocabulary > 1 and tile_elements(chunk, vocabulary, width) > budget:
        if vocabulary >= chunk:
            vocabulary = (vocabulary + 1) // 2
        else:
            chunk = (chunk + 1) // 2
    return chunk, vocabulary


def operand(hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """``hidden`` in the dtype of the matrix products, to which tiles of ``weight`` are converted
    too.

    This is ``dtype``, except where the device multiplies bfloat16 or float16 into float32.
    """
    low_precision = hidden.dtype == weight.dtype and hidden.dtype in (torch.bfloat16, torch.float16)
    if low_precision and hidden.is_cuda and "dtype_out" in torch.ops.aten.mm.overloads():
        return hidden
    return hidden.to(dtype)


@dataclass(frozen=True)
class LocalStatistics:
    """Statistics of every token [T] over one rank's rows, in tiling.dtype."""

    maximum: Tensor  # m
    total: Tensor  # sum exp(x - m)
    label: Tensor  # [T, K], the labels' logits, 0 where another rank has the label
    moment: Tensor | None  # sum exp(x - m)(x - m), for the entropy
    tile_maxima: Tensor  # [tiles, T], of each tile of the vocabulary
    tile_totals: Tensor  # [tiles, T]: sum exp(x - tile's maximum)
    kept: list[Tensor]  # the logits, tile after tile, or none
    compared: Comparison | None  # with a teacher
    teacher_tiles: Comparison | None  # [tiles, T], of each tile of the vocabulary

    def packed(self) -> Tensor:
        """[2 + K + ..., T]: maximum, total, the labels, the moment and the comparison with a
        teacher, if there are these."""
        rows = [torch.stack((self.maximum, self.total)), self.label.t()]
        if self.moment is not None:
            rows.append(self.moment[None])
        if self.compared is not None:
            rows.append(self.compared.packed())
        return torch.cat(rows)


def local_statistics(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    tiling: Tiling,
    with_entropy: bool,
    teacher: TeacherRows | None = None,
) -> LocalStatistics:
    """Per-token statistics over this rank's rows. hidden: [T, h] from ``operand``; labels: [T, K].
    teacher: what the logits are compared with.

    The softmax of a tile also gives its sum: its largest entry is exp(0) / sum. One fused pass is
    cheaper than exponentials and their sum, and the tiles need no running maximum.
    """
    tokens = hidden.shape[0]
    spans = _spans(tiling.rows, tiling.tile[1])
    label = hidden.new_zeros(labels.shape, dtype=tiling.dtype)
    # At least one tile: a rank of padding rows only has none.
    tiles = _lowest((3 if with_entropy else 2, max(1, len(spans)), tokens), label)
    kept: list[Tensor] = []
    scratch = _Scratch.of(hidden, tiling, 2 if with_entropy else 1)
    beside = None if teacher is None else _TeacherLogits(teacher, tiling)
    teacher_tiles = _lowest((4, *tiles.shape[1:]), tiles) if beside is not None else None
    positions = _label_positions(labels, tiling)
    chunks = [
        (t0, t1, hidden[t0:t1], positions.cut(t0, t1), label[t0:t1])
        for t0, t1 in _spans(tokens, tiling.tile[0])
    ]
    for i, (v0, v1) in enumerate(spans):
        columns = weight[v0:v1].to(hidden.dtype).t()
        if beside is not None:
            beside.start_tile(v0, v1)
        for t0, t1, chunk_hidden, chunk_positions, chunk_label in chunks:
            buffers = scratch.views(t1 - t0, v1 - v0)
            logits = buffers[0]
            if tiling.keep_logits:  # a tensor a tile: a large one needs memory in one piece
                logits = torch.empty_like(logits)
                kept.append(logits)
            _logits(chunk_hidden, columns, tiling.scale, logits)
            column, inside = chunk_positions.in_tile(i, v1 - v0)
            torch.where(inside, logits.gather(1, column), chunk_label, out=chunk_label)
            if beside is not None and teacher_tiles is not None:
                teacher_logits, *others = beside.of_tokens(t0, t1)
                compare_tile(teacher_tiles[:, i, t0:t1], logits, teacher_logits, others)
            _summarize(tiles[:, i, t0:t1], logits, buffers)
    if spans:
        tiles[1].reciprocal_()
    maximum = tiles[0].amax(0)
    shift = tiles[0] - maximum
    weights = tiles[1] * shift.exp()
    moment = (weights * shift.add_(tiles[2])).sum(0) if with_entropy else None
    of_tiles = None if teacher_tiles is None else Comparison(*teacher_tiles)
    return LocalStatistics(
        maximum=maximum,
        total=weights.sum(0),
        label=label,
        moment=moment,
        tile_maxima=tiles[0],
        tile_totals=tiles[1],
        kept=kept,
        compared=None if of_tiles is None else of_tiles.summed(tiles[0], tiles[1]),
        teacher_tiles=of_tiles,
    )


def local_gradients(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    kept: Sequence[Tensor],
    factors: RowFactors,
    tiling: Tiling,
    needed: tuple[bool, bool],
    total: Tensor | None = None,
    teacher: tuple[TeacherRows, TeacherFactors] | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """This rank's part of hidden's gradient, [T, h] in tiling.dtype, and the weight's, in its own
    dtype.

    Both are summed in tiling.dtype; one that is not needed is None. hidden: [T, h] from
    ``operand``; labels: [T, K]; kept: the logits of the forward, tile after tile, or none. total:
    what the weight's gradient is added to, in tiling.dtype; it is returned. teacher: with a slope.
    """
    tokens = hidden.shape[0]
    grad_hidden = hidden.new_zeros(hidden.shape, dtype=tiling.dtype) if needed[0] else None
    grad_weight = total
    if total is None and needed[1]:
        grad_weight = weight.new_empty(weight.shape)
        grad_weight[tiling.rows if tokens else 0 :].zero_()
    scratch = _Scratch.of(hidden, tiling, 1 if factors.slope is None else 2)
    positions = _label_positions(labels, tiling)
    beside = None if teacher is None else _TeacherLogits(teacher[0], tiling)
    packed = None
    if row_kernels_apply(scratch.buffers[0], "logits"):
        packed = factors.packed()
        if teacher is not None:
            packed = torch.cat((packed, teacher[1].packed()))
    local_labels = labels - tiling.first
    chunks = [
        (
            t0,
            t1,
            hidden[t0:t1],
            positions.cut(t0, t1),
            factors.cut(t0, t1),
            None if grad_hidden is None else grad_hidden[t0:t1],
        )
        for t0, t1 in _spans(tokens, tiling.tile[0])
    ]
    kept_tiles = iter(kept)
    for i, (v0, v1) in enumerate(_spans(tiling.rows, tiling.tile[1])):
        rows = weight[v0:v1].to(hidden.dtype)
        if beside is not None:
            beside.start_tile(v0, v1)
        # A view where the dtype is the weight's, else a buffer that is written back below.
        grad_rows = None if grad_weight is None else grad_weight[v0:v1]
        if grad_rows is not None and grad_rows.dtype != tiling.dtype:
            grad_rows = torch.empty_like(grad_rows, dtype=tiling.dtype)
        for t0, t1, chunk_hidden, chunk_positions, chunk_factors, chunk_grad in chunks:
            buffers = scratch.views(t1 - t0, v1 - v0)
            logits = next(kept_tiles, buffers[0])
            if not kept:
                _logits(chunk_hidden, rows.t(), tiling.scale, logits)
            teacher_tiles = [] if beside is None else beside.of_tokens(t0, t1)
            if packed is not None:
                gradient = comparison_gradient if teacher_tiles else logit_gradient
                grad_logits = gradient(
                    logits,
                    *teacher_tiles,
                    local_labels[t0:t1],
                    v0,
                    packed[:, t0:t1],
                    hidden.dtype,
                )
            else:
                grad_logits = _grad_logits(
                    logits, chunk_positions.in_tile(i, v1 - v0), chunk_factors, i, buffers
                )
                if teacher is not None:
                    teacher[1].cut(t0, t1).subtract_from(
                        grad_logits,
                        i,
                        buffers[-1],
                        chunk_factors.tile_probabilities[i],
                        *teacher_tiles[:2],
                    )
                grad_logits = grad_logits.to(hidden.dtype)
            if grad_rows is not None:
                is_first = total is None and t0 == 0
                add_product(grad_rows, grad_logits.t(), chunk_hidden, first=is_first)
            if chunk_grad is not None:
                add_product(chunk_grad, grad_logits, rows)
        if (
            grad_weight is not None
            and grad_rows is not None
            and grad_weight.dtype != tiling.dtype
            and tokens
        ):
            grad_weight[v0:v1] = grad_rows
    return grad_hidden, grad_weight


def local_top(hidden: Tensor, weight: Tensor, count: int, tiling: Tiling) -> tuple[Tensor, Tensor]:
    """(logits, global ids), [T, count] each, descending: the largest logits of this rank's rows;
    -inf where the rank has fewer. hidden: [T, h] from ``operand``."""
    tokens = hidden.shape[0]
    values = hidden.new_full((tokens, count), -torch.inf, dtype=tiling.dtype)
    ids = torch.zeros((tokens, count), dtype=torch.int64, device=hidden.device)
    scratch = _Scratch.of(hidden, tiling, 1)
    for v0, v1 in _spans(tiling.rows, tiling.tile[1]):
        columns = weight[v0:v1].to(hidden.dtype).t()
        for t0, t1 in _spans(tokens, tiling.tile[0]):
            [logits] = scratch.views(t1 - t0, v1 - v0)
            _logits(hidden[t0:t1], columns, tiling.scale, logits)
            of_tile = logits.topk(min(count, v1 - v0), dim=1)
            tile_ids = of_tile.indices + (tiling.first + v0)
            joined = torch.cat((values[t0:t1], of_tile.values), dim=1)
            joined_ids = torch.cat((ids[t0:t1], tile_ids), dim=1)
            values[t0:t1], order = joined.topk(count, dim=1)
            ids[t0:t1] = joined_ids.gather(1, order)
    return values, ids


def _lowest(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Statistics of no ids: maxima first, then zeros. Not -inf, because -inf * 0 is NaN."""
    values = like.new_zeros(shape)
    values[0].fill_(torch.finfo(like.dtype).min)
    return values


def _spans(total: int, step: int) -> list[tuple[int, int]]:
    return [(start, min(start + step, total)) for start in range(0, total, step)]


@dataclass(frozen=True)
class _Scratch:
    """Buffers reused by every tile, and their views by shape: a call has few shapes and many
    tiles.
    """

    buffers: list[Tensor]
    made: dict[tuple[int, int], list[Tensor]]

    @classmethod
    def of(cls, like: Tensor, tiling: Tiling, count: int) -> "_Scratch":
        """``count`` buffers, or the one for logits where the kernels run, which need no other."""
        size = tiling.tile[0] * tiling.tile[1]
        logits = like.new_empty(size, dtype=tiling.dtype)
        others = 0 if row_kernels_apply(logits, "logits") else count - 1
        return cls([logits, *(torch.empty_like(logits) for _ in range(others))], {})

    def views(self, tokens: int, vocabulary: int) -> list[Tensor]:
        """The start of each buffer as a contiguous [tokens, vocabulary], so that smaller tiles
        are compact too.
        """
        shape = tokens, vocabulary
        if shape not in self.made:
            self.made[shape] = [
                buffer[: tokens * vocabulary].view(shape) for buffer in self.buffers
            ]
        return self.made[shape]


class _TeacherLogits:
    """A teacher's logits of one tile after the other, and buffers of the same shape."""

    def __init__(self, teacher: TeacherRows, tiling: Tiling) -> None:
        self._teacher = teacher
        self._tiling = tiling
        self._scratch = _Scratch.of(teacher.hidden, tiling, 3)
        self._columns = teacher.weight[:0].t()

    def start_tile(self, start: int, end: int) -> None:
        """The next logits are of ids [start, end) of the rows."""
        self._columns = self._teacher.weight[start:end].to(self._teacher.hidden.dtype).t()

    def of_tokens(self, start: int, end: int) -> list[Tensor]:
        """[t, v] of tokens [start, end), and two buffers, or none where the kernels run."""
        buffers = self._scratch.views(end - start, self._columns.shape[1])
        hidden = self._teacher.hidden[start:end]
        _logits(hidden, self._columns, self._tiling.scale, buffers[0])
        return buffers


def _logits(hidden: Tensor, columns: Tensor, scale: float, out: Tensor) -> None:
    """out = scale * hidden @ columns, summed and written in out's dtype."""
    if hidden.dtype == out.dtype:
        torch.addmm(out, hidden, columns, beta=0, alpha=scale, out=out)
    else:
        torch.mm(hidden, columns, out_dtype=out.dtype, out=out)
        if scale != 1.0:
            out.mul_(scale)


@dataclass(frozen=True)
class _LabelPositions:
    """Position of each label, [T, K] each: its tile of the vocabulary (-1 if another rank has it)
    and the column in the tile; ``width`` of a tile."""

    tile: Tensor
    column: Tensor
    width: int

    def cut(self, start: int, end: int) -> "_LabelPositions":
        """The positions of tokens [start, end)."""
        return _LabelPositions(self.tile[start:end], self.column[start:end], self.width)

    def in_tile(self, i: int, count: int) -> tuple[Tensor, Tensor]:
        """Columns [T, K] that are valid in tile ``i`` of ``count`` ids, and whether each label
        is in that tile.
        """
        column = self.column
        if count < self.width:
            column = column.clamp(max=count - 1)
        return column, self.tile == i


def _label_positions(labels: Tensor, tiling: Tiling) -> _LabelPositions:
    local_row = labels - tiling.first
    width = tiling.tile[1]
    is_here = (local_row >= 0) & (local_row < tiling.rows)
    tile = torch.where(is_here, local_row.div(width, rounding_mode="floor"), -1)
    return _LabelPositions(tile, local_row.remainder(width), width)


def _summarize(stats: Tensor, logits: Tensor, scratch: list[Tensor]) -> None:
    """Write the statistics of a tile of logits into ``stats`` [2 or 3, t]: maximum m, 1 / sum exp(x
    - m) and sum p (x - m), with p the softmax of the tile. Overwrites scratch."""
    if row_kernels_apply(logits, "logits"):
        logit_statistics(logits, stats)
        return
    maximum = torch.amax(logits, 1, out=stats[0])
    softmax = torch.softmax(logits, 1, out=scratch[-1])
    torch.amax(softmax, 1, out=stats[1])
    if len(stats) == 3:
        torch.sub(logits, maximum[:, None], out=scratch[0])
        torch.sum(softmax.mul_(scratch[0]), 1, out=stats[2])


def _grad_logits(
    logits: Tensor,
    position: tuple[Tensor, Tensor],
    factors: RowFactors,
    tile: int,
    scratch: list[Tensor],
) -> Tensor:
    """The loss's gradient for one tile of logits; p is the tile's softmax times the tile's
    probability. Overwrites scratch, and ``logits`` only where they are in it."""
    probability = factors.tile_probabilities[tile]
    softmax = torch.softmax(logits, 1, out=scratch[-1])
    if factors.slope is None:
        grad = softmax.mul_(factors.constant * probability)
    else:
        grad = torch.sub(logits, factors.maximum, out=scratch[0])
        grad.mul_(factors.slope * probability).add_(factors.constant * probability).mul_(softmax)
    column, inside = position
    # Labels of other tiles add 0 somewhere: the order of CUDA's sum has no effect unless an id is
    # a label of its token more than once.
    return grad.scatter_add_(1, column, torch.where(inside, factors.label, 0))
