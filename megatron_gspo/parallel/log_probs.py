"""Log-probabilities and entropy of tokens from hidden states and a vocabulary-parallel output weight.

For logits ``x = hidden @ weight.T / temperature`` of one token, over the true vocabulary:

    log_prob = x_label - logsumexp(x)            d log_prob / d x_j = [j = label] - p_j
    entropy  = -sum_j p_j log p_j                d entropy  / d x_j = -p_j (log p_j + entropy)

No [tokens, vocabulary] tensor lives at once. The forward collects, tile by tile, a few numbers per token over
this rank's rows; one all-gather per call joins the tensor-parallel ranks, and every rank does the same
arithmetic on the same numbers, so results are equal bit by bit. The backward computes each tile's logits
again. The entropy is summed relative to the maximum, not as logsumexp(x) - sum p x, which would lose it for
large logits.
"""

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from megatron_gspo.parallel.collectives import (
    gather_rows,
    group_rank,
    group_size,
    scatter_summed_rows,
    sum_in_place,
)
from megatron_gspo.parallel.vocabulary_tiles import (
    TILE,
    RowFactors,
    Tiling,
    local_gradients,
    local_statistics,
    operand,
    tile_elements,
    tile_shape,
)

T = TypeVar("T")

CHUNK_BYTES = {"cpu": 32 * 2**20, "cuda": 256 * 2**20}
"""Default budget, in bytes, of what scales with tokens x vocabulary: tiles, and all logits if they fit."""


def log_probs_from_hidden(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    tp_group: ProcessGroup | None = None,
    sequence_parallel: bool = False,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    with_entropy: bool = False,
    chunk_bytes: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of ``labels`` and, if asked for, the entropy of each position's distribution, in nats.

    hidden: [T, h]; with ``sequence_parallel`` this rank's rows [T / tp, h], gathered in the forward and again
        in the backward.
    weight: [V / tp, h], this tensor-parallel rank's rows.
    labels: [T] int64, global ids in [0, vocab_size), equal on all ranks. Positions that do not count hold any
        valid id.
    temperature: divides the logits.
    vocab_size: true size; rows beyond it are padding: probability 0, gradient 0. Default: all ranks' rows.
    chunk_bytes: budget for temporaries that scale with tokens x vocabulary; default CHUNK_BYTES.
        Where the local logits fit in it whole and a gradient is wanted, they are kept, and the backward has a
        third less to do.

    Returns (log_probs [T], entropy [T] | None), float32 (float64 for float64 inputs), equal on all ranks of
    tp_group. bfloat16 inputs are multiplied into float32. Both results are differentiable, and gradients
    arrive complete: hidden's is summed over tp_group (and scattered under sequence_parallel). All ranks of
    tp_group must use the results alike, as each computes its part from the gradients that reach it.

    Raises ValueError for shapes that do not match, a temperature that is not positive, a vocab_size that the
    rows do not hold, or labels outside the vocabulary (these on a CPU only: a GPU would have to wait for the
    check).
    """
    options = _Options(
        tp_group=tp_group,
        sequence_parallel=sequence_parallel and group_size(tp_group) > 1,
        temperature=temperature,
        vocab_size=weight.shape[0] * group_size(tp_group) if vocab_size is None else vocab_size,
        with_entropy=with_entropy,
        chunk_bytes=_default(CHUNK_BYTES, hidden.device) if chunk_bytes is None else chunk_bytes,
    )
    _check(hidden, weight, labels, options)
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return _LogProbs.apply(hidden, weight, labels, options)
    with torch.no_grad():
        return _forward(hidden, weight, labels, options, differentiable=False)[:2]


@dataclass(frozen=True)
class _Options:
    tp_group: ProcessGroup | None
    sequence_parallel: bool
    temperature: float
    vocab_size: int
    with_entropy: bool
    chunk_bytes: int


@dataclass(frozen=True)
class _Saved:
    """What the backward needs beside the inputs: per token [T], and the logits if they were kept."""

    maximum: Tensor
    log_total: Tensor  # log sum exp(x - maximum) over the whole vocabulary
    shares: Tensor  # [tiles, T], the probability of each of this rank's tiles of the vocabulary
    kept: Tensor | None


def _default(by_device: dict[str, T], device: torch.device) -> T:
    return by_device.get(device.type, by_device["cuda"])


def _check(hidden: Tensor, weight: Tensor, labels: Tensor, options: _Options) -> None:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} do not match; "
            "pass [tokens, h] and [rows, h]"
        )
    tp_size = group_size(options.tp_group)
    tokens = hidden.shape[0] * (tp_size if options.sequence_parallel else 1)
    if labels.shape != (tokens,):
        raise ValueError(f"labels {tuple(labels.shape)} must be [{tokens}]: one for each token of all ranks")
    if not options.temperature > 0.0:
        raise ValueError(f"temperature={options.temperature} must be > 0; score greedy samples with 1.0")
    rows = weight.shape[0] * tp_size
    if not 0 < options.vocab_size <= rows:
        raise ValueError(f"vocab_size={options.vocab_size} is not in [1, {rows}]: the rows of all ranks")
    if labels.device.type == "cpu" and tokens:
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= options.vocab_size:
            raise ValueError(
                f"labels reach from {low} to {high}, outside vocab_size={options.vocab_size}; "
                "give masked positions label 0"
            )


def _tiling(hidden: Tensor, weight: Tensor, tokens: int, options: _Options, differentiable: bool) -> Tiling:
    dtype = torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)
    local_rows, width = weight.shape
    first = group_rank(options.tp_group) * local_rows
    rows = min(max(options.vocab_size - first, 0), local_rows)
    budget = options.chunk_bytes // dtype.itemsize
    tile = tile_shape(tokens, rows, width, budget, _default(TILE, hidden.device))
    return Tiling(
        tile=tile,
        rows=rows,
        first=first,
        scale=1.0 / options.temperature,
        dtype=dtype,
        keep_logits=differentiable and tokens * rows + tile_elements(*tile, width) <= budget,
    )


def _forward(
    hidden: Tensor, weight: Tensor, labels: Tensor, options: _Options, differentiable: bool
) -> tuple[Tensor, Tensor | None, _Saved | None]:
    tiling = _tiling(hidden, weight, labels.shape[0], options, differentiable)
    everyone = _all_hidden(hidden, weight, tiling, options)
    local = local_statistics(everyone, weight, labels, tiling, options.with_entropy)
    parts = gather_rows(local.packed()[None], options.tp_group)  # [tp, 3 or 4, T]
    maximum = parts[:, 0].amax(0)
    shift = parts[:, 0] - maximum
    factor = shift.exp()
    total = (parts[:, 1] * factor).sum(0)
    log_total = total.log()
    log_probs = parts[:, 2].sum(0) - maximum - log_total
    entropy = None
    if options.with_entropy:
        entropy = log_total - ((parts[:, 3] + parts[:, 1] * shift) * factor).sum(0) / total
    if not differentiable:
        return log_probs, entropy, None
    shares = local.tile_totals * (local.tile_maxima - maximum).exp_() / total
    return log_probs, entropy, _Saved(maximum, log_total, shares, local.kept)


def _all_hidden(hidden: Tensor, weight: Tensor, tiling: Tiling, options: _Options) -> Tensor:
    if options.sequence_parallel:
        hidden = gather_rows(hidden, options.tp_group)
    return operand(hidden, weight, tiling.dtype)


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, options: _Options
    ) -> tuple[Tensor, Tensor | None]:
        log_probs, entropy, saved = _forward(hidden, weight, labels, options, differentiable=True)
        assert saved is not None
        ctx.options = options
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, labels, entropy, *vars(saved).values())
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden, weight, labels, entropy, *saved = ctx.saved_tensors
        saved, options = _Saved(*saved), ctx.options
        tiling = _tiling(hidden, weight, labels.shape[0], options, differentiable=True)
        factors = _row_factors(grad_log_probs, grad_entropy, entropy, saved, tiling.scale)
        everyone = _all_hidden(hidden, weight, tiling, options)
        grad_hidden, grad_weight = local_gradients(
            everyone, weight, labels, saved.kept, factors, tiling, ctx.needs_input_grad[:2]
        )
        if grad_hidden is not None:
            join = scatter_summed_rows if options.sequence_parallel else sum_in_place
            grad_hidden = join(grad_hidden, options.tp_group).to(hidden.dtype)
        return grad_hidden, grad_weight, None, None


def _row_factors(
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
    entropy: Tensor | None,
    saved: _Saved,
    scale: float,
) -> RowFactors:
    """The gradient of a token's logits as factors of p_j.

    With log p_j = (x_j - maximum) - log total:
    d loss / d x_j = -p_j (grad_log_prob + grad_entropy (log p_j + entropy)) + [j = label] grad_log_prob.
    """
    constant = torch.zeros_like(saved.log_total) if grad_log_probs is None else grad_log_probs * -scale
    label = None if grad_log_probs is None else grad_log_probs * scale
    if grad_entropy is None or entropy is None:
        return RowFactors(saved.maximum, saved.shares, None, constant, label)
    slope = grad_entropy * -scale
    return RowFactors(saved.maximum, saved.shares, slope, constant + slope * (entropy - saved.log_total), label)
