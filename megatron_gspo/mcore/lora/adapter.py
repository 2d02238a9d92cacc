"""The adapter of one linear layer, and Megatron's linear layers with one (LoRA, arXiv:2106.09685,
section 4.1).

Column parallel: A is on every rank, B is cut by rows. Row parallel: A is cut by columns, B is on
every rank. Only the product with A, of a few columns, is communicated. An expert's rank adds its
part of the output to the other ranks'.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.moe.moe_utils import router_gating_linear
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.nn.functional import linear

from megatron_gspo.mcore.latent_attention import LatentProjection
from megatron_gspo.mcore.operators import LowRank
from megatron_gspo.mcore.protocols import ShardOffsets
from megatron_gspo.mcore.router import ExactRouter
from megatron_gspo.models.adapter_rules import add_product


class Adapter(torch.nn.Module):
    """``scale * B @ A``, added to a weight [out, in] that is made of several Hugging Face tensors.

    ``lora_A`` [tensors * rank, in]: a matrix for each tensor that is adapted. ``lora_B`` [out, rank]:
    a tensor's rows are multiplied with its own A; those of tensors without an adapter stay 0.
    ``tensor_rows``: the rows of the weight that each tensor has.
    """

    rows_of_tensor: Tensor | None
    """[out, tensors], 1 where a row is one of the tensor; None where the weight is one tensor."""

    def __init__(
        self, weight: Tensor, rank: int, scale: float, tensor_rows: Sequence[Tensor]
    ) -> None:
        super().__init__()
        self.rank = rank
        self.scale = scale
        self.tensor_rows = tuple(tensor_rows)
        self.enabled = True
        count = len(tensor_rows)
        self.lora_A = torch.nn.Parameter(weight.new_zeros(count * rank, weight.shape[1]))
        self.lora_B = torch.nn.Parameter(weight.new_zeros(weight.shape[0], rank))
        rows_of_tensor = None
        if count > 1 or len(tensor_rows[0]) < weight.shape[0]:
            rows_of_tensor = torch.zeros(weight.shape[0], count, device="cpu")
            for index, rows in enumerate(tensor_rows):
                rows_of_tensor[rows, index] = 1.0
            rows_of_tensor = rows_of_tensor.to(weight.device, weight.dtype)
        self.register_buffer("rows_of_tensor", rows_of_tensor, persistent=False)

    def forward(self) -> tuple[Tensor, Tensor]:
        """A and the scaled B as two plain matrices: [tensors * rank, in] and [out, tensors *
        rank]."""
        return self.lora_A, self.expanded(self.lora_B)

    def expanded(self, b: Tensor) -> Tensor:
        """Scaled, with the rows of each tensor in columns of their own: [..., out, rank] to [...,
        out, tensors * rank].
        """
        b = b * self.scale
        if self.rows_of_tensor is None:
            return b
        return (b[..., None, :] * self.rows_of_tensor[..., None]).flatten(-2)

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """The weight with what the adapter adds, a new tensor; see `add_product`."""
        merged = weight.clone()
        for index, tensor_rows in enumerate(self.tensor_rows):
            a = self.lora_A[index * self.rank : (index + 1) * self.rank]
            rows = tensor_rows.to(weight.device)
            merged[rows] = add_product(weight[rows], a, self.lora_B[rows], self.scale)
        return merged


def expert_adapters(
    linears: Sequence[AdaptedColumnParallelLinear] | Sequence[AdaptedRowParallelLinear],
) -> LowRank[Tensor] | None:
    """The adapters of a layer's local experts, expert by expert; None where they have none, or
    while they are off.
    """
    first = getattr(linears[0], "lora", None)
    if first is None or not first.enabled:
        return None
    b = first.expanded(torch.stack([linear.lora.lora_B for linear in linears]))
    return LowRank([linear.lora.lora_A for linear in linears], b.unbind(0))


class AdaptedColumnParallelLinear(ColumnParallelLinear):
    """Megatron's, with an adapter.

    gated: whether each rank has rows of a gate and as many of what it is multiplied with.
    """

    lora: Adapter
    gated: bool = False

    def forward(
        self, input_: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(input_, *args, **kwargs)
        if not self.lora.enabled:
            return output, bias
        a, b = self.lora()
        low = linear(input_, a)
        if self.sequence_parallel and not self.is_expert:
            low = gather_from_sequence_parallel_region(low, group=self.tp_group)
        elif not self.is_expert:
            low = copy_to_tensor_model_parallel_region(low, group=self.tp_group)
        return output + linear(low, b), bias

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: ShardOffsets = (),
        metadata: Mapping[str, object] | None = None,
    ) -> ShardedStateDict:
        stored = _stored(
            self, {"weight": 0, "bias": 0, "lora.lora_B": 0}, prefix, sharded_offsets, metadata
        )
        key = f"{prefix}lora.lora_B"
        if self.gated:
            stored[key] = apply_swiglu_sharded_factory(stored[key], sharded_offsets)
        return stored


class AdaptedRowParallelLinear(RowParallelLinear):
    """Megatron's, with an adapter."""

    lora: Adapter

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(input_)
        if not self.lora.enabled:
            return output, bias
        a, b = self.lora()
        low = linear(input_, a)  # a part of the sum over this rank's columns
        if self.sequence_parallel and not self.is_expert:
            low = reduce_scatter_to_sequence_parallel_region(low, group=self.tp_group)
        elif not self.is_expert:
            low = reduce_from_tensor_model_parallel_region(low, group=self.tp_group)
        return output + linear(low, b), bias

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: ShardOffsets = (),
        metadata: Mapping[str, object] | None = None,
    ) -> ShardedStateDict:
        return _stored(self, {"weight": 1, "lora.lora_A": 1}, prefix, sharded_offsets, metadata)


class AdaptedLatentProjection(LatentProjection):
    """A product of a rank's own tokens, with an adapter that all tensor-parallel ranks hold."""

    lora: Adapter

    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input)
        if not self.lora.enabled:
            return output
        a, b = self.lora()
        return output + linear(linear(input, a), b)


class AdaptedRouter(ExactRouter):
    """A router with an adapter that all tensor-parallel ranks hold; its part of the logits
    is of their type.
    """

    lora: Adapter

    def gating(self, input: Tensor) -> Tensor:
        logits = super().gating(input)
        if not self.lora.enabled:
            return logits
        a, b = self.lora()
        # Keeps no copy of the input in that type.
        low = router_gating_linear(input, a, None, logits.dtype)
        return logits + linear(low, b.to(logits.dtype))


ADAPTED: dict[type[torch.nn.Module], type[torch.nn.Module]] = {
    ColumnParallelLinear: AdaptedColumnParallelLinear,
    RowParallelLinear: AdaptedRowParallelLinear,
    LatentProjection: AdaptedLatentProjection,
    ExactRouter: AdaptedRouter,
}


def _stored(
    module: AdaptedColumnParallelLinear | AdaptedRowParallelLinear,
    axes: dict[str, int],
    prefix: str,
    sharded_offsets: ShardOffsets,
    metadata: Mapping[str, object] | None,
) -> ShardedStateDict:
    """Megatron's description of a module's tensors in a checkpoint.

    axes: the dimension that is cut, by name.
    """
    assert metadata is not None, "Megatron names the group of the replicas in it"
    return make_sharded_tensors_for_checkpoint(
        module.state_dict(prefix="", keep_vars=True),
        prefix,
        axes,
        sharded_offsets,
        tp_group=module.tp_group,
        dp_cp_group=metadata["dp_cp_group"],
    )
