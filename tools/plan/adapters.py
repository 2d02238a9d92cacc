"""The adapters (`lora`) that a rank holds, in the order in which Megatron registers them; sizes in elements."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from megatron_gspo.config import LoRAConfig, ParallelConfig
from megatron_gspo.models.adapter_rules import adapted_parts
from megatron_gspo.models.families import FAMILIES
from megatron_gspo.models.mapping_rules import Shard
from megatron_gspo.models.model_shape import ModelShape
from megatron_gspo.tools.plan.parameters import (
    LayerKind,
    Parameter,
    chunk_layers,
    counts_by_size,
    kind_of,
    layer_kinds,
    layer_parameters,
    local_experts,
)


@dataclass(frozen=True)
class LayerAdapter:
    """Of one linear layer: A [width, columns] and B [rows, rank]; ``width``: the rank times the number of its Hugging
    Face tensors that are adapted. gathers: whether the product with A is gathered over the tensor-parallel ranks'
    tokens. copies: of an expert's, the local experts that compute with it."""

    name: str
    rank: int
    width: int
    rows: int
    columns: int
    expert: bool
    gathers: bool
    copies: int = 1

    @property
    def parameters(self) -> tuple[Parameter, Parameter]:
        """A and B."""
        return (Parameter(f"{self.name}.lora_A", self.width * self.columns, self.expert),
                Parameter(f"{self.name}.lora_B", self.rows * self.rank, self.expert))  # fmt: skip


@cache
def layer_adapters(shape: ModelShape, parallel: ParallelConfig, lora: LoRAConfig, kind: LayerKind
                   ) -> tuple[LayerAdapter, ...]:  # fmt: skip
    """The adapters of one transformer layer on one rank."""
    rules = {}
    for rule in FAMILIES[shape.model_type].layer_rules(shape, _first(shape, kind)):
        if adapted := adapted_parts(rule, lora.targets):
            name = rule.megatron[0].removeprefix("self_attention.").removeprefix("mlp.").replace("{expert}", "")
            rules[name.removesuffix(".weight")] = (len(adapted), rule.shard is Shard.ROWS)
    found: list[LayerAdapter] = []
    shared = lora.experts == "shared"
    local = local_experts(shape, parallel)
    for part in layer_parameters(shape, parallel, kind):
        parts, gathers = rules.get(re.sub(r"^experts\.\d+\.", "experts.", part.name), (0, False))
        if not parts or (part.expert and shared and not part.name.startswith("experts.0.")):
            continue
        rows, copies = part.count // part.columns, local if part.expert and shared else 1
        found.append(LayerAdapter(part.name, lora.rank, parts * lora.rank, rows, part.columns, part.expert,
                                  gathers and not part.expert, copies))  # fmt: skip
    return tuple(found)


def _first(shape: ModelShape, kind: LayerKind) -> int:
    return next(layer for layer in range(shape.num_layers) if kind_of(shape, layer) == kind)


def chunk_adapters(shape: ModelShape, parallel: ParallelConfig, lora: LoRAConfig, stage: int, chunk: int = 0
                   ) -> Iterator[Parameter]:  # fmt: skip
    """Every matrix of the adapters of a model chunk on a rank of ``stage``, in Megatron's order."""
    for layer in chunk_layers(shape, parallel, stage, chunk):
        for adapter in layer_adapters(shape, parallel, lora, kind_of(shape, layer)):
            yield from adapter.parameters


@cache
def adapter_counts(shape: ModelShape, parallel: ParallelConfig, lora: LoRAConfig, kind: LayerKind
                   ) -> tuple[Counter[int], Counter[int]]:  # fmt: skip
    """How many matrices of each size the adapters of a layer have on a rank: dense ones, experts'."""
    adapters = layer_adapters(shape, parallel, lora, kind)
    return counts_by_size([part for adapter in adapters for part in adapter.parameters])


def total_adapters(shape: ModelShape, lora: LoRAConfig) -> int:
    """Parameters of all adapters of a model."""
    kinds = layer_kinds(shape, range(shape.num_layers))
    return sum(layers * sum(count * copies for counts in adapter_counts(shape, ParallelConfig(), lora, kind)
                            for count, copies in counts.items()) for kind, layers in kinds.items())  # fmt: skip
