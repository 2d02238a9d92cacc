"""What experts make of their hidden state, or of its two halves, with hand-written gradients; any
device.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_gspo.kernels import row_kernels_apply
from megatron_gspo.kernels.operators import scaled_gated_unit, scaled_gated_unit_backward


class ExpertUnit(ABC):
    """What an expert makes of the rows of its first product, before its second."""

    @abstractmethod
    def scaled_product(self, hidden: Tensor, probs: Tensor) -> Tensor:
        """[n, f] of ``hidden`` [n, w], times each row's probability [n]."""

    @abstractmethod
    def scaled_backward(
        self, grad: Tensor, hidden: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``scaled_product`` again, and the gradients of ``hidden`` and ``probs``, for that of the
        product, ``grad`` [n, f], which may be overwritten.
        """


class GatedUnit(ExpertUnit):
    """``g sigmoid(alpha g) (l + offset)`` with ``g = min(gate, limit)`` and ``l = clamp(linear,
    -limit, limit)``, of ``gate`` and ``linear``, both [n, f].
    """

    limit: float
    alpha: float
    offset: float

    @abstractmethod
    def product(self, gate: Tensor, linear: Tensor) -> Tensor:
        """[n, f], a new tensor."""

    @abstractmethod
    def backward(self, grad: Tensor, gate: Tensor, linear: Tensor, out: Sequence[Tensor]) -> None:
        """Write the gradients of gate and linear to ``out``, two of [n, f].

        ``grad`` [n, f] may be overwritten.
        """

    def scaled_product(self, hidden: Tensor, probs: Tensor) -> Tensor:
        """The product of the halves of ``hidden`` [n, 2 f]."""
        if row_kernels_apply(hidden, "gated_unit"):
            return scaled_gated_unit(hidden, probs, self.limit, self.alpha, self.offset)
        return scaled(self.product(*hidden.chunk(2, dim=1)), probs)

    def scaled_backward(
        self, grad: Tensor, hidden: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        if row_kernels_apply(hidden, "gated_unit"):
            constants = self.limit, self.alpha, self.offset
            return scaled_gated_unit_backward(grad, hidden, probs, *constants)
        gate, linear = hidden.chunk(2, dim=1)
        product = self.product(gate, linear)
        out = scaled(product, probs)
        grad_probs = product.mul_(grad).sum(1)
        grad_hidden = torch.empty_like(hidden)
        self.backward(scaled(grad, probs), gate, linear, grad_hidden.chunk(2, dim=1))
        return out, grad_hidden, grad_probs


def scaled(rows: Tensor, probs: Tensor) -> Tensor:
    """Times each row's probability, in ``rows``' dtype; multiplied in the wider of the two, as
    Megatron does. Without gradient."""
    # ``out``: no second kernel that converts the product
    return torch.mul(rows, probs[:, None], out=torch.empty_like(rows))


@dataclass(frozen=True)
class SwiGLU(GatedUnit):
    """``silu(gate) * linear`` (Shazeer, arXiv:2002.05202)."""

    limit = math.inf
    alpha = 1.0
    offset = 0.0

    def product(self, gate: Tensor, linear: Tensor) -> Tensor:
        return torch.nn.functional.silu(gate).mul_(linear)

    def backward(self, grad: Tensor, gate: Tensor, linear: Tensor, out: Sequence[Tensor]) -> None:
        grad_gate, grad_linear = out
        torch.mul(grad, torch.nn.functional.silu(gate), out=grad_linear)
        torch.ops.aten.silu_backward.grad_input(grad.mul_(linear), gate, grad_input=grad_gate)


@dataclass(frozen=True)
class ClampedGLU(GatedUnit):
    """With a finite limit: gpt-oss (transformers ``modeling_gpt_oss.py``)."""

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


def squared_relu(x: Tensor) -> Tensor:
    """``max(x, 0) ** 2`` (So et al., arXiv:2109.08668). Megatron's own is compiled at its first call,
    which takes a C++ compiler on a CPU."""
    return torch.nn.functional.relu(x).square()


@dataclass(frozen=True)
class SquaredReLU(ExpertUnit):
    """``squared_relu`` of experts without a gate: ``hidden`` is [n, f]."""

    def scaled_product(self, hidden: Tensor, probs: Tensor) -> Tensor:
        return scaled(squared_relu(hidden), probs)

    def scaled_backward(
        self, grad: Tensor, hidden: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        positive = torch.nn.functional.relu(hidden)
        product = positive.square()
        out = scaled(product, probs)
        grad_probs = product.mul_(grad).sum(1)
        return out, scaled(grad, probs).mul_(positive).mul_(2), grad_probs


SWIGLU = SwiGLU()
SQUARED_RELU = SquaredReLU()
