"""The embedding of tokens, with a gradient of the rows that a micro-batch reads.

Torch makes a gradient of the whole vocabulary in each micro-batch, which Megatron's hook then adds
to its buffer: for Qwen3-30B-A3B 3.7 GB of traffic. Here the rows of tokens are added to Megatron's
buffer.
"""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_gspo.kernels import row_kernels_apply
from megatron_gspo.kernels.operators import add_embedding_gradient
from megatron_gspo.parallel.autograd_context import AutogradContext
from megatron_gspo.parallel.main_gradients import main_gradient, placeholder


class RowGradientEmbedding(VocabParallelEmbedding):
    """Megatron's embedding, whose gradient is added to Megatron's buffer row by row."""

    def forward(self, input_: Tensor) -> Tensor:
        if not _adds_rows(self.weight):
            return super().forward(input_)
        ids = input_
        if self.tp_group.size() > 1:
            ids = input_ - self.vocab_start_index
        embedded = _EmbeddedRows.apply(ids, self.weight, self.tp_group.size() > 1)
        if self.reduce_scatter_embeddings:
            by_position = embedded.transpose(0, 1).contiguous()
            return reduce_scatter_to_sequence_parallel_region(by_position, group=self.tp_group)
        return reduce_from_tensor_model_parallel_region(embedded, group=self.tp_group)


def _adds_rows(weight: Tensor) -> bool:
    """Whether the gradient of ``weight`` can be added to Megatron's buffer row by row.

    A weight that is the head's too gets its gradient as a whole. On a GPU torch adds rows in any
    order.
    """
    return (
        torch.is_grad_enabled()
        and main_gradient(weight) is not None
        and not getattr(weight, "zero_out_wgrad", False)
        and (weight.device.type == "cpu" or row_kernels_apply(weight, "embedding_gradient"))
    )


class _EmbeddedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, ids: Tensor, weight: Tensor, is_shard: bool) -> Tensor:
        """is_shard: some ids are on other ranks, for which the result is 0."""
        ctx.save_for_backward(ids, weight)
        if not is_shard:
            return torch.nn.functional.embedding(ids, weight)
        elsewhere = (ids < 0) | (ids >= len(weight))
        embedded = torch.nn.functional.embedding(ids.masked_fill(elsewhere, 0), weight)
        return embedded.masked_fill_(elsewhere[..., None], 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[None, Tensor | None, None]:
        ids, weight = ctx.saved_tensors
        total = main_gradient(weight)
        assert total is not None, "the forward pass has found it"
        add_rows(total, ids.flatten(), grad.flatten(0, -2))
        return None, placeholder(weight), None


def add_rows(total: Tensor, ids: Tensor, rows: Tensor) -> None:
    """Add each of ``rows`` [t, h] to the row of ``total`` [v, h] that ``ids`` [t] names, if there
    is one; in a fixed order.
    """
    if row_kernels_apply(rows, "embedding_gradient"):
        sorted_ids, order = ids.sort(stable=True)
        ends = torch.searchsorted(sorted_ids, sorted_ids, right=True)
        add_embedding_gradient(total, rows, sorted_ids, order, ends)
        return
    elsewhere = (ids < 0) | (ids >= len(total))
    rows = rows.masked_fill(elsewhere[:, None], 0.0)  # selecting them would read their number
    total.index_add_(0, ids.masked_fill(elsewhere, 0), rows.to(total.dtype))


def use_row_gradients(model: torch.nn.Module) -> None:
    """Replace Megatron's embedding in a model; its parameter and the parameter's name stay."""
    for module in model.modules():
        if type(module) is VocabParallelEmbedding:
            module.__class__ = RowGradientEmbedding
