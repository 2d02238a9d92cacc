"""Attention whose queries, and whose keys, are normalised over all heads together (MiniMax-M2).

The mean square of a token is over all tensor-parallel ranks' heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from megatron_gspo.mcore.norms import device_of
from megatron_gspo.mcore.protocols import ShardOffsets
from megatron_gspo.parallel.autograd_context import AutogradContext


def joint_rms_norm(x: Tensor, weight: Tensor, eps: float, group: ProcessGroup) -> Tensor:
    """``x / sqrt(mean(x ** 2) + eps) * weight``, the mean over the last dimension of all ranks'
    ``x``.

    ``x`` [t, n] and ``weight`` [n] are this rank's of ``group``. Two sums of a number per token are
    exchanged, one in the forward and one in the backward pass. Computed in float32, float64 for
    such an ``x``.
    """
    return _JointRMSNorm.apply(x, weight, eps, group)


class _NormContext(AutogradContext, Protocol):
    group: ProcessGroup
    width: int
    """Of a token over all ranks."""


class _JointRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _NormContext, x: Tensor, weight: Tensor, eps: float, group: ProcessGroup
    ) -> Tensor:
        ctx.group = group
        ctx.width = x.shape[-1] * group.size()
        wide = _wide(x)
        scale = _wide(weight)
        squares = _summed(torch.linalg.vecdot(wide, wide), group)
        inverse = squares.mul_(1.0 / ctx.width).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return (wide * inverse[:, None]).mul_(scale).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: _NormContext, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        # y_j = x_j r w_j with r = (mean(x^2) + eps)^-1/2 of all ranks' x, so dr/dx_i = -r^3 x_i /
        # width
        x, weight, inverse = ctx.saved_tensors
        wide = _wide(x)
        scale = _wide(weight)
        grad = _wide(grad)
        product = grad * wide
        along = _summed(torch.mv(product, scale), ctx.group)
        factor = inverse.pow(3).mul_(along).mul_(-1.0 / ctx.width)
        grad_x = (grad * scale).mul_(inverse[:, None]).addcmul_(wide, factor[:, None])
        return grad_x.to(x.dtype), torch.mv(product.t(), inverse).to(weight.dtype), None, None


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _summed(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum over the ranks, in place."""
    if group.size() > 1:
        torch.distributed.all_reduce(x, group=group)
    return x


class JointNorm(torch.nn.Module):
    """`joint_rms_norm` of heads [..., heads, d]; the weight [heads * d] is this rank's part.

    Each rank's gradient of its part is whole: unlike those of norms of one head, Megatron must not
    sum it over the ranks. It does so by the names of such norms' parameters where its
    ``qk_layernorm`` is on.
    """

    def __init__(
        self, config: TransformerConfig, heads: int, size: int, group: ProcessGroup
    ) -> None:
        super().__init__()
        self.eps = config.layernorm_epsilon
        self.group = group
        self.weight = torch.nn.Parameter(
            torch.ones(heads * size, dtype=config.params_dtype, device=device_of(config))
        )
        set_tensor_model_parallel_attributes(self.weight, True, dim=0, stride=1)

    def forward(self, x: Tensor) -> Tensor:
        return joint_rms_norm(
            x.reshape(-1, len(self.weight)), self.weight, self.eps, self.group
        ).view(x.shape)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: ShardOffsets = (),
        metadata: Mapping[str, object] | None = None,
        **_: object,
    ) -> ShardedStateDict:
        """The weight for Megatron's distributed checkpoints."""
        assert metadata is not None, "Megatron names the group of the replicas in it"
        groups = dict(tp_group=self.group, dp_cp_group=metadata["dp_cp_group"])
        state = {"weight": self.weight}
        return make_sharded_tensors_for_checkpoint(
            state, prefix, {"weight": 0}, sharded_offsets, **groups
        )


class JointNormAttention(SelfAttention):
    """Megatron's self-attention with such norms, in place of those that it builds for one head."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        size = self.hidden_size_per_attention_head
        group = self.pg_collection.tp
        self.q_layernorm = JointNorm(
            self.config, self.num_attention_heads_per_partition, size, group
        )
        self.k_layernorm = JointNorm(self.config, self.num_query_groups_per_partition, size, group)
