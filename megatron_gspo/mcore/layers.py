"""Layer specs: Transformer Engine's where installed, else torch modules with packing and every
parallelism.
"""

from __future__ import annotations

import copy
import importlib.util
from dataclasses import replace

import torch
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    get_transformer_layer_offset,
)
from torch import Tensor

from megatron_gspo.mcore.gated_units import (
    SQUARED_RELU,
    SWIGLU,
    ClampedGLU,
    ExpertUnit,
    squared_relu,
)
from megatron_gspo.mcore.lora.adapter import expert_adapters
from megatron_gspo.mcore.mixers import MIXERS
from megatron_gspo.mcore.norms import RMSNorm
from megatron_gspo.mcore.operators import ExpertWeights, gated_experts
from megatron_gspo.mcore.rotated_attention import RotatedSelfAttention
from megatron_gspo.mcore.token_dispatchers import LastExpertFirst, MoEStaticTokenDispatcher
from megatron_gspo.models.model_shape import ModelShape


class FusedSequentialMLP(SequentialMLP):
    """Megatron's ``SequentialMLP`` as one autograd node; see ``gated_experts``. Under expert-tensor
    parallelism too it adds the experts' biases once."""

    def forward(
        self,
        permuted_local_hidden_states: Tensor,
        tokens_per_expert: Tensor | LastExpertFirst,
        permuted_probs: Tensor,
    ) -> tuple[Tensor, None]:
        experts = list(self.local_experts)
        if isinstance(tokens_per_expert, LastExpertFirst):
            experts.reverse()
            counts = tokens_per_expert.counts
            copies = tokens_per_expert.copies
        else:
            counts = tokens_per_expert
            copies = None
        up = [expert.linear_fc1 for expert in experts]
        down = [expert.linear_fc2 for expert in experts]
        for linear in up + down:
            _run_pre_hooks(linear)
            if hasattr(linear, "lora"):
                _run_pre_hooks(linear.lora)
        has_bias = self.config.add_bias_linear
        weights = ExpertWeights(
            [linear.weight for linear in up],
            [linear.weight for linear in down],
            up_adapter=expert_adapters(up),
            down_adapter=expert_adapters(down),
            down_bias_share=1 / self.tp_group.size(),
            up_bias=[linear.bias for linear in up] if has_bias else (),
            down_bias=[linear.bias for linear in down] if has_bias else (),
        )
        unit = _unit_of(self.config)
        assert unit is not None
        output = gated_experts(
            permuted_local_hidden_states, permuted_probs, counts, weights, unit, copies
        )
        return output, None


def _run_pre_hooks(module: torch.nn.Module) -> None:
    """Run the forward pre-hooks of a module whose weight is used without calling it. With
    ``overlap_param_gather`` one of them waits for the all-gather of the weights."""
    for hook in module._forward_pre_hooks.values():
        hook(module, ())


def use_own_operators(model: torch.nn.Module, shape: ModelShape) -> None:
    """Finish a model built from ``block_spec`` without Transformer Engine and with
    ``position_embedding_type="none"``.

    Attention applies the rotary embedding and its layer's window; expert layers become
    ``FusedSequentialMLP``; parameters and their names stay. The classes are replaced here and not
    in the spec, which the supported versions of Megatron nest differently.
    """
    for module in model.modules():
        if isinstance(module, SelfAttention):
            module.core_attention.window = shape.windows[module.layer_number - 1]
            if not shape.rotary.dim:
                continue
            if type(module) is SelfAttention:
                module.__class__ = RotatedSelfAttention
                module.rotary = shape.rotary
            else:
                module.core_attention.rotary = shape.rotary
        elif type(module) is SequentialMLP and _unit_of(module.config) is not None:
            module.__class__ = FusedSequentialMLP
        elif isinstance(module, TransformerLayer) and isinstance(module.mlp, MoELayer):
            _name_as_transformer_engine(module)
    for module in model.modules():
        if (
            isinstance(module, MoELayer)
            and isinstance(module.experts, FusedSequentialMLP)
            and isinstance(module.token_dispatcher, MoEStaticTokenDispatcher)
        ):
            module.token_dispatcher.last_first = True


def _name_as_transformer_engine(layer: TransformerLayer) -> None:
    """Store the norm before a layer's experts under the name that it has with Transformer Engine.

    Megatron's torch spec stores it as the norm that Transformer Engine fuses into a dense layer's
    MLP, so that checkpoints could not be exchanged between the two implementations.
    """
    submodules = layer.submodules_config
    names = submodules.sharded_state_dict_keys_map
    kept = {name: stored for name, stored in names.items() if name != "pre_mlp_layernorm."}
    layer.submodules_config = replace(submodules, sharded_state_dict_keys_map=kept)


def _unit_of(config: TransformerConfig) -> ExpertUnit | None:
    """The unit of the experts; None where ours don't compute as the config has it."""
    if config.moe_apply_probs_on_input:
        return None
    if config.fp8 or getattr(config, "fp4", None):
        return None
    if not config.gated_linear_unit:
        return SQUARED_RELU if config.activation_func is squared_relu else None
    limit = config.activation_func_clamp_value
    offset = config.glu_linear_offset
    if config.activation_func is torch.nn.functional.silu and limit is None and not offset:
        return SWIGLU
    if config.activation_func is quick_gelu and limit is not None:
        return ClampedGLU(limit, offset=offset)
    return None


def transformer_engine_available() -> bool:
    """Whether Transformer Engine is installed and there is a CUDA device."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


def block_spec(
    config: TransformerConfig,
    shape: ModelShape | None = None,
    *,
    transformer_engine: bool,
    vp_stage: int | None = None,
) -> TransformerBlockSubmodules:
    """The layers that this pipeline stage builds.

    ``shape``: what mixes the tokens of each layer; None: attention as ``config`` has it.
    """
    block = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=transformer_engine,
        normalization="RMSNorm",
        vp_stage=vp_stage,
    )
    if transformer_engine:
        return block
    block.layer_norm = RMSNorm
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    block.layer_specs = [
        _torch_layer(copy.deepcopy(spec), config, shape, first + i)
        for i, spec in enumerate(block.layer_specs)
    ]
    return block


def _torch_layer(
    spec: ModuleSpec, config: TransformerConfig, shape: ModelShape | None, layer: int
) -> ModuleSpec:
    """The spec with our mixer and norms in it; ``layer`` counts all layers of the model."""
    submodules = spec.submodules
    submodules.input_layernorm = RMSNorm
    submodules.pre_mlp_layernorm = RMSNorm
    mixer = MIXERS["attention" if shape is None else shape.mixers[layer]]
    submodules.self_attention = mixer.build_spec(submodules.self_attention, config, shape)
    if submodules.self_attention.module is IdentityOp:
        submodules.input_layernorm = IdentityOp
        submodules.self_attn_bda = IdentityFuncOp
    if shape is not None and not shape.mlp_layers[layer]:
        submodules.pre_mlp_layernorm = submodules.mlp = IdentityOp
        submodules.mlp_bda = IdentityFuncOp
    if mixer.stored_names is not None:
        submodules.sharded_state_dict_keys_map = dict(mixer.stored_names)
    return spec
