"""Floating-point operations of matrix products and attention, by torch's own formulas and those
of `_FORMULAS`.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
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
    """Counts by phase and operation. Attention of packed sequences counts the pairs that are
    attended. That of padded batches, of which torch's formula ignores what is masked, counts half.

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
    """The formula of an operation; one in place has that of the operation which returns a new
    tensor.

    None: it counts 0.
    """
    name = packet._qualified_op_name
    namespace, _, word = name.removesuffix("_").partition("::")
    plain = getattr(getattr(torch.ops, namespace), word, packet)
    formula = _FORMULAS.get(plain._qualified_op_name)
    if formula is not None:
        return lambda values, args, kwargs, out: formula(values, *args)
    attention = _ATTENTION.get(name)
    if attention is not None:
        names = _argument_names(packet)
        return lambda values, args, kwargs, out: attention(
            values, dict(zip(names, args, strict=False)) | dict(kwargs)
        )
    torch_formula = flop_registry.get(plain)
    if torch_formula is not None and "attention" in word:
        names = _argument_names(packet)
        return lambda values, args, kwargs, out: _half_if_causal(
            torch_formula(*args, **kwargs, out_val=out),
            dict(zip(names, args, strict=False)) | dict(kwargs),
        )
    if torch_formula is not None:
        return lambda values, args, kwargs, out: torch_formula(*args, **kwargs, out_val=out)
    if _PRODUCTS.search(word):
        raise RehearsalError(
            f"the rehearsal has no formula for the floating-point operations of {name}"
        )
    return None


def _argument_names(packet: OpOverloadPacket) -> list[str]:
    return [argument.name for argument in packet.default._schema.arguments]


def _half_if_causal(flops: int, given: Mapping[str, Any]) -> int:
    """FLOPs of causal attention, from those of all queries with all keys. Keys that a mask leaves
    out are computed."""
    return flops // 2 if given.get("is_causal") else flops


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


def _varlen_attention(values: KnownValues, given: Mapping[str, Any]) -> int:
    """Scores and sums of the pairs of a query and a key that it attends. given: arguments of
    ``_varlen_attn`` or of its backward, by name.
    """
    query = given["query"]
    known_q = values.get(given["cu_seq_q"])
    bounds_k = given["cu_seq_k"]
    known_k = known_q if bounds_k is None else values.get(bounds_k)
    if known_q is None or known_k is None:
        raise RehearsalError(
            "the floating-point operations of attention depend on lengths that only a GPU computes"
        )
    window = given.get("window_size") or ((-1, 0) if given.get("is_causal") else (-1, -1))
    lengths = zip(known_q.diff().tolist(), known_k.diff().tolist(), strict=True)
    pairs = sum(_attended_pairs(queries, keys, *window) for queries, keys in lengths)
    return 2 * pairs * query.shape[1] * (query.shape[-1] + given["value"].shape[-1])


def _varlen_attention_backward(values: KnownValues, given: Mapping[str, Any]) -> int:
    """Scores once more and four products: 5 in place of 2."""
    return _varlen_attention(values, given) * 5 // 2


def _attended_pairs(queries: int, keys: int, before: int, after: int) -> int:
    """The queries are the last of the sequence; each attends ``before`` keys before its own and
    ``after`` after it, -1: all.
    """
    own = np.arange(keys - queries, keys)
    first = np.zeros_like(own) if before < 0 else np.maximum(own - before, 0)
    end = np.full_like(own, keys) if after < 0 else np.minimum(own + after + 1, keys)
    return int((end - first).sum())


def _solve_triangular(values: KnownValues, system: Tensor, right: Tensor, *rest: object) -> int:
    """Each row of the solution, or column if the system is on the right, takes those before it:
    half of a product.
    """
    batch = torch.broadcast_shapes(system.shape[:-2], right.shape[:-2])
    return math.prod(batch) * system.shape[-1] * right.shape[-2] * right.shape[-1]


_FORMULAS: dict[str, Callable[..., int]] = {
    "aten::_grouped_mm": _grouped_mm,
    # torch's own takes the dtype of the result for its shape
    "aten::addmm": lambda values, total, a, b, *rest: 2 * a.shape[0] * a.shape[1] * b.shape[1],
    "aten::addmv": lambda values, total, matrix, *rest: 2 * matrix.numel(),
    "aten::dot": lambda values, first, *rest: 2 * first.numel(),
    "aten::linalg_solve_triangular": _solve_triangular,
    "aten::mv": lambda values, matrix, *rest: 2 * matrix.numel(),
}
# torch's own takes each sequence to be as long as the longest
_ATTENTION: dict[str, Callable[[KnownValues, Mapping[str, Any]], int]] = {
    "torch_attn::_varlen_attn": _varlen_attention,
    "torch_attn::_varlen_attn_backward": _varlen_attention_backward,
}
