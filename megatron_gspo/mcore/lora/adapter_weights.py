"""The adapters' tensors under PEFT's names: which parameters they are, their first values, the
way in and out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from megatron_gspo.config import LoRAConfig
from megatron_gspo.mcore.hf_weights import MappedParameter, map_parameters
from megatron_gspo.mcore.lora.adapter import Adapter
from megatron_gspo.mcore.process_groups import ProcessGroups
from megatron_gspo.models import Family, ModelShape, Shard
from megatron_gspo.models.adapter_rules import adapted_parts, adapter_rules


class AdapterSource(Protocol):
    """Whole tensors of adapters by name, without a prefix:
    ``model.layers.0.self_attn.q_proj.lora_A.weight``.
    """

    def __call__(self, name: str, sizes: tuple[int, int]) -> Tensor: ...


@dataclass(frozen=True)
class _Adapted:
    """A weight of this rank and its adapter, with the rules of A and B."""

    base: MappedParameter
    adapter: Adapter
    a: MappedParameter
    b: MappedParameter


def _adapted(
    chunks: Sequence[GPTModel],
    lora: LoRAConfig,
    family: Family,
    shape: ModelShape,
    groups: ProcessGroups,
) -> Iterator[_Adapted]:
    for chunk in chunks:
        for base in map_parameters(chunk, family, shape, groups):
            if base.adapter is not None:
                rules = adapter_rules(base.rule, adapted_parts(base.rule, lora.targets))
                a = replace(base, parameter=base.adapter.lora_A, rule=rules[0], adapter=None)
                b = replace(base, parameter=base.adapter.lora_B, rule=rules[1], adapter=None)
                yield _Adapted(base, base.adapter, a, b)


def adapter_layers(
    chunks: Sequence[GPTModel],
    lora: LoRAConfig,
    family: Family,
    shape: ModelShape,
    groups: ProcessGroups,
    attribute: str = "data",
) -> dict[int, list[MappedParameter]]:
    """The adapters of each layer of this stage, to be exported.

    attribute: ``data``, or ``main_grad``.
    """
    layers: dict[int, list[MappedParameter]] = {}
    for adapted in _adapted(chunks, lora, family, shape, groups):
        for mapped in (adapted.a, adapted.b):
            tensor = getattr(mapped.parameter, attribute).detach()
            layers.setdefault(mapped.layer, []).append(replace(mapped, parameter=tensor))
    return layers


def adapter_parameters(
    chunk: GPTModel, lora: LoRAConfig, family: Family, shape: ModelShape, groups: ProcessGroups
) -> dict[str, MappedParameter]:
    """A and B of each weight of a model chunk, by their names in the chunk.

    Experts that share one have it each.
    """
    return {
        f"{adapted.base.name.removesuffix('weight')}lora.lora_{which}": mapped
        for adapted in _adapted([chunk], lora, family, shape, groups)
        for which, mapped in (("A", adapted.a), ("B", adapted.b))
    }


@torch.no_grad()
def fill_adapters(
    source: AdapterSource,
    chunks: Sequence[GPTModel],
    lora: LoRAConfig,
    family: Family,
    shape: ModelShape,
    groups: ProcessGroups,
) -> None:
    """Set this rank's slices of the adapters. Experts that share one take the first expert's."""
    done: set[int] = set()
    for adapted in _adapted(chunks, lora, family, shape, groups):
        if id(adapted.adapter) in done:
            continue
        done.add(id(adapted.adapter))
        adapter = adapted.adapter
        rank = adapter.rank
        a = adapted.a
        b = adapted.b
        if adapted.base.rule.is_expert and lora.experts == "shared":
            a = replace(a, expert=0)
            b = replace(b, expert=0)
        for index, rows in enumerate(adapter.tensor_rows):
            value = _slice(source, a, index, (rank, adapter.lora_A.shape[1]), groups)
            adapter.lora_A[index * rank : (index + 1) * rank] = value.to(adapter.lora_A)
            value = _slice(source, b, index, (len(rows), rank), groups)
            adapter.lora_B[rows.to(adapter.lora_B.device)] = value.to(adapter.lora_B)


def _slice(
    source: AdapterSource,
    mapped: MappedParameter,
    index: int,
    sizes: tuple[int, int],
    groups: ProcessGroups,
) -> Tensor:
    """This rank's slice, of ``sizes``, of one of the tensors that a matrix consists of."""
    name = mapped.names[index]
    if mapped.rule.shard is Shard.NONE:
        return source(name, sizes)
    group = groups.expert_tp if mapped.rule.is_expert else groups.tp
    dim = mapped.rule.shard.value
    whole = (sizes[0] * group.size(), sizes[1]) if dim == 0 else (sizes[0], sizes[1] * group.size())
    return source(name, whole).chunk(group.size(), dim=dim)[group.rank()]


def first_values(seed: int) -> AdapterSource:
    """PEFT's: A is uniform within 1 / sqrt(in), B is 0.

    Drawn by name, so that they don't depend on the layout.
    """

    def draw(name: str, sizes: tuple[int, int]) -> Tensor:
        if name.endswith(".lora_B.weight"):
            return torch.zeros(sizes)
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        return (2.0 * torch.rand(sizes, generator=generator) - 1.0) * sizes[1] ** -0.5

    return draw
