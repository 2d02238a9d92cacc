"""What gated experts make of the two halves of their hidden state, with hand-written gradients;
any device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class GatedUnit(Protocol):
    """A product of an activation of ``gate`` and ``linear``, both [n, f]."""

    def product(self, gate: Tensor, linear: Tensor) -> Tensor:
        """[n, f], a new tensor."""

    def backward(self, grad: Tensor, gate: Tensor, linear: Tensor, out: Sequence[Tensor]) -> None:
        """Write the gradients of gate and linear to ``out``, two of [n, f].

        ``grad`` [n, f] may be overwritten.
        """


@dataclass(frozen=True)
class SwiGLU:
    """``silu(gate) * linear`` (Shazeer, arXiv:2002.05202)."""

    def product(self, gate: Tensor, linear: Tensor) -> Tensor:
        return torch.nn.functional.silu(gate).mul_(linear)

    def backward(self, grad: Tensor, gate: Tensor, linear: Tensor, out: Sequence[Tensor]) -> None:
        grad_gate, grad_linear = out
        torch.mul(grad, torch.nn.functional.silu(gate), out=grad_linear)
        torch.ops.aten.silu_backward.grad_input(grad.mul_(linear), gate, grad_input=grad_gate)


@dataclass(frozen=True)
class ClampedGLU:
    """``g sigmoid(alpha g) (l + offset)`` with ``g = min(gate, limit)`` and ``l = clamp(linear,
    -limit, limit)``: gpt-oss (transformers ``modeling_gpt_oss.py``)."""

    limit: float
    alpha: float = 1.702
    offset: float = 1.0

    def product(self, gate: Tensor, linear: Tensor) -> Tensor:
        gate = gate.clamp(max=self.limit)
        linear = linear.clamp(-self.limit, self.limit)
        return (gate * self.alpha).sigmoid_().mul_(gate).mul_(linear.add_(self.offset))

    def backward(self, grad: Tensor, gate: Tensor, linear: Tensor, out: Sequence[Tensor]) -> None:
        grad_gate, grad_linear = out
        inside = linear.abs() <= self.limit
        free = gate <= self.limit
        gate = gate.clamp(max=self.limit)
        linear = linear.clamp(-self.limit, self.limit).add_(self.offset)
        share = (gate * self.alpha).sigmoid_()
        torch.mul(grad, gate * share, out=grad_linear).mul_(inside)
        slope = share * (1 + self.alpha * gate * (1 - share))
        torch.mul(grad.mul_(linear), slope, out=grad_gate).mul_(free)


SWIGLU = SwiGLU()
