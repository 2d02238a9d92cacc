"""The ranks that send weights to servers and files, and what each of them sends.

Every pipeline stage and every expert-parallel rank of one data-parallel replica is a source of its
own tensors. Only the tensor-parallel ranks of a source take part in its stream, and only the source
receives their shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from megatron_gspo.mcore.hf_weights import (
    PIECE,
    MappedParameter,
    join_experts,
    join_shards,
    mapped_layers,
    pieces_of,
    split_row,
)
from megatron_gspo.mcore.process_groups import ProcessGroups
from megatron_gspo.models import Family, ModelShape, Shard
from megatron_gspo.models.stacked_experts import stack_experts
from megatron_gspo.weight_transport.weight_source import WeightSource, numbered


def default_sources(groups: ProcessGroups, family: Family) -> tuple[WeightSource, ...]:
    """The sources, with ascending ranks. The first one of a stage also sends what is not an
    expert's, and all experts where checkpoints hold them in one tensor.

    Megatron's order: expert-tensor rank fastest, then the expert-parallel rank, the replicas, the
    stages.
    """
    experts = range(1 if family.stacks_experts else groups.ep.size())
    return numbered(
        [
            WeightSource(first + number * groups.expert_tp.size(), shared=number == 0)
            for first in range(0, dist.get_world_size(), dist.get_world_size() // groups.pp.size())
            for number in experts
        ]
    )


def export_source(
    source: WeightSource,
    chunks: Sequence[GPTModel],
    family: Family,
    shape: ModelShape,
    groups: ProcessGroups,
    *,
    layers: dict[int, list[MappedParameter]] | None = None,
    piece: int = PIECE,
) -> Iterator[tuple[str, Tensor]]:
    """Stream (Hugging Face name, whole tensor) of what a source sends to its rank; nothing to the
    other ranks.

    Every rank may call it, and must consume the stream to its end; the source's tensor-parallel
    ranks have to. The streams of `default_sources` together are `export_weights`. Ranks take part
    in several of them in the order of the sources. Memory above the model: as `export_weights`.
    layers: what is exported; None: the weights.
    """
    sends_shared = source.shared and dist.get_global_rank(groups.tp, 0) == source.rank
    # Those that hold a source's experts.
    experts = groups.expert_tp_ep if family.stacks_experts else groups.expert_tp
    sends_experts = source.experts and dist.get_global_rank(experts, 0) == source.rank
    if not (sends_shared or sends_experts):  # most ranks, for each of the sources
        return
    layers = mapped_layers(chunks, family, shape, groups, None) if layers is None else layers
    parameters = [mapped for layer in sorted(layers) for mapped in layers[layer]]
    if sends_shared:
        yield from _export(
            [mapped for mapped in parameters if not mapped.rule.is_expert],
            groups.tp,
            shape,
            groups,
            piece,
        )
    if sends_experts:
        slices = _export(
            [mapped for mapped in parameters if mapped.rule.is_expert],
            experts,
            shape,
            groups,
            piece,
        )
        yield from stack_experts(slices, shape.num_experts)


def _export(
    parameters: list[MappedParameter],
    group: dist.ProcessGroup,
    shape: ModelShape,
    groups: ProcessGroups,
    piece: int,
) -> Iterator[tuple[str, Tensor]]:
    """Stream the parameters, whole, on the first rank of ``group``, whose ranks hold their
    shards, or all experts.
    """
    has_all_experts = group is groups.expert_tp_ep
    for section in pieces_of(parameters, groups, piece, of_one_source=not has_all_experts):
        sharded = [
            mapped for mapped in section if has_all_experts or mapped.rule.shard is not Shard.NONE
        ]
        ranks = _gather_on_first([mapped.tensor for mapped in sharded], group)
        if group.rank() == 0:
            if has_all_experts:
                tensors = join_experts(sharded, ranks, shape, groups)
            else:
                tensors = join_shards(sharded, ranks, shape)
            yield from tensors.items()
            del ranks, tensors  # before the next are gathered
            whole = [
                mapped
                for mapped in section
                if not has_all_experts and mapped.rule.shard is Shard.NONE
            ]
            yield from join_shards(whole, [[mapped.tensor for mapped in whole]], shape).items()


def _gather_on_first(parameters: list[Tensor], group: dist.ProcessGroup) -> list[list[Tensor]]:
    """Every rank's parameters on the first rank of ``group``; an empty list on the others."""
    if group.size() == 1 or not parameters:
        return [parameters] * group.size()
    flat = torch.cat([parameter.flatten() for parameter in parameters])
    first = dist.get_global_rank(group, 0)
    if group.rank():
        dist.gather(flat, dst=first, group=group)
        return []
    everyone = flat.new_empty(group.size(), flat.numel())
    dist.gather(flat, list(everyone), dst=first, group=group)
    return [split_row(row, parameters) for row in everyone]
