"""Sizes of a rank's part of a micro-batch and of a layer, which the formulas of memory and traffic take.

Symbols as in Korthikanti et al. (arXiv:2205.05198): h hidden size, s tokens of a rank's residual stream, t tokens of
its attention (s * TP with sequence parallelism), a bytes per element.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_gspo.config import LoRAConfig, ParallelConfig
from megatron_gspo.models.model_shape import ModelShape
from megatron_gspo.tools.plan.adapters import LayerAdapter, layer_adapters
from megatron_gspo.tools.plan.delta_nets import DeltaNet, delta_net_of
from megatron_gspo.tools.plan.latent_attention import Latents, latents_of
from megatron_gspo.tools.plan.parameters import LayerKind, attention_dim, layer_kinds, local_experts


@dataclass(frozen=True)
class Setting:
    """How a pass is computed. ``implementation``: ``torch`` or ``transformer_engine``; ``recompute`` as in the config;
    ``on_gpu``: fused norms, the variable-length attention kernel (of 2-byte types), outputs sent on are freed; ``lora``
    of the adapters, if they are what is trained, in torch layers."""

    dtype_bytes: int = 2
    implementation: str = "transformer_engine"
    recompute: str = "none"
    recompute_num_layers: int = 1
    on_gpu: bool = True
    lora: LoRAConfig | None = None


@dataclass(frozen=True)
class MicroBatch:
    """``tokens``: of the whole micro-batch, before context parallelism; ``longest``: of its longest sequence.

    ``expert_rows``: rows that the experts of a rank get in one layer, None for an even share of the tokens. ``scored``:
    positions of a rank that the log-prob head works on, None for all.
    """

    tokens: int
    longest: int
    expert_rows: float | None = None
    scored: int | None = None


@dataclass(frozen=True)
class Sizes:
    """Sizes of one rank, as used in the formulas below."""

    a: int
    h: int
    s: float
    t: float
    keys: float
    query: int
    groups: int
    d: int
    rotated: int
    ffn: int
    moe: int
    experts: int
    local: int
    k: int
    etp: int
    rows: float
    router_scores: int
    unit: float  # numbers that the backward of an expert's gated unit holds at most, over ``moe``
    shared: int
    shared_gate: bool
    sent: bool
    mask: float
    qk_norm: bool
    scored: float
    latents: Latents | None = None
    output_gate: bool = False
    joint_norms: bool = False
    wide_norms: bool = False  # that compute in float32 and save it
    delta_net: DeltaNet | None = None
    adapters: Mapping[LayerKind, tuple[LayerAdapter, ...]] | None = None

    @property
    def is_frozen(self) -> bool:
        """Whether only adapters are trained."""
        return self.adapters is not None

    def saved_for(self, *names: str) -> int:
        """How many of these linear layers need their input in the backward: frozen ones if they have an adapter."""
        if self.adapters is None:
            return len(names)
        adapted = {adapter.name for of_kind in self.adapters.values() for adapter in of_kind}
        return sum(name in adapted for name in names)


def sizes_of(shape: ModelShape, parallel: ParallelConfig, batch: MicroBatch, setting: Setting) -> Sizes:
    """A rank's part of a micro-batch and of a layer."""
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    ep, etp = parallel.expert_model_parallel_size, parallel.expert_tensor_size
    t = batch.tokens / cp
    s = t / tp if parallel.use_sequence_parallel else t
    k = shape.experts_per_token
    copies = 1 + 1 / (2 * cp) if cp > 1 else 1 / cp  # a rank's two chunks of a sequence share keys
    masked = cp > 1 and not setting.on_gpu
    even = s * k * etp  # EP ranks send and receive equally; the ETP ranks of an expert get each other's tokens
    return Sizes(
        a=setting.dtype_bytes, h=shape.hidden_size, s=s, t=t, keys=batch.tokens * copies,
        query=shape.num_attention_heads // tp, groups=shape.num_query_groups // tp, d=attention_dim(shape),
        rotated=shape.rotary.dim,
        # with a clamp also two masks, the clamped gate and linear, the gate's sigmoid, and three terms of its slope
        unit=6.0 if shape.glu_limit is None else 11.0 + 2 / setting.dtype_bytes,
        latents=latents_of(shape, tp), router_scores=shape.num_experts if shape.router.score == "sigmoid" else 0,
        ffn=shape.ffn_hidden_size // tp, moe=shape.moe_ffn_hidden_size // etp, experts=shape.num_experts,
        local=local_experts(shape, parallel) if shape.is_moe else 0, k=k, etp=etp,
        rows=even if batch.expert_rows is None else batch.expert_rows,
        shared=shape.shared_expert_size // tp, shared_gate=shape.shared_expert_gate, sent=ep * etp > 1,
        mask=t * batch.longest * (2 * cp + 1) / (4 * cp) if masked else 0.0, qk_norm=shape.query_key_norms,
        scored=t if batch.scored is None else batch.scored, output_gate=shape.attention_gate,
        joint_norms="joint_norm_attention" in shape.mixers,
        wide_norms=shape.zero_centred_norms, delta_net=delta_net_of(shape, parallel, t, batch.longest),
        adapters=None if setting.lora is None else {
            kind: layer_adapters(shape, parallel, setting.lora, kind)
            for kind in layer_kinds(shape, range(shape.num_layers))
        },
    )  # fmt: skip
