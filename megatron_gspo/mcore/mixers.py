"""What mixes the tokens of a layer, by its kind in ``ModelShape.mixers``: how Megatron is
configured for it and which torch modules take the place of Megatron's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_gspo.mcore.attention import PackedAttention
from megatron_gspo.mcore.gated_delta_net.layer import GatedDeltaNet
from megatron_gspo.mcore.joint_norms import JointNormAttention
from megatron_gspo.mcore.latent_attention import LatentAttention, LatentAttentionSubmodules
from megatron_gspo.mcore.mamba2.layer import Mamba2
from megatron_gspo.mcore.norms import RMSNorm
from megatron_gspo.mcore.sink_attention import SinkAttention
from megatron_gspo.mcore.sparse_attention import SparseLatentAttention
from megatron_gspo.models.model_shape import NO_MIXER, ModelShape


@dataclass(frozen=True)
class Mixer:
    """options: of Megatron's config. build_spec: from ``self_attention`` of a spec of Megatron's torch
    layers, which it may change, since it is this layer's alone, Megatron's config and the shape,
    what takes its place. transformer_engine: whether Transformer Engine's layers can be
    built. stored_names: starts of a layer's parameter names, and those under which checkpoints have
    them, as with Transformer Engine; None: Megatron's torch spec has them right. in_megatron: whether
    Megatron-Core has such layers, with the same parameters."""

    options: Callable[[ModelShape], dict[str, object]]
    build_spec: Callable[[ModuleSpec, TransformerConfig, ModelShape | None], ModuleSpec]
    transformer_engine: bool = True
    stored_names: Mapping[str, str] | None = None
    in_megatron: bool = True


def _attention_options(shape: ModelShape) -> dict[str, object]:
    return dict(
        num_query_groups=shape.num_query_groups,
        kv_channels=shape.head_dim,
        qk_layernorm=shape.query_key_norms,
        add_qkv_bias=shape.attention_bias,
        attention_output_gate=shape.attention_gate,
    )


def _attention(spec: ModuleSpec, config: TransformerConfig, shape: ModelShape | None) -> ModuleSpec:
    spec.submodules.core_attention = PackedAttention
    if config.qk_layernorm:
        spec.submodules.q_layernorm = spec.submodules.k_layernorm = RMSNorm
    return spec


def _sink_attention(
    spec: ModuleSpec, config: TransformerConfig, shape: ModelShape | None
) -> ModuleSpec:
    spec = _attention(spec, config, shape)
    spec.submodules.core_attention = SinkAttention
    return spec


def _joint_norm_options(shape: ModelShape) -> dict[str, object]:
    # Megatron's name for norms of one head.
    return _attention_options(shape) | dict(qk_layernorm=False)


def _joint_norm_attention(
    spec: ModuleSpec, config: TransformerConfig, shape: ModelShape | None
) -> ModuleSpec:
    spec = _attention(spec, config, shape)
    spec.module = JointNormAttention
    return spec


def _latent_options(shape: ModelShape) -> dict[str, object]:
    assert shape.latent is not None
    return dict(
        num_query_groups=shape.num_attention_heads,
        kv_channels=shape.latent.plain_dim + shape.rotary.dim,
    )


def _latent_attention(
    spec: ModuleSpec, config: TransformerConfig, shape: ModelShape | None
) -> ModuleSpec:
    linears = LatentAttentionSubmodules(spec.submodules.linear_qkv, spec.submodules.linear_proj)
    return ModuleSpec(module=LatentAttention, params={"shape": shape}, submodules=linears)


def _sparse_latent_attention(
    spec: ModuleSpec, config: TransformerConfig, shape: ModelShape | None
) -> ModuleSpec:
    spec = _latent_attention(spec, config, shape)
    spec.module = SparseLatentAttention
    return spec


def _heterogeneous_options(shape: ModelShape) -> dict[str, object]:
    """Checkpoints name each layer's parameters: they aren't those of every layer, so that they
    can't be stacked.
    """
    return dict(hetereogenous_dist_checkpoint=True)  # Megatron's spelling


def _delta_net(spec: ModuleSpec, config: TransformerConfig, shape: ModelShape | None) -> ModuleSpec:
    assert shape is not None and shape.delta_net is not None
    return ModuleSpec(module=GatedDeltaNet, params={"sizes": shape.delta_net})


def _mamba2(spec: ModuleSpec, config: TransformerConfig, shape: ModelShape | None) -> ModuleSpec:
    assert shape is not None and shape.mamba is not None
    return ModuleSpec(module=Mamba2, params={"sizes": shape.mamba})


def _nothing(spec: ModuleSpec, config: TransformerConfig, shape: ModelShape | None) -> ModuleSpec:
    return ModuleSpec(module=IdentityOp)


_LATENT_NAMES = {
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
MIXERS = {
    "attention": Mixer(_attention_options, _attention),
    "windowed_attention": Mixer(_attention_options, _attention, transformer_engine=False),
    "sink_attention": Mixer(_attention_options, _sink_attention, transformer_engine=False),
    "joint_norm_attention": Mixer(
        _joint_norm_options, _joint_norm_attention, transformer_engine=False, in_megatron=False
    ),
    "latent_attention": Mixer(
        _latent_options, _latent_attention, transformer_engine=False, stored_names=_LATENT_NAMES
    ),
    # Megatron's indexer rotates the last dimensions of a head, so that its weights are others.
    "sparse_latent_attention": Mixer(
        _latent_options,
        _sparse_latent_attention,
        transformer_engine=False,
        stored_names=_LATENT_NAMES,
        in_megatron=False,
    ),
    "gated_delta_net": Mixer(
        _heterogeneous_options,
        _delta_net,
        transformer_engine=False,
        stored_names={"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"},
        in_megatron=False,
    ),
    "mamba2": Mixer(
        _heterogeneous_options,
        _mamba2,
        transformer_engine=False,
        stored_names={},
        in_megatron=False,
    ),
    NO_MIXER: Mixer(_heterogeneous_options, _nothing, transformer_engine=False),
}


def mixers_of(shape: ModelShape) -> list[Mixer]:
    """The kinds of mixers that the model has, each once."""
    return [MIXERS[kind] for kind in dict.fromkeys(shape.mixers)]


def mixer_options(shape: ModelShape) -> dict[str, object]:
    """The options of all kinds of mixers that the model has."""
    return {
        name: value for mixer in mixers_of(shape) for name, value in mixer.options(shape).items()
    }
