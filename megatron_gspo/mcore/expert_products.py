"""The matrix products of experts whose rows are next to each other: one after the other, or in
one kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_gspo.kernels import row_kernels_apply
from megatron_gspo.kernels.operators import add_expert_gradients
from megatron_gspo.mcore.equidistant import Equidistant

STRIDE = 8  # the grouped kernel takes bfloat16 in strides of 16 bytes


class ExpertProducts(Protocol):
    """The matrix products of experts whose rows are next to each other."""

    def rows_by_weights(
        self, rows: Tensor, weights: Sequence[Tensor], *, transpose: bool
    ) -> Tensor:
        """``rows`` [n, a] of each expert times its weight [a, b], or [b, a] with ``transpose``;
        [n, b].
        """

    def weight_gradients(self, grad: Tensor, rows: Tensor) -> Sequence[Tensor]:
        """``grad.t() @ rows`` of each expert's rows: ``grad`` [n, b], ``rows`` [n, a], results
        [b, a].
        """

    def add_weight_gradients(self, totals: Sequence[Tensor], grad: Tensor, rows: Tensor) -> None:
        """Add ``weight_gradients`` to ``totals``, of each expert [b, a]."""

    def repeated(self, vectors: Sequence[Tensor], count: int) -> Tensor:
        """Each expert's vector [a] for each of its rows, [count, a]."""

    def sums(self, rows: Tensor) -> Sequence[Tensor]:
        """The sum of each expert's rows: ``rows`` [n, a], results [a]."""


@dataclass(frozen=True)
class LoopedProducts:
    """One product after the other, in any dtype. counts: rows of each expert, on the host."""

    counts: list[int]

    def rows_by_weights(
        self, rows: Tensor, weights: Sequence[Tensor], *, transpose: bool
    ) -> Tensor:
        result = rows.new_empty(rows.shape[0], weights[0].shape[0 if transpose else 1])
        for expert_rows, weight, out in zip(
            rows.split(self.counts), weights, result.split(self.counts), strict=True
        ):
            torch.mm(expert_rows, weight.t() if transpose else weight, out=out)
        return result

    def weight_gradients(self, grad: Tensor, rows: Tensor) -> Sequence[Tensor]:
        experts = zip(grad.split(self.counts), rows.split(self.counts), strict=True)
        return [expert_grad.t() @ expert_rows for expert_grad, expert_rows in experts]

    def add_weight_gradients(self, totals: Sequence[Tensor], grad: Tensor, rows: Tensor) -> None:
        experts = zip(totals, grad.split(self.counts), rows.split(self.counts), strict=True)
        for total, expert_grad, expert_rows in experts:
            if not len(expert_rows):
                continue
            if total.dtype == rows.dtype:
                total.addmm_(expert_grad.t(), expert_rows)
            else:
                total += expert_grad.t() @ expert_rows

    def repeated(self, vectors: Sequence[Tensor], count: int) -> Tensor:
        rows = zip(vectors, self.counts, strict=True)
        return torch.cat([vector.expand(expert_count, -1) for vector, expert_count in rows])

    def sums(self, rows: Tensor) -> Sequence[Tensor]:
        return [expert_rows.sum(0) for expert_rows in rows.split(self.counts)]


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """The tensors of each expert as one, [experts, ...]: a view where they are at equal distances
    in one buffer, else a copy.

    In Megatron's parameter buffer they are, the last expert first. Where weights are not in such
    a buffer, as those under adapters, a copy takes for 30B-A3B with EP 8 at most 96 MiB.
    """
    joined = Equidistant.of(tensors)
    is_aligned = all(tensor.storage_offset() % STRIDE == 0 for tensor in tensors)
    if joined is None or joined.reverse or not is_aligned or len(tensors) == 1:
        return torch.stack(tuple(tensors))
    return joined.tensor


def leaves_gaps(device: torch.device) -> bool:
    """Whether the grouped kernel doesn't write the weight gradient of an expert without rows, as on
    Blackwell (pytorch#172439). Hopper's writes zeros.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (10, 0)


@dataclass(frozen=True)
class GroupedProducts:
    """One kernel for all experts. offsets: [experts] int32, where each expert's rows end.

    empty: [experts] bool, where an expert has no row; None where the kernel itself writes the
    weight gradient of such an expert.

    The kernel needs the weights in one tensor: see ``stacked``.
    """

    offsets: Tensor
    empty: Tensor | None

    @classmethod
    def of(cls, counts: Tensor) -> GroupedProducts:
        """``counts`` [experts]: rows of each expert, on their device."""
        offsets = counts.cumsum(0, dtype=torch.int32)
        return cls(offsets, counts == 0 if leaves_gaps(counts.device) else None)

    def rows_by_weights(
        self, rows: Tensor, weights: Sequence[Tensor], *, transpose: bool
    ) -> Tensor:
        by_expert = stacked(weights)
        if transpose:
            by_expert = by_expert.transpose(1, 2)
        return torch.nn.functional.grouped_mm(rows, by_expert, offs=self.offsets)

    def weight_gradients(self, grad: Tensor, rows: Tensor) -> Sequence[Tensor]:
        result = torch.nn.functional.grouped_mm(grad.t(), rows, offs=self.offsets)
        self._fill_gaps(result)
        return result.unbind(0)

    def add_weight_gradients(self, totals: Sequence[Tensor], grad: Tensor, rows: Tensor) -> None:
        result = torch.nn.functional.grouped_mm(grad.t(), rows, offs=self.offsets)
        buffer = Equidistant.of(totals) if row_kernels_apply(result, "expert_gradients") else None
        if buffer is not None:
            add_expert_gradients(buffer.tensor, result, self.offsets, buffer.reverse)
        else:
            self._fill_gaps(result)
            torch._foreach_add_(list(totals), list(result.unbind(0)))

    def _fill_gaps(self, gradients: Tensor) -> None:
        if self.empty is not None:
            gradients.masked_fill_(self.empty[:, None, None], 0.0)

    def repeated(self, vectors: Sequence[Tensor], count: int) -> Tensor:
        positions = torch.arange(count, dtype=torch.int32, device=self.offsets.device)
        expert = torch.searchsorted(self.offsets, positions, right=True)
        return torch.stack(tuple(vectors)).index_select(0, expert)

    def sums(self, rows: Tensor) -> Sequence[Tensor]:
        # Of the kernel's least width; one column is the sum.
        ones = rows.new_ones(rows.shape[0], STRIDE)
        return [product[:, 0] for product in self.weight_gradients(rows, ones)]
