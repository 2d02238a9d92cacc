"""Megatron's self-attention with the rotary embedding of packed sequences.

On a GPU one kernel splits what the first product makes into queries, keys and values, and applies
norms and rotation.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from torch import Tensor

from megatron_gspo.kernels import row_kernels_apply
from megatron_gspo.kernels.operators import rotated_heads
from megatron_gspo.mcore.attention import PackedSequences, rotated
from megatron_gspo.mcore.norms import RMSNorm
from megatron_gspo.models.rotary import Rotary


class RotatedSelfAttention(SelfAttention):
    """``sequences``: of the forward pass that runs; Megatron does not hand them on to where
    queries and keys are made."""

    rotary: Rotary
    sequences: PackedSequences

    def forward(
        self, *args: Any, packed_seq_params: PackedSequences | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        if not isinstance(packed_seq_params, PackedSequences):
            raise TypeError(
                "attention needs packed_seq_params of mcore.attention.packed_sequences()"
            )
        self.sequences = packed_seq_params
        try:
            return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)
        finally:
            del self.sequences  # nothing of a finished pass stays

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, ...]:
        if row_kernels_apply(hidden_states, "rotated_heads") and self._has_kernel():
            return self._by_kernel(hidden_states)
        query, key, *others = super().get_query_key_value_tensors(hidden_states, *args, **kwargs)
        query, key = (rotated(x.squeeze(1), self.sequences, self.rotary) for x in (query, key))
        return query[:, None], key[:, None], *others

    def _has_kernel(self) -> bool:
        """Whether the kernel computes what this layer does."""
        norms = (self.q_layernorm, self.k_layernorm)
        return (
            (all(map(_is_absent, norms)) or all(map(_is_plain, norms)))
            and not self.rotary.interleaved
            and not self.config.attention_output_gate
            and self.config.num_query_groups >= self.world_size
        )

    def _by_kernel(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        mixed, _ = super().get_query_key_value_tensors(hidden_states, split_qkv=False)
        mixed = mixed.flatten(1)
        has_norms = not _is_absent(self.q_layernorm)
        cos, sin = self.sequences.rotation(self.rotary, mixed.dtype)
        heads = rotated_heads(
            mixed,
            self.q_layernorm.weight if has_norms else None,
            self.k_layernorm.weight if has_norms else None,
            cos,
            sin,
            self.num_query_groups_per_partition,
            self.hidden_size_per_attention_head,
            self.config.layernorm_epsilon,
        )
        return tuple(head[:, None] for head in heads)


def _is_absent(norm: torch.nn.Module | None) -> bool:
    return norm is None or isinstance(norm, IdentityOp)


def _is_plain(norm: torch.nn.Module | None) -> bool:
    return isinstance(norm, RMSNorm) and not norm.zero_centred
