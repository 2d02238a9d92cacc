"""Floating-point operations of matrix products and attention, by torch's own formulas and those
of `_FORMULAS`.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor
from torch._ops import OpOverloadPacket
from torch.utils.flop_counter import flop_registry

from megatron_gspo.tools.rehearse.known_values import KnownValues
from megatron_gspo.tools.rehearse.operation import Args, Kwargs, Operation, Result
from megatron_gspo.tools.rehearse.rehearsal_error import RehearsalError

# Words of an operation's name that multiply matrices or solve systems of equations. All others read
# or write each element a fixed number of times and count 0.
_PRODUCTS = re.compile(
    r"(^|_)((add|badd|sparse)?b?mm|gemm|addmv|mv|matmul|dot|vdot|inner|ger|addr|addbmm|baddbmm|einsum|tensordot|linear"
    r"|bilinear|trilinear|conv(olution)?(\dd)?|attention|attn|cdist|lstm|gru|rnn|solve|cholesky|qr|svd|eigh?|inv(erse)?"
    r"|det|lu|lstsq|pinv)(_|$)"
)


class FlopLog:
    """Counts by phase and operation. Causal attention counts as full attention, as in torch's
    counter.

    Raises ``RehearsalError`` for a product without a formula, and for attention of unknown lengths.
    """

    def __init__(self, values: KnownValues) -> None:
        self.phase = "build"
        self._values = values
        self._counts: dict[str, Counter[str]] = {}

    def count(self, func: Operation, args: Args, kwargs: Kwargs, out: Result) -> int:
        """Count a call; returns what it counted."""
        packet = func._overloadpacket
        formula = _formula(packet)
        if formula is None:
            return 0
        flops = int(formula(self._values, args, kwargs, out))
        self._counts.setdefault(self.phase, Counter())[packet._qualified_op_name] += flops
        return flops

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        return {phase: dict(counter) for phase, counter in self._counts.items()}


Formula = Callable[[KnownValues, Args, Kwargs, Result], int]


@functools.cache
def _formula(packet: OpOverloadPacket) -> Formula | None:
    """Of an operation; one in place has that of the operation which returns a new tensor.

    None: it counts 0.
    """
    name = packet._qualified_op_name
    namespace, _, word = name.removesuffix("_").partition("::")
    plain = getattr(getattr(torch.ops, namespace), word, packet)
    formula = _FORMULAS.get(plain._qualified_op_name)
    if formula is not None:
        return lambda values, args, kwargs, out: formula(values, *args)
    torch_formula = flop_registry.get(plain)
    if torch_formula is not None:
        return lambda values, args, kwargs, out: torch_formula(*args, **kwargs, out_val=out)
    if _PRODUCTS.search(word):
        raise RehearsalError(
            f"the rehearsal has no formula for the floating-point operations of {name}"
        )
    return None


def _grouped_mm(values: KnownValues, a: Tensor, b: Tensor, *rest: object) -> int:
    """Rows of one side are divided over the groups, unless both sides have a matrix for each
    group.
    """
    if a.dim() == 2 and b.dim() == 2:  # [m, rows] x [rows, n] -> [groups, m, n]
        return 2 * a.shape[0] * a.shape[1] * b.shape[1]
    if a.dim() == 2:
        return 2 * a.shape[0] * a.shape[1] * b.shape[-1]
    if b.dim() == 2:
        return 2 * a.shape[1] * a.shape[2] * b.shape[1]
    return 2 * math.prod(a.shape) * b.shape[-1]


def _varlen_attention(
    values: KnownValues,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds_q: Tensor,
    bounds_k: Tensor | None,
    *rest: object,
) -> int:
    known_q = values.get(bounds_q)
    known_k = values.get(bounds_q if bounds_k is None else bounds_k)
    if known_q is None or known_k is None:
        raise RehearsalError(
            "the floating-point operations of attention depend on lengths that only a GPU computes"
        )
    pairs = int((known_q.diff().long() * known_k.diff().long()).sum())
    return 2 * pairs * query.shape[1] * (query.shape[-1] + value.shape[-1])


def _varlen_attention_backward(
    values: KnownValues,
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sums: Tensor,
    bounds_q: Tensor,
    bounds_k: Tensor | None,
    *rest: object,
) -> int:
    """Scores once more and four products: 5 in place of 2."""
    return _varlen_attention(values, query, key, value, bounds_q, bounds_k) * 5 // 2


def _solve_triangular(values: KnownValues, system: Tensor, right: Tensor, *rest: object) -> int:
    """Each row of the solution, or column if the system is on the right, takes those before it:
    half of a product.
    """
    batch = torch.broadcast_shapes(system.shape[:-2], right.shape[:-2])
    return math.prod(batch) * system.shape[-1] * right.shape[-2] * right.shape[-1]


# torch's own, where it has one of attention, takes each sequence to be as long as the longest
_FORMULAS: dict[str, Callable[..., int]] = {
    "aten::_grouped_mm": _grouped_mm,
    # torch's own takes the dtype of the result for its shape
    "aten::addmm": lambda values, total, a, b, *rest: 2 * a.shape[0] * a.shape[1] * b.shape[1],
    "aten::addmv": lambda values, total, matrix, *rest: 2 * matrix.numel(),
    "aten::dot": lambda values, first, *rest: 2 * first.numel(),
    "aten::linalg_solve_triangular": _solve_triangular,
    "aten::mv": lambda values, matrix, *rest: 2 * matrix.numel(),
    "torch_attn::_varlen_attn": _varlen_attention,
    "torch_attn::_varlen_attn_backward": _varlen_attention_backward,
}
