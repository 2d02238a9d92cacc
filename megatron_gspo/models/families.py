"""The model families by ``model_type``; each is stated in a file of its group, such as
``qwen.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from megatron_gspo.models.config_defaults import HFConfig, shown
from megatron_gspo.models.deepseek import DEEPSEEK
from megatron_gspo.models.family import Family
from megatron_gspo.models.glm import GLM
from megatron_gspo.models.gpt_oss import GPT_OSS
from megatron_gspo.models.minimax import MINIMAX
from megatron_gspo.models.model_shape import ModelError, ModelShape, check_sizes, language_config
from megatron_gspo.models.nemotron import NEMOTRON
from megatron_gspo.models.qwen import QWEN
from megatron_gspo.models.qwen35 import QWEN35
from megatron_gspo.models.qwen_next import QWEN_NEXT
from megatron_gspo.models.rotary import NO_ROTARY
from megatron_gspo.models.rule_tables import VALUE_HEAD
from megatron_gspo.models.stacked_experts import checkpoint_names

_ALL = (*QWEN, *QWEN_NEXT, *QWEN35, *DEEPSEEK, *GLM, *GPT_OSS, *MINIMAX, *NEMOTRON)
FAMILIES = {family.model_type: family for family in _ALL}


def family_of(config: HFConfig) -> tuple[Family, ModelShape]:
    """The family and sizes of a Hugging Face config; ``ModelError`` for an unknown
    ``model_type``.
    """
    config = language_config(config)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ModelError(
            f"model_type={shown(model_type)} in config.json is not supported; known:"
            f" {', '.join(sorted(FAMILIES))}"
        )
    family = FAMILIES[model_type]
    check_sizes(config)
    try:
        shape = family.shape(config)
    except KeyError as error:
        raise ModelError(f"config.json of a {model_type} model lacks the key {error}") from None
    rotated = shape.rotary.dim
    if shape.rotary is not NO_ROTARY and (rotated < 2 or rotated % 2):
        raise ModelError(
            f"config.json rotates {rotated} dimensions of a head; give an even number above 0"
        )
    return family, shape


def hugging_face_names(family: Family, shape: ModelShape) -> Iterator[str]:
    """Every tensor that a checkpoint of this model holds by name, in the order of the layers;
    tensors of all experts slice by slice (``stacked_experts.py``)."""
    embedding, *other_rules = family.outer_rules(shape)
    yield from embedding.names()
    for layer in range(shape.num_layers):
        for rule in family.layer_rules(shape, layer):
            for expert in range(shape.num_experts) if rule.is_expert else (0,):
                yield from rule.names_in(layer, expert)
    for rule in other_rules:
        yield from rule.names()


def names_of_own_type(names: Iterable[str], family: Family, shape: ModelShape) -> set[str]:
    """Names of the tensors that keep a type of their own in checkpoints of any type: float32,
    or carried.
    """
    kept = carried_names(names, shape)
    for layer in range(shape.num_layers):
        for rule in family.layer_rules(shape, layer):
            if rule.keeps_float32:
                kept.update(rule.names_in(layer, 0))
    return kept


def carried_names(names: Iterable[str], shape: ModelShape) -> set[str]:
    """The names of a checkpoint's tensors that are not trained, such as multi-token prediction's.
    They are converted and exported as they are."""
    return {name for name in names if name.startswith(shape.carried)}


def with_value_head(shape: ModelShape) -> ModelShape:
    """The value model of these sizes, which has no use for the output weight."""
    return replace(shape, tied_embeddings=False, value_head=True)


def check_names(names: set[str], family: Family, shape: ModelShape) -> None:
    """Compare a checkpoint's tensor names with what the model needs; ``ModelError`` names one
    missing or extra.

    A value model takes a language model's checkpoint too.
    """
    expected = set(checkpoint_names(hugging_face_names(family, shape)))
    names = names - carried_names(names, shape)
    if shape.tied_embeddings or shape.value_head:
        names = names - {family.output_weight}
    if shape.value_head:
        names = names | set(VALUE_HEAD.hugging_face)
    if missing := sorted(expected - names):
        raise ModelError(
            f"checkpoint lacks {missing[0]} ({len(missing)} missing); config.json and weights"
            " disagree"
        )
    if extra := sorted(names - expected):
        raise ModelError(
            f"checkpoint has {extra[0]}, which the model does not use ({len(extra)} extra)"
        )
