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
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAlltoAllTokenDispatcher,
    MoETokenDispatcher,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    get_transformer_layer_offset,
)
from torch import Tensor

from megatron_gspo.mcore.gated_units import SWIGLU, ClampedGLU, GatedUnit
from megatron_gspo.mcore.lora.adapter import expert_adapters
from megatron_gspo.mcore.mixers import MIXERS
from megatron_gspo.mcore.norms import RMSNorm
from megatron_gspo.mcore.operators import (
    ExpertWeights,
    Permutation,
    gated_experts,
    masked_entries,
    permute,
    unpermute,
)
from megatron_gspo.mcore.rotated_attention import RotatedSelfAttention
from megatron_gspo.models.model_shape import ModelShape


class FusedSequentialMLP(SequentialMLP):
    """Megatron's ``SequentialMLP`` as one autograd node; see ``gated_experts``. Under expert-tensor
    parallelism too it adds the experts' biases once."""

    def forward(
        self,
        permuted_local_hidden_states: Tensor,
        tokens_per_expert: Tensor,
        permuted_probs: Tensor,
    ) -> tuple[Tensor, None]:
        up = [expert.linear_fc1 for expert in self.local_experts]
        down = [expert.linear_fc2 for expert in self.local_experts]
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
            permuted_local_hidden_states, permuted_probs, tokens_per_expert, weights, unit
        )
        return output, None


def _run_pre_hooks(module: torch.nn.Module) -> None:
    """Run the forward pre-hooks of a module whose weight is used without calling it. With
    ``overlap_param_gather`` one of them waits for the all-gather of the weights."""
    for hook in module._forward_pre_hooks.values():
        hook(module, ())


class MoEStaticTokenDispatcher(MoEAlltoAllTokenDispatcher):
    """Megatron's dispatcher with a permutation of known size: each token has ``moe_router_topk``
    experts.

    Megatron's own selects by a mask, for which the host waits twice per pass, and adds up a token's
    experts in the dtype of the activations.
    """

    permutation: Permutation | None = None  # between dispatch and combine
    probs: Tensor | None = None
    tokens_per_expert: Tensor | None = None

    def dispatch_preprocess(
        self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        counts = self.preprocess(routing_map)
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_permutation_1", counts)
        self.probs = probs.detach()  # combine_preprocess reads its dtype
        self.hidden_shape = hidden_states.shape
        token, expert = masked_entries(routing_map, self.config.moe_router_topk)
        self.permutation = Permutation.of(token, routing_map.sum(1))
        copies = permute(hidden_states.reshape(-1, hidden_states.shape[-1]), self.permutation)
        return copies, probs.reshape(-1).index_select(0, token * probs.shape[1] + expert)

    def combine_postprocess(self, permutated_local_input_tokens: Tensor) -> Tensor:
        assert self.permutation is not None, "dispatch_preprocess comes first"
        output = unpermute(permutated_local_input_tokens, self.permutation).view(self.hidden_shape)
        # Nothing of a finished pass stays.
        self.permutation = None
        self.probs = None
        self.tokens_per_expert = None
        return output


class MoELocalTokenDispatcher(MoEStaticTokenDispatcher):
    """Megatron's dispatcher for experts that are all on this rank: sorts tokens by expert,
    without communication.
    """

    def preprocess(self, routing_map: Tensor) -> Tensor:
        return routing_map.sum(0)

    def _maybe_dtoh_and_synchronize(
        self, point: str, tokens_per_expert: Tensor | None = None
    ) -> Tensor | None:
        return tokens_per_expert  # no collective needs sizes on the host

    def token_dispatch(
        self, permutated_local_input_tokens: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        return permutated_local_input_tokens, permuted_probs

    def dispatch_postprocess(
        self, global_input_tokens: Tensor, global_probs: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        return global_input_tokens, self.tokens_per_expert, global_probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        return hidden_states

    def token_combine(self, hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor:
        return hidden_states


def _is_static(dispatcher: MoETokenDispatcher) -> bool:
    """Whether each token has as many experts as any other, and no shared expert runs meanwhile."""
    config = dispatcher.config
    return (
        type(dispatcher) is MoEAlltoAllTokenDispatcher
        and dispatcher.shared_experts is None
        and config.moe_expert_capacity_factor is None
        and not config.moe_permute_fusion
        and not getattr(config, "moe_router_padding_for_quantization", False)
        # A graph reads upstream's attributes.
        and getattr(config, "cuda_graph_impl", "none") in (None, "none")
    )


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
            if type(module) is SelfAttention:
                module.__class__ = RotatedSelfAttention
                module.rotary = shape.rotary
            else:
                module.core_attention.rotary = shape.rotary
        elif type(module) is SequentialMLP and _unit_of(module.config) is not None:
            module.__class__ = FusedSequentialMLP
        elif isinstance(module, TransformerLayer) and isinstance(module.mlp, MoELayer):
            _name_as_transformer_engine(module)


def use_own_dispatchers(model: torch.nn.Module) -> None:
    """Replace Megatron's token dispatchers where each token has as many experts as any other. Their
    scatter-add in the dtype of the activations gives other sums in every pass on a GPU."""
    for module in model.modules():
        if isinstance(module, MoELayer) and _is_static(module.token_dispatcher):
            dispatcher = module.token_dispatcher
            is_local = dispatcher.tp_size == dispatcher.ep_size == 1
            dispatcher.__class__ = MoELocalTokenDispatcher if is_local else MoEStaticTokenDispatcher


def _name_as_transformer_engine(layer: TransformerLayer) -> None:
    """Store the norm before a layer's experts under the name that it has with Transformer Engine.

    Megatron's torch spec stores it as the norm that Transformer Engine fuses into a dense layer's
    MLP, so that checkpoints could not be exchanged between the two implementations.
    """
    submodules = layer.submodules_config
    names = submodules.sharded_state_dict_keys_map
    kept = {name: stored for name, stored in names.items() if name != "pre_mlp_layernorm."}
    layer.submodules_config = replace(submodules, sharded_state_dict_keys_map=kept)


def _unit_of(config: TransformerConfig) -> GatedUnit | None:
    """The gated unit of the experts; None where ours don't compute as the config has it."""
    if not config.gated_linear_unit or config.moe_apply_probs_on_input:
        return None
    if config.fp8 or getattr(config, "fp4", None):
        return None
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
    if mixer.stored_names is not None:
        submodules.sharded_state_dict_keys_map = dict(mixer.stored_names)
    return spec
