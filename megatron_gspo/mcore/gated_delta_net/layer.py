"""The gated delta net as the attention of a Megatron layer, with packed sequences and every
parallelism.

Megatron-Core's own refuses packed sequences before 0.18 and needs CUDA. Its parameters have the
same names. Their rows are grouped by key head, so that each tensor- and context-parallel rank has
whole heads and its own rows are contiguous: ``in_proj`` has ``[q k v b a z]`` and ``conv1d`` ``[q k
v]`` for each key head, with the value heads that read it.

Under context parallelism the ranks exchange heads for tokens (all-to-all) before the convolution
and back after the delta rule: in between a rank has whole sequences, so that no state crosses
ranks.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import all_to_all
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_gspo.mcore.attention import PackedSequences
from megatron_gspo.mcore.gated_delta_net.chunk_layout import (
    ChunkLayout,
    causal_convolution,
    to_wide_chunks,
)
from megatron_gspo.mcore.gated_delta_net.delta_rule import chunked_delta_rule
from megatron_gspo.mcore.operators import pad_rows, rms_norm, unpad_rows
from megatron_gspo.mcore.protocols import ShardOffsets
from megatron_gspo.models.model_shape import DeltaNetSizes

_NORM_EPS = 1e-6  # of the norms of queries and keys
_SHARDED = {"conv1d.weight": 0, "dt_bias": 0, "A_log": 0}  # dimension that tensor parallelism cuts


class _Weight(torch.nn.Module):
    """A parameter under the name that it has in Megatron's layer."""

    weight: torch.nn.Parameter


class GatedDeltaNet(MegatronModule):
    """Linear attention of Qwen3-Next and Qwen3.5, built and called as Megatron's ``SelfAttention``.

    Raises ValueError where the key heads are no multiple of tensor- times context-parallel size.
    """

    sizes: DeltaNetSizes

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        sizes: DeltaNetSizes,
        pg_collection: ProcessGroupCollection,
        **_: object,
    ) -> None:
        super().__init__(config)
        self.sizes = sizes
        self.layer_number = layer_number
        self.tp_group = pg_collection.tp
        self.cp_group = pg_collection.cp
        ranks = self.tp_group.size() * self.cp_group.size()
        if sizes.key_heads % ranks:
            raise ValueError(
                f"tensor- times context-parallel size = {ranks} does not divide the"
                f" {sizes.key_heads} key heads of the gated delta net (linear_num_key_heads); lower"
                " one of them"
            )
        heads = sizes.key_heads // self.tp_group.size()
        values = sizes.value_heads // self.tp_group.size()
        self.in_proj = ColumnParallelLinear(
            config.hidden_size,
            sizes.key_heads * sizes.projected,
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_group=self.tp_group,
        )
        self.conv1d = _Weight()
        self.out_norm = _Weight()
        self.conv1d.weight = self._sharded(heads * sizes.convolved, 1, sizes.kernel)
        self.dt_bias = self._sharded(values)
        self.A_log = self._sharded(values)
        self.out_norm.weight = torch.nn.Parameter(self._empty(sizes.value_size))
        self.out_norm.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.out_proj = RowParallelLinear(
            sizes.value_heads * sizes.value_size,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            bias=False,
            skip_bias_add=True,
            is_expert=False,
            tp_group=self.tp_group,
        )
        if config.perform_initialization:
            self._initialize()

    def _empty(self, *sizes: int) -> Tensor:
        device = None if self.config.use_cpu_initialization else torch.cuda.current_device()
        return torch.empty(*sizes, dtype=self.config.params_dtype, device=device)

    def _sharded(self, *sizes: int) -> torch.nn.Parameter:
        """A parameter of which each tensor-parallel rank has rows of its own."""
        parameter = torch.nn.Parameter(self._empty(*sizes))
        set_tensor_model_parallel_attributes(parameter, True, dim=0, stride=1)
        return parameter

    def _initialize(self) -> None:
        """As the family's own: ``dt_bias`` 1, decay rates uniform in [0.01, 16], the filters as
        torch's.
        """
        with torch.no_grad():
            self.dt_bias.fill_(1.0)
            self.out_norm.weight.fill_(1.0)
            self.A_log.uniform_(0.01, 16.0).log_()
            bound = self.sizes.kernel**-0.5
            self.conv1d.weight.uniform_(-bound, bound)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedSequences,
        **_: object,
    ) -> tuple[Tensor, None]:
        """``hidden_states`` [t, 1, h], this rank's tokens; returns the same sizes and no bias."""
        if not isinstance(packed_seq_params, PackedSequences):
            raise TypeError(
                "GatedDeltaNet needs packed_seq_params of mcore.attention.packed_sequences()"
            )
        layout = packed_seq_params.chunks(self.sizes.kernel - 1)
        projected, _bias = self.in_proj(hidden_states)
        grouped = projected.view(projected.shape[0], -1, self.sizes.projected)
        inputs, gate = grouped.split(
            (self.sizes.exchanged, self.sizes.projected - self.sizes.exchanged), dim=-1
        )
        out = self._tokens(self._attend(self._heads(inputs), layout))
        out = gated_norm(
            out.view(out.shape[0], -1, self.sizes.value_size),
            gate.reshape(out.shape[0], -1, self.sizes.value_size),
            self._norm_weight(),
            self.config.layernorm_epsilon,
        )
        output, _bias = self.out_proj(out.flatten(1).unsqueeze(1))
        return output, None

    def _norm_weight(self) -> Tensor:
        """Each tensor-parallel rank's gradient has its own heads only: Megatron sums them under
        sequence parallelism, and here they are summed without."""
        if self.config.sequence_parallel:
            return self.out_norm.weight
        return copy_to_tensor_model_parallel_region(self.out_norm.weight, group=self.tp_group)

    def _heads(self, x: Tensor) -> Tensor:
        """All heads of this rank's tokens [t, heads, w] to this rank's heads of all tokens [t *
        cp, heads / cp, w].
        """
        size = self.cp_group.size()
        if size == 1:
            return x
        by_rank = x.reshape(x.shape[0], size, -1).transpose(0, 1).reshape(x.shape[0] * size, -1)
        return all_to_all(self.cp_group, by_rank).view(len(by_rank), -1, x.shape[2])

    def _tokens(self, x: Tensor) -> Tensor:
        """The inverse of ``_heads`` for ``x`` [t * cp, w]: [t, cp * w]."""
        size = self.cp_group.size()
        if size == 1:
            return x
        return all_to_all(self.cp_group, x).view(size, -1, x.shape[1]).transpose(0, 1).flatten(1)

    def _local_rows(self, parameter: Tensor) -> Tensor:
        """The rows of the heads that this rank has between ``_heads`` and ``_tokens``."""
        return parameter.chunk(self.cp_group.size())[self.cp_group.rank()]

    def _attend(self, x: Tensor, layout: ChunkLayout) -> Tensor:
        """Convolution and delta rule of ``x`` [t, heads, exchanged]; [t, value heads * value size].

        Nothing inside is kept for the backward, which computes it again, unless the whole layer
        does that already.
        """
        arguments = (
            x,
            self._local_rows(self.conv1d.weight).squeeze(1),
            self._local_rows(self.dt_bias),
            self._local_rows(self.A_log),
            layout,
            self.sizes,
        )
        if self.config.recompute_granularity == "full" or not torch.is_grad_enabled():
            return delta_net(*arguments)
        return checkpoint(delta_net, *arguments, use_reentrant=False, preserve_rng_state=False)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: ShardOffsets = (),
        metadata: Mapping[str, object] | None = None,
        **_: object,
    ) -> ShardedStateDict:
        """The parameters for Megatron's distributed checkpoints, each sharded along its rows
        but for the norm.
        """
        assert metadata is not None, "Megatron names the group of the replicas in it"
        groups = dict(tp_group=self.tp_group, dp_cp_group=metadata["dp_cp_group"])
        parameters = {name: value for name, value in self.named_parameters() if "proj" not in name}
        state = make_sharded_tensors_for_checkpoint(
            parameters, prefix, _SHARDED, sharded_offsets, **groups
        )
        for name in ("in_proj", "out_proj"):
            state |= sharded_state_dict_default(
                getattr(self, name),
                f"{prefix}{name}.",
                sharded_offsets,
                metadata,
                tp_group=self.tp_group,
            )
        return state


def delta_net(
    x: Tensor,
    filters: Tensor,
    dt_bias: Tensor,
    log_rate: Tensor,
    layout: ChunkLayout,
    sizes: DeltaNetSizes,
) -> Tensor:
    """Convolution, gates and delta rule of packed sequences; [t, value heads * value size] in
    ``x``'s dtype.

    ``x`` [t, heads, exchanged], in the layout's order of rows; ``filters`` [heads * convolved,
    kernel]; ``dt_bias`` and ``log_rate`` [value heads]. Computed in float32, float64 for such an
    ``x``.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    qkv, rates = x.split((sizes.convolved, 2 * sizes.values_per_key), dim=-1)
    wide = to_wide_chunks(qkv.reshape(len(x), -1), layout)
    convolved = F.silu(causal_convolution(wide.to(dtype), filters.to(dtype))).unflatten(
        -1, (x.shape[1], -1)
    )
    split = (sizes.key_size, sizes.key_size, sizes.values_per_key * sizes.value_size)
    query, key, value = (x.transpose(1, 2) for x in convolved.split(split, dim=-1))
    value = value.unflatten(-1, (sizes.values_per_key, -1)).transpose(2, 3)
    beta, gate = _gates(rates, dt_bias, log_rate, layout, dtype)
    out = chunked_delta_rule(
        _unit(query) * sizes.key_size**-0.5, _unit(key), value, gate, beta, layout.active
    )
    return unpad_rows(
        out.permute(0, 3, 1, 2, 4).reshape(len(layout.rows), -1).to(x.dtype), layout.slots
    )


def _gates(
    rates: Tensor, dt_bias: Tensor, log_rate: Tensor, layout: ChunkLayout, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """beta and the logarithm of the decay, both [chunks, heads, r, size] and 0 in slots without a
    token.

    ``rates`` [t, heads, 2 r]: what they are made of, beta's first.
    """
    padded = pad_rows(rates, layout.rows, layout.slots).view(*layout.valid.shape, *rates.shape[1:])
    beta, step = padded.chunk(2, dim=-1)
    decay = -log_rate.to(dtype).exp() * F.softplus(step.flatten(2).to(dtype) + dt_bias.to(dtype))
    both = torch.stack((beta.sigmoid().flatten(2).to(dtype), decay)) * layout.valid.unsqueeze(-1)
    beta, decay = both.unflatten(-1, beta.shape[2:]).permute(0, 1, 3, 4, 2)
    return beta, decay


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(torch.linalg.vecdot(x, x).unsqueeze(-1) + _NORM_EPS)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm times ``silu(gate)``; all [..., e], ``weight`` [e]. Computed in float32, float64
    for such an ``x``.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    return (rms_norm(x.to(dtype), weight.to(dtype), eps) * F.silu(gate.to(dtype))).to(x.dtype)
