"""Which linear layers of a model can have a low-rank adapter, and the names of its tensors, as PEFT
has them.

The adapter of a Megatron parameter that is made of several Hugging Face tensors has a matrix A for
each of them, one below the other, and one B with the rows of the parameter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection
from dataclasses import replace

import torch
from torch import Tensor

from megatron_gspo.models.family import Family
from megatron_gspo.models.mapping_rules import Rule, Shard
from megatron_gspo.models.model_shape import ModelShape

_LINEAR = re.compile(r"(.+\.)?linear_\w+\.weight(\{expert\})?")  # Megatron's names of linear layers
_ROUTER = re.compile(r"(.+\.)?router\.weight")


def linear_name(hugging_face: str) -> str:
    """The field's name of a linear layer, such as ``q_proj``, from that of its weight."""
    return hugging_face.removesuffix(".weight").rpartition(".")[2]


def is_linear(rule: Rule) -> bool:
    """Whether a parameter is the weight of a linear layer that has an adapter unless targets are
    named: not the router's, the output layer's or the embedding's, nor one whose rows are cut in
    blocks or stored for all experts at once, nor one that its family excludes."""
    stored_whole = all(name.endswith(".weight") for name in rule.hugging_face)
    is_layer = _LINEAR.fullmatch(rule.megatron[0]) is not None
    return rule.takes_adapter and rule.blocks is None and stored_whole and is_layer


def is_router(rule: Rule) -> bool:
    """Whether a parameter is a router's weight, which has an adapter only where targets name it."""
    return rule.takes_adapter and _ROUTER.fullmatch(rule.megatron[0]) is not None


def linear_names(family: Family, shape: ModelShape) -> list[str]:
    """The names of a model's linear layers that have adapters by default, in the order of a
    layer, each once.
    """
    return _names(is_linear, family, shape)


def router_names(family: Family, shape: ModelShape) -> list[str]:
    """The names of a model's routers, such as ``gate``; none of a dense model."""
    return _names(is_router, family, shape)


def _names(chosen: Callable[[Rule], bool], family: Family, shape: ModelShape) -> list[str]:
    names: dict[str, None] = {}  # each once, in their order
    for layer in range(shape.num_layers):
        for rule in family.layer_rules(shape, layer):
            if chosen(rule):
                names.update(dict.fromkeys(map(linear_name, rule.hugging_face)))
    return list(names)


def adapted_parts(rule: Rule, targets: Collection[str] | None) -> tuple[int, ...]:
    """The indices of a rule's Hugging Face tensors that have an adapter.

    targets: names; None: all but the router's.
    """
    if not (is_linear(rule) or (is_router(rule) and targets is not None)):
        return ()
    names = [linear_name(name) for name in rule.hugging_face]
    return tuple(i for i, name in enumerate(names) if targets is None or name in targets)


def rows_of_parts(rule: Rule, parts: tuple[int, ...], rows: int, shape: ModelShape) -> list[Tensor]:
    """For each of ``parts`` the rows of the parameter [rows, in] that are its tensor's, in that
    order, int64.
    """
    row_numbers = torch.arange(rows, device="cpu")[:, None]
    split = rule.split(row_numbers, shape)
    return [split[part].flatten() for part in parts]


def adapter_scale(rank: int, alpha: float, rslora: bool) -> float:
    """What B A is multiplied by: alpha / rank, with rsLoRA alpha / sqrt(rank)."""
    return alpha / (math.sqrt(rank) if rslora else rank)


def add_product(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """``weight`` [out, in] + ``scale * b @ a``, a new tensor: the product is of float32 or wider,
    rounded to the type of the weight before it is added, as in PEFT."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    return weight + ((b.to(dtype) @ a.to(dtype)) * scale).to(weight.dtype)


def adapter_rules(rule: Rule, parts: tuple[int, ...]) -> tuple[Rule, Rule]:
    """The rules of A [parts * rank, in] and B [out, rank] of a parameter's adapter, for the way
    out.
    """
    names = [rule.hugging_face[part].removesuffix(".weight") for part in parts]

    def split_a(tensor: Tensor, shape: ModelShape) -> list[Tensor]:
        return list(tensor.chunk(len(parts)))

    def split_b(tensor: Tensor, shape: ModelShape) -> list[Tensor]:
        split = rule.split(tensor, shape)
        return [split[part] for part in parts]

    names_a = tuple(f"{name}.lora_A.weight" for name in names)
    names_b = tuple(f"{name}.lora_B.weight" for name in names)
    shard_a = rule.shard if rule.shard is Shard.COLUMNS else Shard.NONE
    shard_b = rule.shard if rule.shard is Shard.ROWS else Shard.NONE
    return (
        replace(rule, hugging_face=names_a, shard=shard_a, split=split_a),
        replace(rule, hugging_face=names_b, shard=shard_b, split=split_b),
    )
