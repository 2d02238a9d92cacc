"""Log-probabilities and entropy of tokens from hidden states and a vocabulary-parallel output
weight.

For logits ``x = hidden @ weight.T / temperature`` of one token, over the true vocabulary, and any
number of labels of it:

    log_prob = x_label - logsumexp(x)            d log_prob / d x_j = [j = label] - p_j
    entropy  = -sum_j p_j log p_j                d entropy  / d x_j = -p_j (log p_j + entropy)

The forward collects, tile by tile, a few numbers per token over this rank's rows. One all-gather per
call combines the tensor-parallel ranks, and every rank does the same arithmetic on the same numbers,
so that results are bitwise equal. The backward recomputes the logits of each tile, or reads them
where there was memory to keep them: the bits are the same. The entropy is summed relative to the
maximum: logsumexp(x) - sum p x would lose its digits for large logits.

The divergences from a teacher (`divergence_from_hidden`, `teacher_tiles.py`) are more numbers of the
same pass, which multiplies the teacher's logits of each tile too.

With ``ScoredRows`` all of this, communication included, is done for the scored positions alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from megatron_gspo.parallel.autograd_context import AutogradContext
from megatron_gspo.parallel.collectives import (
    gather_rows,
    group_rank,
    group_size,
    scatter_summed_rows,
    sum_in_place,
)
from megatron_gspo.parallel.main_gradients import main_gradient, placeholder
from megatron_gspo.parallel.scored_rows import ScoredRows
from megatron_gspo.parallel.teacher_tiles import Comparison, TeacherFactors, TeacherRows
from megatron_gspo.parallel.vocabulary_tiles import (
    TILE,
    RowFactors,
    Tiling,
    local_gradients,
    local_statistics,
    local_top,
    operand,
    tile_elements,
    tile_shape,
)

T = TypeVar("T")

CHUNK_BYTES = {"cpu": 32 * 2**20, "cuda": 256 * 2**20}
"""Default budget in bytes of tensors that scale with tokens x vocabulary: tiles, and all logits
if they fit. A GPU keeps all logits where it has free memory, too.
"""

_SPARE = 16
"""Such a part of a GPU's memory is left for other tensors and for fragments: one of so many."""


@dataclass(frozen=True)
class LogProbOptions:
    """Options of `log_probs_from_hidden`."""

    temperature: float = 1.0
    """Divides the logits; above 0."""

    vocab_size: int | None = None
    """True size of the vocabulary. Rows beyond it are padding: probability 0, gradient 0. None: the
    rows of all ranks."""

    with_entropy: bool = False
    """Compute the entropy too."""

    chunk_bytes: int | None = None
    """Budget in bytes of temporaries that scale with tokens x vocabulary. If the local logits fit in
    it and a gradient is needed, they are kept: the backward has a third less work. None:
    CHUNK_BYTES, and on a GPU its free memory for logits that are kept."""


def log_probs_from_hidden(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    options: LogProbOptions | None = None,
    *,
    tp_group: ProcessGroup | None = None,
    sequence_parallel: bool = False,
    scored: ScoredRows | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities of ``labels`` and, on request, the entropy of each position's distribution,
    in nats.

    Args:
        hidden: [T, h]; with ``sequence_parallel`` this rank's rows [T / tp, h], gathered in the
            forward and again in the backward.
        weight: [V / tp, h], this tensor-parallel rank's rows.
        labels: [T] integers, or [T, K] for K ids of each position, which may repeat: global ids in
            [0, vocab_size), equal on all ranks.
        options: temperature, true vocabulary size, entropy, memory budget.
        scored: the positions to work on, on hidden's device and for the rank's place in tp_group.
            At all others the results are 0, and hidden and labels are not read. None: all
            positions.

    Returns:
        (log_probs of labels' shape, entropy [T] | None), float32 (float64 for float64 inputs),
        equal on all ranks of tp_group. bfloat16 inputs are multiplied into float32. Both are differentiable, and
        the gradients are complete: hidden's is summed over tp_group (and scattered under
        sequence_parallel). All ranks of tp_group must use the results in the same way, because each
        computes its part from its own incoming gradients. The gradient of a weight in Megatron's
        DistributedDataParallel is added to its ``main_grad`` (`main_gradients.py`).

    Raises:
        ValueError: shapes that do not match, a temperature that is not positive, a vocab_size
            outside the rows, or labels outside the vocabulary (checked on a CPU only, because the
            check would synchronise a GPU).
    """
    call = _resolve(options or LogProbOptions(), hidden, weight, tp_group, sequence_parallel)
    log_probs, entropy, _ = _scores(hidden, weight, labels, call, scored, None)
    return log_probs, entropy


@dataclass(frozen=True)
class TeacherHead:
    """What a teacher multiplies to its logits. It gets no gradient."""

    hidden: Tensor
    """[c, h'], its hidden states at this rank's rows that are scored (`ScoredRows.select_own`);
    without `ScoredRows` at all rows."""

    weight: Tensor
    """[V / tp, h'], its output weight's rows of the same ids as the policy's on this rank."""


def divergence_from_hidden(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    teacher: TeacherHead,
    options: LogProbOptions | None = None,
    *,
    tp_group: ProcessGroup | None = None,
    sequence_parallel: bool = False,
    scored: ScoredRows | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """`log_probs_from_hidden`, and in the same pass over the vocabulary the divergences
    ``[T, 2]`` of the policy p from the teacher t at each position, KL(p || t) and KL(t || p), in
    nats. Both have p's gradient.

    The temperature divides the teacher's logits too. Raises ValueError also for a teacher whose
    shapes do not match.
    """
    call = _resolve(options or LogProbOptions(), hidden, weight, tp_group, sequence_parallel)
    call = replace(call, chunk_bytes=call.chunk_bytes // 2)  # for the tiles of two models
    rows = len(hidden) if scored is None else scored.padded
    if teacher.hidden.shape != (rows, teacher.weight.shape[1]) or len(teacher.weight) != len(
        weight
    ):
        raise ValueError(
            f"the teacher's hidden {tuple(teacher.hidden.shape)} and weight"
            f" {tuple(teacher.weight.shape)} must be [{rows}, h'] and [{len(weight)}, h']"
        )
    log_probs, entropy, divergences = _scores(hidden, weight, labels, call, scored, teacher)
    assert divergences is not None
    return log_probs, entropy, divergences


def _scores(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    call: _Resolved,
    scored: ScoredRows | None,
    teacher: TeacherHead | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Log-probs, entropy and divergences of all positions, as far as they are asked for."""
    _check_shapes(hidden, weight, labels, call)
    chosen = (labels if scored is None else labels.index_select(0, scored.positions)).long()
    _check_labels(chosen, call.vocab_size)
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        results = _LogProbs.apply(hidden, weight, chosen, scored, call, teacher)
    else:
        with torch.no_grad():
            *results, _ = _forward(
                _local_rows(hidden, scored), weight, chosen, scored, call, teacher, False
            )
    if scored is not None:
        at_positions = partial(_at_positions, scored.positions, len(labels))
        results = [None if values is None else at_positions(values) for values in results]
    log_probs, entropy, divergences = results
    return log_probs, entropy, divergences


@torch.no_grad()
def top_ids_from_hidden(
    hidden: Tensor,
    weight: Tensor,
    count: int,
    options: LogProbOptions | None = None,
    *,
    tp_group: ProcessGroup | None = None,
    sequence_parallel: bool = False,
    scored: ScoredRows | None = None,
) -> Tensor:
    """[T, count] int64: the ids of the largest logits at each position, descending, equal on all
    ranks of tp_group; 0 where ``scored`` leaves a position out. ``count`` is at most the true size
    of the vocabulary. Arguments as of `log_probs_from_hidden`."""
    call = _resolve(options or LogProbOptions(), hidden, weight, tp_group, sequence_parallel)
    tp_size = group_size(tp_group)
    tokens = len(hidden) * (tp_size if call.sequence_parallel else 1)
    rows = tokens if scored is None else len(scored.positions)
    tiling = _tiling(hidden, weight, rows, call, False)
    all_hidden = _all_hidden(_local_rows(hidden, scored), weight, scored, tiling, call)
    values, ids = local_top(all_hidden, weight, count, tiling)
    # Of each rank after the other: [T, tp x count]
    all_values = torch.cat(gather_rows(values, tp_group).chunk(tp_size), dim=1)
    all_ids = torch.cat(gather_rows(ids, tp_group).chunk(tp_size), dim=1)
    top = all_ids.gather(1, all_values.topk(count, dim=1).indices)
    return top if scored is None else _at_positions(scored.positions, tokens, top)


def _at_positions(positions: Tensor, count: int, values: Tensor) -> Tensor:
    """``values`` [n, ...] at ``positions`` among ``count``, 0 elsewhere; differentiable."""
    return values.new_zeros(count, *values.shape[1:]).index_copy(0, positions, values)


def _columns(values: Tensor) -> Tensor:
    """[T, K] of labels or their values [T, K], or [T], which is K = 1."""
    return values if values.dim() == 2 else values[:, None]


@dataclass(frozen=True)
class _Resolved:
    """LogProbOptions with every default filled in, and the process group."""

    tp_group: ProcessGroup | None
    sequence_parallel: bool
    temperature: float
    vocab_size: int
    with_entropy: bool
    chunk_bytes: int
    keep_where_free: bool
    """Whether logits may be kept in a GPU's free memory, beyond chunk_bytes."""


def _resolve(
    options: LogProbOptions,
    hidden: Tensor,
    weight: Tensor,
    tp_group: ProcessGroup | None,
    sequence_parallel: bool,
) -> _Resolved:
    size = group_size(tp_group)
    rows = weight.shape[0] * size
    budget = _default(CHUNK_BYTES, hidden.device)
    return _Resolved(
        tp_group=tp_group,
        sequence_parallel=sequence_parallel and size > 1,
        temperature=options.temperature,
        vocab_size=rows if options.vocab_size is None else options.vocab_size,
        with_entropy=options.with_entropy,
        chunk_bytes=budget if options.chunk_bytes is None else options.chunk_bytes,
        keep_where_free=options.chunk_bytes is None and hidden.is_cuda,
    )


@dataclass(frozen=True)
class _Saved:
    """Tensors that the backward needs besides the inputs: per token [T], and the tiles of logits
    if they were kept.
    """

    maximum: Tensor
    log_total: Tensor  # log sum exp(x - maximum) over the whole vocabulary
    # [tiles, T], the probability of each of this rank's tiles of the vocabulary.
    tile_probabilities: Tensor
    kept: list[Tensor]
    teacher: _SavedTeacher | None


@dataclass(frozen=True)
class _SavedTeacher:
    """Tensors of a comparison that the backward needs, as those of `_Saved`, and KL(p || t) [T]."""

    maximum: Tensor
    log_total: Tensor
    tile_probabilities: Tensor
    reverse: Tensor


def _default(by_device: dict[str, T], device: torch.device) -> T:
    return by_device.get(device.type, by_device["cuda"])


def _check_shapes(hidden: Tensor, weight: Tensor, labels: Tensor, options: _Resolved) -> None:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} do not match; "
            "pass [tokens, h] and [rows, h]"
        )
    tp_size = group_size(options.tp_group)
    tokens = hidden.shape[0] * (tp_size if options.sequence_parallel else 1)
    if labels.dim() not in (1, 2) or len(labels) != tokens:
        raise ValueError(
            f"labels {tuple(labels.shape)} must be [{tokens}] or [{tokens}, K]: one or K per token"
            " of all ranks"
        )
    if not options.temperature > 0.0:
        raise ValueError(
            f"temperature={options.temperature} must be > 0; score greedy samples with 1.0"
        )
    rows = weight.shape[0] * tp_size
    if not 0 < options.vocab_size <= rows:
        raise ValueError(
            f"vocab_size={options.vocab_size} is not in [1, {rows}]: the rows of all ranks"
        )


def _check_labels(labels: Tensor, vocab_size: int) -> None:
    if labels.device.type == "cpu" and labels.numel():
        low = int(labels.min())
        high = int(labels.max())
        if low < 0 or high >= vocab_size:
            raise ValueError(
                f"labels reach from {low} to {high}, outside vocab_size={vocab_size}; give masked"
                " positions label 0"
            )


def _tiling(
    hidden: Tensor, weight: Tensor, tokens: int, options: _Resolved, may_keep: bool
) -> Tiling:
    """The tiles are the same whether the logits are kept or not."""
    dtype = torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)
    local_rows, width = weight.shape
    first = group_rank(options.tp_group) * local_rows
    rows = min(max(options.vocab_size - first, 0), local_rows)
    budget = options.chunk_bytes // dtype.itemsize
    tile = tile_shape(tokens, rows, width, budget, _default(TILE, hidden.device))
    needed = (tokens * rows + tile_elements(*tile, width)) * dtype.itemsize
    if may_keep:
        room = options.chunk_bytes
        if options.keep_where_free:
            room = max(room, _free_bytes(hidden.device))
        may_keep = needed <= room
    return Tiling(
        tile=tile,
        rows=rows,
        first=first,
        scale=1.0 / options.temperature,
        dtype=dtype,
        keep_logits=may_keep,
    )


def _free_bytes(device: torch.device) -> int:
    """Memory of a GPU for new tensors: what the driver has, and what torch holds without a tensor,
    less what is spared.
    """
    free, total = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + unused - total // _SPARE


def _forward(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    scored: ScoredRows | None,
    options: _Resolved,
    teacher: TeacherHead | None,
    differentiable: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, _Saved | None]:
    """hidden: `_local_rows`; labels: of the scored positions."""
    of_position = _columns(labels)
    tiling = _tiling(hidden, weight, labels.shape[0], options, differentiable)
    all_hidden = _all_hidden(hidden, weight, scored, tiling, options)
    rows = None if teacher is None else _teacher_rows(teacher, scored, tiling, options)
    local = local_statistics(all_hidden, weight, of_position, tiling, options.with_entropy, rows)
    # [tp, rows, T]
    of_ranks = gather_rows(local.packed()[None], options.tp_group)
    maxima = of_ranks[:, 0]
    totals = of_ranks[:, 1]
    after_labels = 2 + of_position.shape[1]
    label_logits = of_ranks[:, 2:after_labels].sum(0).t()
    maximum = maxima.amax(0)
    shift = maxima - maximum
    factor = shift.exp()
    total = (totals * factor).sum(0)
    log_total = total.log()
    log_probs = (label_logits - maximum[:, None] - log_total[:, None]).view(labels.shape)
    entropy = None
    if options.with_entropy:
        moments = of_ranks[:, after_labels] + totals * shift
        entropy = log_total - (moments * factor).sum(0) / total
    divergences = saved_teacher = None
    if local.teacher_tiles is not None:
        compared = Comparison(*of_ranks[:, -4:].unbind(1)).summed(maxima, totals)
        divergences = compared.divergences(total)
        tiles = local.teacher_tiles
        saved_teacher = _SavedTeacher(
            maximum=compared.maximum,
            log_total=compared.total.log(),
            tile_probabilities=tiles.total
            * (tiles.maximum - compared.maximum).exp_()
            / compared.total,
            reverse=divergences[:, 0].clone(),
        )
    if not differentiable:
        return log_probs, entropy, divergences, None
    tile_probabilities = local.tile_totals * (local.tile_maxima - maximum).exp_() / total
    saved = _Saved(maximum, log_total, tile_probabilities, local.kept, saved_teacher)
    return log_probs, entropy, divergences, saved


def _teacher_rows(
    teacher: TeacherHead, scored: ScoredRows | None, tiling: Tiling, options: _Resolved
) -> TeacherRows:
    hidden = _all_hidden(teacher.hidden, teacher.weight, scored, tiling, options)
    return TeacherRows(hidden, teacher.weight)


def _local_rows(hidden: Tensor, scored: ScoredRows | None) -> Tensor:
    """The rows of this rank's hidden states that are worked on or gathered."""
    return hidden if scored is None else scored.select_own(hidden)


def _all_hidden(
    hidden: Tensor, weight: Tensor, scored: ScoredRows | None, tiling: Tiling, options: _Resolved
) -> Tensor:
    """The rows of all labels, from every rank's `_local_rows`."""
    if options.sequence_parallel:
        hidden = gather_rows(hidden, options.tp_group)
    if scored is not None:
        hidden = scored.select_gathered(hidden)
    return operand(hidden, weight, tiling.dtype)


def _joined_gradient(grad: Tensor, scored: ScoredRows | None, options: _Resolved) -> Tensor:
    """The gradient of `_local_rows` from every rank's share of the gradient of all labels' rows."""
    if not options.sequence_parallel:
        return sum_in_place(grad, options.tp_group)
    if scored is not None:
        grad = scored.spread_gathered(grad, group_size(options.tp_group))
    return scatter_summed_rows(grad, options.tp_group)


class _LogProbContext(AutogradContext, Protocol):
    scored: ScoredRows | None
    options: _Resolved
    teacher: TeacherHead | None
    saved_teacher: _SavedTeacher | None
    rows: int
    """The rows of this rank's hidden states."""


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _LogProbContext,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        scored: ScoredRows | None,
        options: _Resolved,
        teacher: TeacherHead | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        local_hidden = _local_rows(hidden, scored)
        log_probs, entropy, divergences, saved = _forward(
            local_hidden, weight, labels, scored, options, teacher, differentiable=True
        )
        assert saved is not None
        ctx.teacher = teacher
        ctx.saved_teacher = saved.teacher
        ctx.scored = scored
        ctx.options = options
        ctx.rows = len(hidden)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            local_hidden,
            weight,
            labels,
            entropy,
            saved.maximum,
            saved.log_total,
            saved.tile_probabilities,
            *saved.kept,
        )
        return log_probs, entropy, divergences

    @staticmethod
    @once_differentiable
    def backward(
        ctx: _LogProbContext,
        grad_log_probs: Tensor | None,
        grad_entropy: Tensor | None,
        grad_divergences: Tensor | None,
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        hidden, weight, labels, entropy, *rest = ctx.saved_tensors
        maximum, log_total, tile_probabilities, *kept = rest
        saved = _Saved(maximum, log_total, tile_probabilities, kept, ctx.saved_teacher)
        scored = ctx.scored
        options = ctx.options
        tiling = _tiling(hidden, weight, labels.shape[0], options, may_keep=False)
        if grad_log_probs is None:
            grad_log_probs = labels.new_zeros(labels.shape, dtype=tiling.dtype)
        factors = _row_factors(_columns(grad_log_probs), grad_entropy, entropy, saved, tiling.scale)
        of_teacher = None
        if ctx.teacher is not None and grad_divergences is not None:
            rows = _teacher_rows(ctx.teacher, scored, tiling, options)
            factors, teacher_factors = _with_teacher(
                factors, grad_divergences * tiling.scale, saved
            )
            of_teacher = (rows, teacher_factors)
        all_hidden = _all_hidden(hidden, weight, scored, tiling, options)
        total = main_gradient(weight) if ctx.needs_input_grad[1] else None
        if total is not None and total.dtype != tiling.dtype:
            total = None
        grad_hidden, grad_weight = local_gradients(
            all_hidden,
            weight,
            _columns(labels),
            saved.kept,
            factors,
            tiling,
            (ctx.needs_input_grad[0], ctx.needs_input_grad[1]),
            total,
            of_teacher,
        )
        if total is not None:
            grad_weight = placeholder(weight)
        if grad_hidden is not None:
            grad_hidden = _joined_gradient(grad_hidden, scored, options).to(hidden.dtype)
            if scored is not None:
                grad_hidden = scored.spread_own(grad_hidden, ctx.rows)
        return grad_hidden, grad_weight, None, None, None, None


def _row_factors(
    grad_log_probs: Tensor,
    grad_entropy: Tensor | None,
    entropy: Tensor | None,
    saved: _Saved,
    scale: float,
) -> RowFactors:
    """The gradient of a token's logits as factors of p_j.

    With log p_j = (x_j - maximum) - log total: d loss / d x_j = -p_j (sum_k grad_log_prob_k +
    grad_entropy (log p_j + entropy)) + sum_k [j = label_k] grad_log_prob_k.
    """
    constant = grad_log_probs.sum(1) * -scale
    if grad_entropy is None or entropy is None:
        slope = None
    else:
        slope = grad_entropy * -scale
        constant = constant + slope * (entropy - saved.log_total)
    return RowFactors(
        maximum=saved.maximum,
        log_total=saved.log_total,
        tile_probabilities=saved.tile_probabilities,
        slope=slope,
        constant=constant,
        label=grad_log_probs * scale,
    )


def _with_teacher(
    factors: RowFactors, weights: Tensor, saved: _Saved
) -> tuple[RowFactors, TeacherFactors]:
    """The factors with the gradient of both divergences, and the part that reads the teacher's
    logits; see `teacher_tiles.py`. weights: [T, 2], of the divergences, per unit of a logit."""
    teacher = saved.teacher
    assert teacher is not None
    reverse, forward = weights.unbind(1)
    slope = reverse if factors.slope is None else factors.slope + reverse
    constant = reverse * (teacher.log_total - saved.log_total - teacher.reverse) + forward
    of_policy = replace(factors, slope=slope, constant=factors.constant + constant)
    of_teacher = TeacherFactors(
        teacher.maximum, teacher.log_total, teacher.tile_probabilities, reverse, forward
    )
    return of_policy, of_teacher
