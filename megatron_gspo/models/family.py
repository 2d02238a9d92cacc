"""What a model family states: its layer facts and its tables of names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megatron_gspo.models.config_defaults import HFConfig
from megatron_gspo.models.mapping_rules import Rule
from megatron_gspo.models.model_shape import ModelShape
from megatron_gspo.models.rule_tables import OUTER, VALUE_HEAD
from megatron_gspo.models.stacked_experts import tensor_of


@dataclass(frozen=True)
class Family:
    """A model type: how to read its sizes and layer facts, and the rules of its layers (names
    relative to the layer)."""

    model_type: str
    shape: Callable[[HFConfig], ModelShape]
    """Reads the sizes and layer facts from a config.json."""

    mixers: Mapping[str, tuple[Rule, ...]]
    """The rules of what mixes the tokens, by its key in ``ModelShape.mixers``."""

    dense: tuple[Rule, ...]
    """The rules of a feed-forward layer without experts."""

    experts: tuple[Rule, ...] = ()
    """The rules of one with experts."""

    outer: tuple[Rule, ...] = OUTER
    """The rules outside of the layers."""

    in_transformers: tuple[tuple[str, str], ...] = ()
    """Parts of names in checkpoints, each with what Transformers' own models have in its place."""

    type_in_transformers: str | None = None
    """The type under which Transformers has the model, where it does not know this one."""

    @property
    def stacks_experts(self) -> bool:
        """Whether checkpoints hold all experts of a layer in one tensor."""
        return any(tensor_of(name)[1] is not None for rule in self.experts for name in rule.names())

    @property
    def output_weight(self) -> str:
        """The name of the output weight in checkpoints."""
        output = next(rule for rule in self.outer if rule.megatron == VALUE_HEAD.megatron)
        return output.names()[0]

    def layer_rules(self, shape: ModelShape, layer: int) -> tuple[Rule, ...]:
        """The rules of layer ``layer``, its mixer's first."""
        feed_forward: tuple[Rule, ...] = ()
        if shape.mlp_layers[layer]:
            feed_forward = self.experts if shape.moe_layers[layer] else self.dense
        rules = self.mixers[shape.mixers[layer]] + feed_forward
        return tuple(rule for rule in rules if rule.applies(shape))

    def name_in_transformers(self, name: str) -> str:
        """The name of a checkpoint's tensor in Transformers' own model, experts one by one."""
        for stored, in_transformers in self.in_transformers:
            name = name.replace(stored, in_transformers)
        return name

    def outer_rules(self, shape: ModelShape) -> tuple[Rule, ...]:
        """The rules outside of the layers; with tied embeddings there is no output weight."""
        if not shape.tied_embeddings and not shape.value_head:
            return self.outer
        rules = tuple(rule for rule in self.outer if rule.megatron != VALUE_HEAD.megatron)
        return (*rules, VALUE_HEAD) if shape.value_head else rules
