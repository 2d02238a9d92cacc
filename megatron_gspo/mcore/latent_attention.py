"""Multi-head latent attention in plain torch (DeepSeek-V2, arXiv:2405.04434, section 2.1), over
packed sequences.

Megatron's ``MLASelfAttention`` can't be built without Transformer Engine (megatron-core 0.16.1),
rotates sequence by sequence, for which the host waits, and knows interleaved pairs only. Parameters
and their names are those that it has with Transformer Engine: the projections to latents are whole
on every tensor-parallel rank and work on the rank's own tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_gspo.mcore.attention import PackedAttention, PackedSequences
from megatron_gspo.mcore.norms import RMSNorm
from megatron_gspo.mcore.operators import rotate
from megatron_gspo.models.model_shape import ModelShape

Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of query, key and value."""


class LatentProjection(torch.nn.Linear):
    """A product of a rank's own tokens with a weight that all tensor-parallel ranks hold.

    Its gradient is summed over them under sequence parallelism.
    """

    def __init__(self, inputs: int, outputs: int, config: TransformerConfig) -> None:
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(inputs, outputs, bias=False, dtype=config.params_dtype, device=device)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        if config.perform_initialization:
            config.init_method(self.weight)

    def reset_parameters(self) -> None:
        """Megatron's initialization takes the place of torch's."""


@dataclass
class LatentAttentionSubmodules:
    """Megatron's classes of projections whose rows, and whose columns, are cut over the
    tensor-parallel ranks.
    """

    by_rows: type[ColumnParallelLinear]
    by_columns: type[RowParallelLinear]


class LatentAttention(MegatronModule):
    """The self-attention of a Megatron layer, with the signature that ``TransformerLayer`` builds
    and calls.

    ``shape``: of the model, whose ``latent`` and ``rotary`` have the sizes.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: LatentAttentionSubmodules,
        layer_number: int,
        *,
        shape: ModelShape,
        pg_collection: ProcessGroupCollection,
        **_: object,
    ) -> None:
        super().__init__(config=config)
        assert shape.latent is not None
        if pg_collection.tp.size() > 1 and not config.sequence_parallel:
            raise ValueError(
                "multi-head latent attention with tensor parallelism needs sequence parallelism"
            )
        self.layer_number = layer_number
        self.sizes = shape.latent
        self.rotary = shape.rotary
        self.tp_group = pg_collection.tp
        sizes = self.sizes
        heads = config.num_attention_heads
        hidden = config.hidden_size
        self.query_dim = sizes.plain_dim + self.rotary.dim
        self.softmax_scale = self.rotary.score_scale / math.sqrt(self.query_dim)
        self.core_attention = self._core_attention(shape, pg_collection)
        self.recomputes_core = (
            config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules
        )
        rows = submodules.by_rows
        if sizes.query_rank is None:
            self.linear_q_proj = self._by_heads(rows, hidden, heads * self.query_dim)
        else:
            self.linear_q_down_proj = LatentProjection(hidden, sizes.query_rank, config)
            self.q_layernorm = RMSNorm(config, sizes.query_rank, sizes.norm_eps)
            self.linear_q_up_proj = self._by_heads(rows, sizes.query_rank, heads * self.query_dim)
        self.linear_kv_down_proj = LatentProjection(
            hidden, sizes.key_value_rank + self.rotary.dim, config
        )
        self.kv_layernorm = RMSNorm(config, sizes.key_value_rank, sizes.norm_eps)
        self.linear_kv_up_proj = self._by_heads(
            rows, sizes.key_value_rank, heads * (sizes.plain_dim + sizes.value_dim)
        )
        self.linear_proj = build_module(
            submodules.by_columns,
            heads * sizes.value_dim,
            hidden,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            tp_group=self.tp_group,
        )

    def _core_attention(self, shape: ModelShape, groups: ProcessGroupCollection) -> PackedAttention:
        return PackedAttention(self.config, softmax_scale=self.softmax_scale, pg_collection=groups)

    def _by_heads(
        self, linear: type[ColumnParallelLinear], inputs: int, outputs: int
    ) -> ColumnParallelLinear:
        return build_module(
            linear,
            inputs,
            outputs,
            config=self.config,
            init_method=self.config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_group=self.tp_group,
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedSequences | None = None,
        **_: object,
    ) -> tuple[Tensor, None]:
        """``hidden_states`` [s, 1, h], under sequence parallelism this rank's part of the
        tokens; returns the same.
        """
        if not isinstance(packed_seq_params, PackedSequences):
            raise TypeError(
                "LatentAttention needs packed_seq_params of mcore.attention.packed_sequences()"
            )
        query_latent, *heads = self.queries_keys_values(hidden_states, packed_seq_params)
        attend = self.attention(hidden_states, query_latent, packed_seq_params)
        if self.recomputes_core and self.training:
            out = tensor_parallel.checkpoint(attend, False, *heads)
        else:
            out = attend(*heads)
        return self.linear_proj(out[:, None])[0], None

    def attention(
        self, hidden_states: Tensor, query_latent: Tensor, sequences: PackedSequences
    ) -> Attend:
        """The core attention of these tokens; a layer may choose its keys by this rank's
        ``hidden_states`` [s, 1, h] and ``query_latent`` [s, 1, query_rank].
        """
        return partial(self.core_attention, packed_seq_params=sequences)

    def queries_keys_values(
        self, hidden_states: Tensor, sequences: PackedSequences
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What queries are made of, [s, 1, query_rank] of this rank's tokens. Of all ``t`` tokens:
        query and key [t, heads, plain_dim + rotary.dim], value [t, heads, value_dim].
        """
        sizes = self.sizes
        if sizes.query_rank is None:
            latent_of_query = hidden_states
            query, _ = self.linear_q_proj(hidden_states)
        else:
            latent_of_query = self.q_layernorm(self.linear_q_down_proj(hidden_states))
            query, _ = self.linear_q_up_proj(latent_of_query)
        both = self.linear_kv_down_proj(hidden_states)
        latent, turned = both.split((sizes.key_value_rank, self.rotary.dim), dim=-1)
        if self.config.sequence_parallel:  # all heads share it
            turned = tensor_parallel.gather_from_sequence_parallel_region(
                turned, group=self.tp_group
            )
        up, _ = self.linear_kv_up_proj(self.kv_layernorm(latent))

        tokens = up.shape[0]
        cos, sin = sequences.rotation(self.rotary, up.dtype)
        query = query.view(tokens, -1, self.query_dim)
        plain, rotated = query.split((sizes.plain_dim, self.rotary.dim), dim=-1)
        query = torch.cat(
            (plain, rotate(rotated, cos, sin, interleaved=self.rotary.interleaved)), dim=-1
        )
        plain, value = up.view(tokens, query.shape[1], -1).split(
            (sizes.plain_dim, sizes.value_dim), dim=-1
        )
        turned = rotate(turned, cos, sin, interleaved=self.rotary.interleaved)
        key = torch.cat((plain, turned.expand(-1, query.shape[1], -1)), dim=-1)
        return latent_of_query, query, key, value
