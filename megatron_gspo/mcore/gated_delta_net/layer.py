"""The gated delta net as the attention of a Megatron layer, with packed sequences and every
parallelism (``mcore/chunked_mixer.py``).

Megatron-Core's own refuses packed sequences before 0.18 and needs CUDA. Its parameters have the
same names. Their rows are grouped by key head: ``in_proj`` has ``[q k v b a z]`` and ``conv1d`` ``[q
k v]`` for each key head, with the value heads that read it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_gspo.mcore.chunk_layout import (
    ChunkLayout,
    causal_convolution,
    to_wide_chunks,
)
from megatron_gspo.mcore.chunked_mixer import ChunkedMixer, NamedParameters
from megatron_gspo.mcore.gated_delta_net.delta_rule import chunked_delta_rule
from megatron_gspo.mcore.operators import pad_rows, rms_norm, unpad_rows
from megatron_gspo.models.model_shape import DeltaNetSizes

_NORM_EPS = 1e-6  # of the norms of queries and keys


class GatedDeltaNet(ChunkedMixer):
    """Linear attention of Qwen3-Next and Qwen3.5, built and called as Megatron's ``SelfAttention``."""

    row_sharded = ("conv1d.weight", "dt_bias", "A_log")

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        sizes: DeltaNetSizes,
        pg_collection: ProcessGroupCollection,
        **_: object,
    ) -> None:
        super().__init__(
            config,
            pg_collection,
            groups=sizes.key_heads,
            projected=sizes.key_heads * sizes.projected,
            outputs=sizes.value_heads * sizes.value_size,
            groups_are="key heads of the gated delta net (linear_num_key_heads)",
        )
        self.sizes = sizes
        self.layer_number = layer_number
        values = self.local_groups * sizes.values_per_key
        self.conv1d = NamedParameters()
        self.out_norm = NamedParameters()
        self.conv1d.weight = self._sharded(self.local_groups * sizes.convolved, 1, sizes.kernel)
        self.dt_bias = self._sharded(values)
        self.A_log = self._sharded(values)
        self.out_norm.weight = torch.nn.Parameter(self._empty(sizes.value_size))
        self.out_norm.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        if config.perform_initialization:
            self._initialize()

    def _initialize(self) -> None:
        """Initialize as the family does: ``dt_bias`` 1, decay rates uniform in [0.01, 16], filters
        as torch's.
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
        packed_seq_params: object,
        **_: object,
    ) -> tuple[Tensor, None]:
        """``hidden_states`` [t, 1, h], this rank's tokens; returns the same sizes and no bias."""
        layout = self._layout(packed_seq_params, self.sizes.kernel)
        projected, _bias = self.in_proj(hidden_states)
        grouped = projected.view(projected.shape[0], -1, self.sizes.projected)
        inputs, gate = grouped.split(
            (self.sizes.exchanged, self.sizes.projected - self.sizes.exchanged), dim=-1
        )
        mixed = self._recomputed(
            delta_net,
            self._groups(inputs),
            self._local_rows(self.conv1d.weight).squeeze(1),
            self._local_rows(self.dt_bias),
            self._local_rows(self.A_log),
            layout,
            self.sizes,
        )
        out = self._tokens(mixed)
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
