"""What mixes the tokens of a layer, by its kind in ``ModelShape.mixers``: how Megatron is configured for it and which
torch modules take the place of Megatron's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_gspo.mcore.attention import PackedAttention
from megatron_gspo.mcore.norms import RMSNorm
from megatron_gspo.models.model_shape import ModelShape


@dataclass(frozen=True)
class Mixer:
    """options: of Megatron's config class. place: changes ``self_attention`` of a layer's submodules, a spec of
    Megatron's torch layers that is this layer's own; it returns what becomes ``self_attention``."""

    options: Callable[[ModelShape], dict[str, Any]]
    place: Callable[[Any, ModelShape], Any]


def _attention_options(shape: ModelShape) -> dict[str, Any]:
    return dict(
        num_query_groups=shape.num_query_groups,
        kv_channels=shape.head_dim,
        qk_layernorm=shape.query_key_norms,
        add_qkv_bias=shape.attention_bias,
    )


def _attention(spec: Any, shape: ModelShape) -> Any:
    spec.submodules.core_attention = PackedAttention
    if shape.query_key_norms:
        spec.submodules.q_layernorm = spec.submodules.k_layernorm = RMSNorm
    return spec


MIXERS = {"attention": Mixer(_attention_options, _attention)}


def mixer_options(shape: ModelShape) -> dict[str, Any]:
    """The options of all kinds of mixers that the model has."""
    return {name: value for kind in dict.fromkeys(shape.mixers) for name, value in MIXERS[kind].options(shape).items()}
