"""Floating-point operations of matrix products and attention, by torch's own formulas and two more."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import flop_registry

from megatron_gspo.tools.rehearse.known_values import KnownValues


class FlopLog:
    """Counts by phase and operation. Causal attention counts as full attention, as in torch's counter."""

    def __init__(self, values: KnownValues) -> None:
        self.phase = "build"
        self._values = values
        self._counts: dict[str, Counter[str]] = {}

    def count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        packet = func._overloadpacket
        name = packet._qualified_op_name
        if name in _FORMULAS:  # torch's own, where it has one, takes each sequence to be as long as the longest
            flops = _FORMULAS[name](self._values, *args)
        elif (formula := flop_registry.get(packet)) is not None:
            flops = formula(*args, **kwargs, out_val=out)
        else:
            return
        self._counts.setdefault(self.phase, Counter())[name] += int(flops)

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        return {phase: dict(counter) for phase, counter in self._counts.items()}


def _grouped_mm(values: KnownValues, a: Tensor, b: Tensor, *rest: Any) -> int:
    """Rows of one side are divided over the groups, unless both sides have a matrix for each group."""
    if a.dim() == 2 and b.dim() == 2:  # [m, rows] x [rows, n] -> [groups, m, n]
        return 2 * a.shape[0] * a.shape[1] * b.shape[1]
    if a.dim() == 2:
        return 2 * a.shape[0] * a.shape[1] * b.shape[-1]
    if b.dim() == 2:
        return 2 * a.shape[1] * a.shape[2] * b.shape[1]
    return 2 * math.prod(a.shape) * b.shape[-1]


def _varlen_attention(values: KnownValues, query: Tensor, key: Tensor, value: Tensor, bounds_q: Tensor,
                      bounds_k: Tensor | None, *rest: Any) -> int:  # fmt: skip
    known_q, known_k = values.get(bounds_q), values.get(bounds_q if bounds_k is None else bounds_k)
    if known_q is None or known_k is None:
        return 0
    pairs = int((known_q.diff().long() * known_k.diff().long()).sum())
    return 2 * pairs * query.shape[1] * (query.shape[-1] + value.shape[-1])


def _varlen_attention_backward(values: KnownValues, grad: Tensor, query: Tensor, key: Tensor, value: Tensor,
                               *rest: Any) -> int:  # fmt: skip
    """Scores once more and four products: 5 in place of 2. rest: output, its sums, bounds of queries and keys."""
    return _varlen_attention(values, query, key, value, *rest[2:4]) * 5 // 2


_FORMULAS: dict[str, Any] = {
    "aten::_grouped_mm": _grouped_mm,
    "torch_attn::_varlen_attn": _varlen_attention,
    "torch_attn::_varlen_attn_backward": _varlen_attention_backward,
}
