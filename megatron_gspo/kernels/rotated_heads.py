"""Queries, keys and values of attention from what one product makes: split, norms, rotation.

For a head x of a query or key, with the norm's weight w and the angle of a position:

    n = x / sqrt(mean(x^2) + eps) w
    y = (n1 cos - n2 sin, n2 cos + n1 sin, n3)

n1 and n2 are the halves of the rotated dimensions, n3 the others. A value is copied. With the
gradient g of y, and x' = x / sqrt(mean(x^2) + eps):

    d loss / d n = (g1 cos + g2 sin, g2 cos - g1 sin, g3)
    d loss / d w = sum (d loss / d n) x'                                     over heads and tokens
    d loss / d x = (w d loss / d n - x' mean(w d loss / d n x')) / sqrt(mean(x^2) + eps)

In plain torch: Megatron's ``SelfAttention`` with ``RMSNorm``, and ``rotate`` in
``mcore/operators.py``. Here forward reads and writes everything once, backward reads it twice.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16
"""Heads that a program holds at a time."""
PROGRAMS = 1024
"""Of the backward kernel, at most; each adds up the gradients of the norms over its heads."""


@triton.jit
def _place(rows, is_row, GROUPS: tl.constexpr, QUERIES: tl.constexpr):
    """The token, the group of heads and whether it is a query, key or value, of each row."""
    token = rows // (GROUPS * (QUERIES + 2))
    group = (rows // (QUERIES + 2)) % GROUPS
    member = rows % (QUERIES + 2)
    first = token * GROUPS + group
    is_query = is_row & (member < QUERIES)
    is_key = is_row & (member == QUERIES)
    is_value = is_row & (member > QUERIES)
    return token, first * QUERIES + member, first, is_query, is_key, is_value


@triton.jit
def _weight(query_pointer, key_pointer, columns, inside, is_query, is_key):
    """The norm's weight for each row; 1 for values."""
    of_query = tl.load(query_pointer + columns, mask=inside, other=0.0).to(tl.float32)
    of_key = tl.load(key_pointer + columns, mask=inside, other=0.0).to(tl.float32)
    others = tl.where(is_key[:, None], of_key[None, :], 1.0)
    return tl.where(is_query[:, None], of_query[None, :], others)


@triton.jit
def _store_head(
    pointers_query, pointers_key, pointers_value, head, inside, is_query, is_key, is_value
):
    head = head.to(pointers_query.dtype.element_ty)
    tl.store(pointers_query, head, mask=is_query[:, None] & inside[None, :])
    tl.store(pointers_key, head, mask=is_key[:, None] & inside[None, :])
    tl.store(pointers_value, head, mask=is_value[:, None] & inside[None, :])


@triton.jit
def _load_head(pointers_query, pointers_key, pointers_value, inside, is_query, is_key, is_value):
    head = tl.load(pointers_query, mask=is_query[:, None] & inside[None, :], other=0.0)
    head += tl.load(pointers_key, mask=is_key[:, None] & inside[None, :], other=0.0)
    head += tl.load(pointers_value, mask=is_value[:, None] & inside[None, :], other=0.0)
    return head.to(tl.float32)


@triton.jit(do_not_specialize=["count"])
def rotated_heads_kernel(
    mixed_pointer,
    query_weight_pointer,
    key_weight_pointer,
    cos_pointer,
    sin_pointer,
    query_pointer,
    key_pointer,
    value_pointer,
    count,
    eps,
    GROUPS: tl.constexpr,
    QUERIES: tl.constexpr,
    SIZE: tl.constexpr,
    ROTATED: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    WITH_NORMS: tl.constexpr,
    ROWS: tl.constexpr,
):
    half: tl.constexpr = ROTATED // 2
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = rows < count
    token, query, key, is_query, is_key, is_value = _place(rows, is_row, GROUPS, QUERIES)
    columns = tl.arange(0, HALF)
    inside = columns < half
    wanted = is_row[:, None] & inside[None, :]
    at = mixed_pointer + rows[:, None] * SIZE + columns[None, :]
    first = tl.load(at, mask=wanted, other=0.0).to(tl.float32)
    second = tl.load(at + half, mask=wanted, other=0.0).to(tl.float32)
    squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
    if REST:
        others = ROTATED + tl.arange(0, REST)
        is_other = others < SIZE
        at = mixed_pointer + rows[:, None] * SIZE + others[None, :]
        rest = tl.load(at, mask=is_row[:, None] & is_other[None, :], other=0.0).to(tl.float32)
        squares += tl.sum(rest * rest, axis=1)
    if WITH_NORMS:
        inverse = tl.where(is_value, 1.0, tl.rsqrt(squares / SIZE + eps))[:, None]
        first *= inverse * _weight(
            query_weight_pointer, key_weight_pointer, columns, inside, is_query, is_key
        )
        second *= inverse * _weight(
            query_weight_pointer, key_weight_pointer, columns + half, inside, is_query, is_key
        )
        if REST:
            rest *= inverse * _weight(
                query_weight_pointer, key_weight_pointer, others, is_other, is_query, is_key
            )
    turns = (is_query | is_key)[:, None] & inside[None, :]
    at = token[:, None] * ROTATED + columns[None, :]
    cos = tl.load(cos_pointer + at, mask=turns, other=1.0).to(tl.float32)
    sin = tl.load(sin_pointer + at + half, mask=turns, other=0.0).to(tl.float32)
    at_query = query_pointer + query[:, None] * SIZE + columns[None, :]
    at_key = key_pointer + key[:, None] * SIZE + columns[None, :]
    at_value = value_pointer + key[:, None] * SIZE + columns[None, :]
    turned = first * cos - second * sin
    _store_head(at_query, at_key, at_value, turned, inside, is_query, is_key, is_value)
    turned = second * cos + first * sin
    _store_head(
        at_query + half, at_key + half, at_value + half, turned, inside, is_query, is_key, is_value
    )
    if REST:
        at_query = query_pointer + query[:, None] * SIZE + others[None, :]
        at_key = key_pointer + key[:, None] * SIZE + others[None, :]
        at_value = value_pointer + key[:, None] * SIZE + others[None, :]
        _store_head(at_query, at_key, at_value, rest, is_other, is_query, is_key, is_value)


@triton.jit(do_not_specialize=["count"])
def rotated_heads_backward_kernel(
    grad_query_pointer,
    grad_key_pointer,
    grad_value_pointer,
    mixed_pointer,
    query_weight_pointer,
    key_weight_pointer,
    cos_pointer,
    sin_pointer,
    grad_mixed_pointer,
    sums_pointer,
    count,
    eps,
    GROUPS: tl.constexpr,
    QUERIES: tl.constexpr,
    SIZE: tl.constexpr,
    ROTATED: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    WITH_NORMS: tl.constexpr,
    ROWS: tl.constexpr,
):
    half: tl.constexpr = ROTATED // 2
    columns = tl.arange(0, HALF)
    inside = columns < half
    query_first = tl.zeros((ROWS, HALF), tl.float32)
    query_second = tl.zeros((ROWS, HALF), tl.float32)
    key_first = tl.zeros((ROWS, HALF), tl.float32)
    key_second = tl.zeros((ROWS, HALF), tl.float32)
    if REST:
        others = ROTATED + tl.arange(0, REST)
        is_other = others < SIZE
        query_rest = tl.zeros((ROWS, REST), tl.float32)
        key_rest = tl.zeros((ROWS, REST), tl.float32)
    start = tl.program_id(0) * ROWS
    while start < count:  # of `range` Triton 3.6's interpreter takes no bounds of the program
        rows = (start + tl.arange(0, ROWS)).to(tl.int64)
        is_row = rows < count
        token, query, key, is_query, is_key, is_value = _place(rows, is_row, GROUPS, QUERIES)
        at_query = grad_query_pointer + query[:, None] * SIZE + columns[None, :]
        at_key = grad_key_pointer + key[:, None] * SIZE + columns[None, :]
        at_value = grad_value_pointer + key[:, None] * SIZE + columns[None, :]
        first = _load_head(at_query, at_key, at_value, inside, is_query, is_key, is_value)
        second = _load_head(
            at_query + half, at_key + half, at_value + half, inside, is_query, is_key, is_value
        )
        turns = (is_query | is_key)[:, None] & inside[None, :]
        at = token[:, None] * ROTATED + columns[None, :]
        cos = tl.load(cos_pointer + at, mask=turns, other=1.0).to(tl.float32)
        sin = tl.load(sin_pointer + at + half, mask=turns, other=0.0).to(tl.float32)
        grad_first = first * cos + second * sin
        grad_second = second * cos - first * sin
        if REST:
            at_query = grad_query_pointer + query[:, None] * SIZE + others[None, :]
            at_key = grad_key_pointer + key[:, None] * SIZE + others[None, :]
            at_value = grad_value_pointer + key[:, None] * SIZE + others[None, :]
            grad_rest = _load_head(at_query, at_key, at_value, is_other, is_query, is_key, is_value)
            at_rest = rows[:, None] * SIZE + others[None, :]
            wanted_rest = is_row[:, None] & is_other[None, :]
        at = rows[:, None] * SIZE + columns[None, :]
        wanted = is_row[:, None] & inside[None, :]
        if WITH_NORMS:
            x_first = tl.load(mixed_pointer + at, mask=wanted, other=0.0).to(tl.float32)
            x_second = tl.load(mixed_pointer + at + half, mask=wanted, other=0.0).to(tl.float32)
            squares = tl.sum(x_first * x_first, axis=1) + tl.sum(x_second * x_second, axis=1)
            if REST:
                x_rest = tl.load(mixed_pointer + at_rest, mask=wanted_rest, other=0.0)
                x_rest = x_rest.to(tl.float32)
                squares += tl.sum(x_rest * x_rest, axis=1)
            inverse = tl.where(is_value, 1.0, tl.rsqrt(squares / SIZE + eps))[:, None]
            x_first *= inverse
            x_second *= inverse
            query_first += tl.where(is_query[:, None], grad_first * x_first, 0.0)
            query_second += tl.where(is_query[:, None], grad_second * x_second, 0.0)
            key_first += tl.where(is_key[:, None], grad_first * x_first, 0.0)
            key_second += tl.where(is_key[:, None], grad_second * x_second, 0.0)
            grad_first *= _weight(
                query_weight_pointer, key_weight_pointer, columns, inside, is_query, is_key
            )
            grad_second *= _weight(
                query_weight_pointer, key_weight_pointer, columns + half, inside, is_query, is_key
            )
            along = tl.sum(grad_first * x_first, axis=1) + tl.sum(grad_second * x_second, axis=1)
            if REST:
                x_rest *= inverse
                query_rest += tl.where(is_query[:, None], grad_rest * x_rest, 0.0)
                key_rest += tl.where(is_key[:, None], grad_rest * x_rest, 0.0)
                grad_rest *= _weight(
                    query_weight_pointer, key_weight_pointer, others, is_other, is_query, is_key
                )
                along += tl.sum(grad_rest * x_rest, axis=1)
            along = tl.where(is_value, 0.0, along / SIZE)[:, None]
            grad_first = (grad_first - x_first * along) * inverse
            grad_second = (grad_second - x_second * along) * inverse
            if REST:
                grad_rest = (grad_rest - x_rest * along) * inverse
        dtype = grad_mixed_pointer.dtype.element_ty
        tl.store(grad_mixed_pointer + at, grad_first.to(dtype), mask=wanted)
        tl.store(grad_mixed_pointer + at + half, grad_second.to(dtype), mask=wanted)
        if REST:
            tl.store(grad_mixed_pointer + at_rest, grad_rest.to(dtype), mask=wanted_rest)
        start += tl.num_programs(0) * ROWS
    if WITH_NORMS:
        of_query = sums_pointer + tl.program_id(0) * 2 * SIZE
        of_key = of_query + SIZE
        tl.store(of_query + columns, tl.sum(query_first, axis=0), mask=inside)
        tl.store(of_query + half + columns, tl.sum(query_second, axis=0), mask=inside)
        tl.store(of_key + columns, tl.sum(key_first, axis=0), mask=inside)
        tl.store(of_key + half + columns, tl.sum(key_second, axis=0), mask=inside)
        if REST:
            tl.store(of_query + others, tl.sum(query_rest, axis=0), mask=is_other)
            tl.store(of_key + others, tl.sum(key_rest, axis=0), mask=is_other)


def _sizes(mixed: Tensor, cos: Tensor, groups: int, size: int) -> dict[str, int]:
    """The constants of both kernels."""
    rotated = cos.shape[-1]
    rest = size - rotated
    return dict(
        GROUPS=groups,
        QUERIES=mixed.shape[1] // size // groups - 2,
        SIZE=size,
        ROTATED=rotated,
        HALF=triton.next_power_of_2(rotated // 2),
        REST=triton.next_power_of_2(rest) if rest else 0,
        ROWS=ROWS,
    )


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
    """Query [t, heads, size], key and value [t, groups, size] of ``mixed`` [t, groups * (heads /
    groups + 2) * size], which has each group's queries before its key and value.

    Weights [size], or None without norms; ``cos`` and ``sin`` [t, 1, rotated] as ``rotate`` takes
    them.
    """
    tokens, width = mixed.shape
    heads = width // size - 2 * groups
    query = mixed.new_empty(tokens, heads, size)
    key = mixed.new_empty(tokens, groups, size)
    value = mixed.new_empty(tokens, groups, size)
    count = tokens * width // size
    if count:
        rotated_heads_kernel[(triton.cdiv(count, ROWS),)](
            mixed.contiguous(),
            mixed if query_weight is None else query_weight,
            mixed if key_weight is None else key_weight,
            cos.contiguous(),
            sin.contiguous(),
            query,
            key,
            value,
            count,
            eps,
            **_sizes(mixed, cos, groups, size),
            WITH_NORMS=query_weight is not None,
        )
    return query, key, value


def rotated_heads_backward(
    grads: tuple[Tensor, Tensor, Tensor],
    mixed: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """The gradients of ``mixed`` and, [2, size] in float32, of both weights (0 without norms), for
    those of query, key and value.
    """
    groups, size = grads[1].shape[1:]
    count = mixed.numel() // size
    grad_mixed = torch.empty_like(mixed, memory_format=torch.contiguous_format)
    programs = min(triton.cdiv(count, ROWS), PROGRAMS)
    new_sums = mixed.new_zeros if query_weight is None else mixed.new_empty
    sums = new_sums(programs, 2, size, dtype=torch.float32)
    if count:
        rotated_heads_backward_kernel[(programs,)](
            *(grad.contiguous() for grad in grads),
            mixed.contiguous(),
            mixed if query_weight is None else query_weight,
            mixed if key_weight is None else key_weight,
            cos.contiguous(),
            sin.contiguous(),
            grad_mixed,
            sums,
            count,
            eps,
            **_sizes(mixed, cos, groups, size),
            WITH_NORMS=query_weight is not None,
        )
    return grad_mixed, sums.sum(0)
