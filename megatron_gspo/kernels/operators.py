"""The kernels as operators of torch: what they take and return, their shapes, their gradients.

The files of the kernels are imported by the first call, which needs a GPU and Triton. A fake
implementation is enough for a rehearsal.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("megatron_gspo::scaled_gated_unit", mutates_args=())
def scaled_gated_unit(
    hidden: Tensor, probs: Tensor, limit: float, alpha: float, offset: float
) -> Tensor:
    """A gated unit times each row's probability, [n, f]: see ``gated_unit.py``.

    ``hidden`` [n, 2 f], the gate before what it is multiplied with; ``probs`` [n].
    """
    from megatron_gspo.kernels import gated_unit

    return gated_unit.scaled_product(hidden, probs, limit, alpha, offset)


@scaled_gated_unit.register_fake
def _(hidden: Tensor, probs: Tensor, limit: float, alpha: float, offset: float) -> Tensor:
    return hidden.new_empty(hidden.shape[0], hidden.shape[1] // 2)


@torch.library.custom_op("megatron_gspo::scaled_gated_unit_backward", mutates_args=())
def scaled_gated_unit_backward(
    grad: Tensor, hidden: Tensor, probs: Tensor, limit: float, alpha: float, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The output again, [n, f], and the gradients of ``hidden`` [n, 2 f] and, in float32,
    ``probs`` [n], for that of the output, ``grad`` [n, f].
    """
    from megatron_gspo.kernels import gated_unit

    return gated_unit.scaled_product_backward(grad, hidden, probs, limit, alpha, offset)


@scaled_gated_unit_backward.register_fake
def _(
    grad: Tensor, hidden: Tensor, probs: Tensor, limit: float, alpha: float, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.empty_like(grad),
        torch.empty_like(hidden),
        torch.empty_like(probs, dtype=torch.float32),
    )


def _save_gated_unit(
    ctx: Any, inputs: tuple[Tensor, Tensor, float, float, float], output: Tensor
) -> None:
    hidden, probs, *constants = inputs
    ctx.save_for_backward(hidden, probs)
    ctx.constants = constants


def _gated_unit_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
    hidden, probs = ctx.saved_tensors
    _, grad_hidden, grad_probs = scaled_gated_unit_backward(grad, hidden, probs, *ctx.constants)
    return grad_hidden, grad_probs.to(probs.dtype), None, None, None


scaled_gated_unit.register_autograd(_gated_unit_gradients, setup_context=_save_gated_unit)


@torch.library.custom_op("megatron_gspo::logit_statistics", mutates_args={"statistics"})
def logit_statistics(logits: Tensor, statistics: Tensor) -> None:
    """Write statistics of each row of ``logits`` [t, v] to ``statistics`` [2 or 3, t]: see
    ``logit_statistics.py``.
    """
    from megatron_gspo.kernels import logit_statistics as kernel

    kernel.logit_statistics(logits, statistics)


@logit_statistics.register_fake
def _(logits: Tensor, statistics: Tensor) -> None:
    pass


@torch.library.custom_op("megatron_gspo::logit_gradient", mutates_args=())
def logit_gradient(
    logits: Tensor, labels: Tensor, first: int, factors: Tensor, dtype: torch.dtype
) -> Tensor:
    """The gradient of ``logits`` [t, v] in ``dtype``: see ``logit_gradient.py``. Without a gradient
    of its own.
    """
    from megatron_gspo.kernels import logit_gradient as kernel

    return kernel.logit_gradient(logits, labels, first, factors, dtype)


@logit_gradient.register_fake
def _(logits: Tensor, labels: Tensor, first: int, factors: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(logits, dtype=dtype)


@torch.library.custom_op("megatron_gspo::logit_comparison", mutates_args={"statistics"})
def logit_comparison(logits: Tensor, teacher_logits: Tensor, statistics: Tensor) -> None:
    """Write statistics of each row of ``logits`` and ``teacher_logits`` [t, v] to ``statistics``
    [4, t]: see ``logit_comparison.py``.
    """
    from megatron_gspo.kernels import logit_comparison as kernel

    kernel.logit_comparison(logits, teacher_logits, statistics)


@logit_comparison.register_fake
def _(logits: Tensor, teacher_logits: Tensor, statistics: Tensor) -> None:
    pass


@torch.library.custom_op("megatron_gspo::comparison_gradient", mutates_args=())
def comparison_gradient(
    logits: Tensor,
    teacher_logits: Tensor,
    labels: Tensor,
    first: int,
    factors: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """The gradient of ``logits`` [t, v] in ``dtype``: see ``logit_comparison.py``. Without a gradient
    of its own.
    """
    from megatron_gspo.kernels import logit_comparison as kernel

    return kernel.comparison_gradient(logits, teacher_logits, labels, first, factors, dtype)


@comparison_gradient.register_fake
def _(
    logits: Tensor,
    teacher_logits: Tensor,
    labels: Tensor,
    first: int,
    factors: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    return torch.empty_like(logits, dtype=dtype)


@torch.library.custom_op("megatron_gspo::copy_rows", mutates_args=())
def copy_rows(x: Tensor, source: Tensor) -> Tensor:
    """Row ``source[i]`` of ``x`` [n, d] as row i, [c, d]: see ``row_copies.py``. Without a gradient
    of its own.
    """
    from megatron_gspo.kernels import row_copies

    return row_copies.copy_rows(x, source)


@copy_rows.register_fake
def _(x: Tensor, source: Tensor) -> Tensor:
    return x.new_empty(source.shape[0], x.shape[1])


@torch.library.custom_op("megatron_gspo::sum_rows", mutates_args=())
def sum_rows(x: Tensor, slot: Tensor, first: Tensor, most: int) -> Tensor:
    """The sum of the rows ``slot[first[i] : first[i + 1]]``, at most ``most``, of ``x`` [c, d] as
    row i, [n, d]: see ``row_copies.py``. Without a gradient of its own.
    """
    from megatron_gspo.kernels import row_copies

    return row_copies.sum_rows(x, slot, first, most)


@sum_rows.register_fake
def _(x: Tensor, slot: Tensor, first: Tensor, most: int) -> Tensor:
    return x.new_empty(first.shape[0], x.shape[1])


@torch.library.custom_op("megatron_gspo::add_expert_gradients", mutates_args={"totals"})
def add_expert_gradients(totals: Tensor, gradients: Tensor, ends: Tensor, reverse: bool) -> None:
    """Add ``gradients`` [experts, ...] to ``totals``: see ``expert_gradients.py``."""
    from megatron_gspo.kernels import expert_gradients

    expert_gradients.add_expert_gradients(totals, gradients, ends, reverse)


@add_expert_gradients.register_fake
def _(totals: Tensor, gradients: Tensor, ends: Tensor, reverse: bool) -> None:
    pass


@torch.library.custom_op("megatron_gspo::add_embedding_gradient", mutates_args={"total"})
def add_embedding_gradient(
    total: Tensor, rows: Tensor, sorted_ids: Tensor, order: Tensor, ends: Tensor
) -> None:
    """Add ``rows`` [t, h] to the rows of ``total`` [v, h] that ids name: see
    ``embedding_gradient.py``.
    """
    from megatron_gspo.kernels import embedding_gradient

    embedding_gradient.add_embedding_gradient(total, rows, sorted_ids, order, ends)


@add_embedding_gradient.register_fake
def _(total: Tensor, rows: Tensor, sorted_ids: Tensor, order: Tensor, ends: Tensor) -> None:
    pass


@torch.library.custom_op(
    "megatron_gspo::adam_step", mutates_args={"main", "means", "squares", "weights"}
)
def adam_step(
    main: Sequence[Tensor],
    grads: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    weights: Sequence[Tensor],
    clip: float,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: float,
) -> None:
    """A step of Adam for ``main``, its moments and bfloat16 ``weights``: see ``adam.py``."""
    from megatron_gspo.kernels import adam

    adam.adam_step(
        main,
        grads,
        means,
        squares,
        weights,
        clip=clip,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        step=step,
    )


@adam_step.register_fake
def _(
    main: Sequence[Tensor],
    grads: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    weights: Sequence[Tensor],
    clip: float,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: float,
) -> None:
    pass


@torch.library.custom_op("megatron_gspo::rotated_heads", mutates_args=())
def rotated_heads(
    mixed: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    groups: int,
    size: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value, normed and rotated, of ``mixed``: see ``rotated_heads.py``."""
    from megatron_gspo.kernels import rotated_heads as kernel

    return kernel.rotated_heads(mixed, query_weight, key_weight, cos, sin, groups, size, eps)


@rotated_heads.register_fake
def _(
    mixed: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    groups: int,
    size: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, width = mixed.shape
    return (
        mixed.new_empty(tokens, width // size - 2 * groups, size),
        mixed.new_empty(tokens, groups, size),
        mixed.new_empty(tokens, groups, size),
    )


@torch.library.custom_op("megatron_gspo::rotated_heads_backward", mutates_args=())
def rotated_heads_backward(
    grad_query: Tensor,
    grad_key: Tensor,
    grad_value: Tensor,
    mixed: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """The gradients of ``mixed`` and, [2, size] in float32, of both weights."""
    from megatron_gspo.kernels import rotated_heads as kernel

    return kernel.rotated_heads_backward(
        (grad_query, grad_key, grad_value), mixed, query_weight, key_weight, cos, sin, eps
    )


@rotated_heads_backward.register_fake
def _(
    grad_query: Tensor,
    grad_key: Tensor,
    grad_value: Tensor,
    mixed: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    return (
        torch.empty_like(mixed),
        mixed.new_empty(2, grad_query.shape[-1], dtype=torch.float32),
    )


def _save_rotated_heads(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, groups, size, eps = inputs
    ctx.save_for_backward(*tensors)
    ctx.eps = eps


def _rotated_head_gradients(
    ctx: Any, grad_query: Tensor, grad_key: Tensor, grad_value: Tensor
) -> tuple[Tensor | None, ...]:
    grads = (grad_query, grad_key, grad_value)
    grad_mixed, grad_weights = rotated_heads_backward(*grads, *ctx.saved_tensors, ctx.eps)
    weights = ctx.saved_tensors[1:3]
    of_query, of_key = (
        None if weight is None else grad.to(weight.dtype)
        for weight, grad in zip(weights, grad_weights, strict=True)
    )
    return grad_mixed, of_query, of_key, None, None, None, None, None


rotated_heads.register_autograd(_rotated_head_gradients, setup_context=_save_rotated_heads)
