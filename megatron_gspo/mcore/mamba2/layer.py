"""Mamba-2 as the attention of a Megatron layer, with packed sequences and every parallelism
(``mcore/chunked_mixer.py``).

Megatron-Core's own needs CUDA kernels and a model class without MoE's layer options. Its parameters
have the same names. Here their rows are grouped: ``in_proj`` has ``[x B C dt z]`` and ``conv1d`` ``[x
B C]`` for each group, with the heads that read its B and C.

Time steps are not clamped, as in Megatron-Core, SGLang and vLLM. Transformers raises those below
``time_step_min`` in a pass over several tokens, and not where it decodes one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_gspo.mcore.chunk_layout import (
    ChunkLayout,
    causal_convolution,
    to_wide_chunks,
)
from megatron_gspo.mcore.chunked_mixer import ChunkedMixer, NamedParameters
from megatron_gspo.mcore.mamba2.scan import chunked_scan
from megatron_gspo.mcore.operators import pad_rows, unpad_rows
from megatron_gspo.models.model_shape import Mamba2Sizes


class Mamba2(ChunkedMixer):
    """State space layer of Nemotron-3, built and called as Megatron's ``SelfAttention``."""

    row_sharded = ("conv1d.weight", "conv1d.bias", "dt_bias", "A_log", "D", "norm.weight")

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        sizes: Mamba2Sizes,
        pg_collection: ProcessGroupCollection,
        **_: object,
    ) -> None:
        super().__init__(
            config,
            pg_collection,
            groups=sizes.groups,
            projected=sizes.groups * sizes.projected,
            outputs=sizes.groups * sizes.values,
            groups_are="groups of the Mamba-2 layers (n_groups)",
        )
        self.sizes = sizes
        self.layer_number = layer_number
        heads = self.local_groups * sizes.heads_per_group
        self.conv1d = NamedParameters()
        self.conv1d.weight = self._sharded(self.local_groups * sizes.convolved, 1, sizes.kernel)
        self.conv1d.bias = self._sharded(self.local_groups * sizes.convolved)
        self.dt_bias = self._sharded(heads)
        self.A_log = self._sharded(heads)
        self.D = self._sharded(heads)
        self.norm = NamedParameters()
        self.norm.weight = self._sharded(self.local_groups * sizes.values)
        if config.perform_initialization:
            self._initialize()

    def _initialize(self) -> None:
        """Initialize as Megatron-Core does: decay rates uniform in [1, 16], D 1, filters as
        torch's."""
        with torch.no_grad():
            for parameter in (self.dt_bias, self.D, self.norm.weight):
                parameter.fill_(1.0)
            self.A_log.uniform_(1.0, 16.0).log_()
            bound = self.sizes.kernel**-0.5
            self.conv1d.weight.uniform_(-bound, bound)
            self.conv1d.bias.uniform_(-bound, bound)

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
        inputs, gate = grouped.split((self.sizes.exchanged, self.sizes.values), dim=-1)
        mixed = self._recomputed(
            mamba2,
            self._groups(inputs),
            self._local_rows(self.conv1d.weight).squeeze(1),
            self._local_rows(self.conv1d.bias),
            self._local_rows(self.dt_bias),
            self._local_rows(self.A_log),
            self._local_rows(self.D),
            layout,
            self.sizes,
        )
        out = self._tokens(mixed).view(gate.shape)
        weight = self.norm.weight.view(gate.shape[1:])
        out = grouped_norm(out, gate, weight, self.config.layernorm_epsilon)
        output, _bias = self.out_proj(out.flatten(1).unsqueeze(1))
        return output, None


def mamba2(
    x: Tensor,
    filters: Tensor,
    filter_bias: Tensor,
    dt_bias: Tensor,
    log_rate: Tensor,
    skip: Tensor,
    layout: ChunkLayout,
    sizes: Mamba2Sizes,
) -> Tensor:
    """Convolution and recurrence of packed sequences; [t, groups * values] in ``x``'s dtype.

    ``x`` [t, groups, exchanged], in the layout's order of rows; ``filters`` [groups * convolved,
    kernel] and their bias; ``dt_bias``, ``log_rate`` and ``skip`` [heads], the latter what a head adds
    of its own input. Computed in float32, float64 for such an ``x``.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    groups = x.shape[1]
    channels, steps = x.split((sizes.convolved, sizes.heads_per_group), dim=-1)
    wide = to_wide_chunks(channels.reshape(len(x), -1), layout)
    convolved = causal_convolution(wide.to(dtype), filters.to(dtype)) + filter_bias.to(dtype)
    by_group = F.silu(convolved).unflatten(-1, (groups, -1))
    split = (sizes.values, sizes.state_size, sizes.state_size)
    value, b, c = (part.transpose(1, 2) for part in by_group.split(split, dim=-1))
    value = value.unflatten(-1, (sizes.heads_per_group, -1)).transpose(2, 3)
    step = _time_steps(steps, dt_bias, layout, dtype)
    rate = log_rate.to(dtype).exp().view(groups, -1, 1)
    out = chunked_scan(value * step.unsqueeze(-1), b, c, -rate * step, layout.active)
    out = out + skip.to(dtype).view(groups, -1, 1, 1) * value
    return unpad_rows(
        out.permute(0, 3, 1, 2, 4).reshape(len(layout.rows), -1).to(x.dtype), layout.slots
    )


def _time_steps(steps: Tensor, dt_bias: Tensor, layout: ChunkLayout, dtype: torch.dtype) -> Tensor:
    """[chunks, groups, r, size] from ``steps`` [t, groups, r]; any in slots without a token, which
    come behind the last one of a sequence, where nothing reads them."""
    padded = pad_rows(steps, layout.rows, layout.slots).view(*layout.valid.shape, -1)
    positive = F.softplus(padded.to(dtype) + dt_bias.to(dtype))
    return positive.unflatten(-1, steps.shape[1:]).permute(0, 2, 3, 1)


def grouped_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of each group of ``x * silu(gate)``; all [..., groups, e], ``weight`` [groups, e].
    Computed in float32, float64 for such an ``x``.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    gated = x.to(dtype) * F.silu(gate.to(dtype))
    return (F.rms_norm(gated, gated.shape[-1:], None, eps) * weight.to(dtype)).to(x.dtype)
