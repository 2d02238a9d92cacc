"""Load Hugging Face weights into Megatron's shards, and export them as a stream of Hugging Face
tensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from megatron_gspo.mcore.process_groups import ProcessGroups, compute_device
from megatron_gspo.models import Family, ModelError, ModelShape, Rule, Shard, check_names
from megatron_gspo.models.families import VALUE_HEAD
from megatron_gspo.models.hf_checkpoint import CheckpointReader
from megatron_gspo.models.parameter_slices import ParameterSlice
from megatron_gspo.models.stacked_experts import stack_experts

if TYPE_CHECKING:
    from megatron_gspo.mcore.lora.adapter import Adapter

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
# Bytes of whole tensors per all-gather: large enough to use the network's bandwidth, small enough
# that glibc reuses the memory: it returns larger blocks to the system, and every page would be
# mapped again.
PIECE = 16 * 2**20
_EXPERT = re.compile(r"(mlp\.experts\.(?:local_experts\.|linear_fc[12]\.weight))(\d+)(.*)")

Section = tuple[int, int]  # layer, piece of it


class TensorHeader(NamedTuple):
    """A Hugging Face tensor without its values."""

    name: str
    sizes: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class MappedParameter:
    """A local parameter, its name in the model, its mapping rule, and its global layer (-1 outside
    of the layers) and expert. adapter: of a linear layer, if it has one."""

    name: str
    parameter: Tensor
    rule: Rule
    layer: int
    expert: int
    adapter: Adapter | None = None

    @property
    def tensor(self) -> Tensor:
        """What is exported: the parameter, with its adapter merged."""
        return self.parameter if self.adapter is None else self.adapter.merged(self.parameter)

    @property
    def names(self) -> list[str]:
        """The names of the Hugging Face tensors that it consists of."""
        return self.rule.names_in(self.layer, self.expert)

    def local_slice(self, groups: ProcessGroups) -> ParameterSlice:
        """This rank's slice of the tensors, as plain data."""
        group = groups.expert_tp if self.rule.is_expert else groups.tp
        rank, ranks = (0, 1) if self.rule.shard is Shard.NONE else (group.rank(), group.size())
        return ParameterSlice(
            self.rule, self.layer, self.expert, tuple(self.parameter.shape), rank, ranks
        )


def map_parameters(
    chunk: GPTModel, family: Family, shape: ModelShape, groups: ProcessGroups
) -> Iterator[MappedParameter]:
    """Every weight of an (unwrapped) model chunk with its rule; one that no rule matches raises
    ``ValueError``.
    """
    layers = chunk.decoder.layers
    # By layer and Megatron's name; a layer may have thousands of parameters.
    rules: dict[int, dict[str, Rule]] = {}
    for name, parameter, module in _held(chunk):
        match = _LAYER.fullmatch(name)
        layer = layers[int(match[1])].layer_number - 1 if match else -1
        local = match[2] if match else name
        if layer not in rules:
            layer_rules = family.layer_rules(shape, layer) if match else family.outer_rules(shape)
            rules[layer] = {key: rule for rule in layer_rules for key in rule.megatron}
        expert = 0
        if is_expert := _EXPERT.fullmatch(local):
            expert = int(is_expert[2]) + groups.ep.rank() * (shape.num_experts // groups.ep.size())
            local = f"{is_expert[1]}{{expert}}{is_expert[3]}"
        # The last pipeline stage's copy of the embedding.
        if shape.tied_embeddings and local == "output_layer.weight":
            local = "embedding.word_embeddings.weight"
        rule = rules[layer].get(local)
        if rule is None:
            raise ValueError(
                f"no rule of family {family.model_type} matches the Megatron parameter {name}"
            )
        adapter = getattr(module, "lora", None) if name.endswith(".weight") else None
        yield MappedParameter(name, parameter, rule, layer, expert, adapter)


def held_tensors(chunk: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of all weights: the parameters and the buffers that checkpoints hold (the
    routers' bias). Without adapters, which are no part of the model."""
    yield from ((name, tensor) for name, tensor, _module in _held(chunk))


def _held(chunk: torch.nn.Module) -> Iterator[tuple[str, Tensor, torch.nn.Module]]:
    """Like `held_tensors`, with the module that owns each tensor.

    One walk over the modules, of which a layer may have hundreds.
    """
    seen: set[Tensor] = set()  # a tied parameter is in two modules
    buffers: list[tuple[str, Tensor, torch.nn.Module]] = []
    for path, module in chunk.named_modules():
        prefix = f"{path}." if path else ""
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter not in seen and ".lora." not in prefix:
                seen.add(parameter)
                yield prefix + name, parameter, module
        buffers += [
            (prefix + name, buffer, module)
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set
        ]
    yield from buffers


def load_weights(
    chunks: Sequence[GPTModel], path: str, family: Family, shape: ModelShape, groups: ProcessGroups
) -> None:
    """Copy a Hugging Face checkpoint into this rank's (unwrapped) chunks, reading only what this
    rank holds.

    A value head that the checkpoint lacks stays as it is. Raises ``ModelError`` naming the tensor
    when names or sizes disagree, or a value isn't finite.
    """
    with CheckpointReader(path) as reader, torch.no_grad():
        check_names(reader.names, family, shape)
        for chunk in chunks:
            for mapped in map_parameters(chunk, family, shape, groups):
                if mapped.rule is VALUE_HEAD and mapped.names[0] not in reader.names:
                    continue
                local = mapped.local_slice(groups)
                local.check(reader, shape)
                mapped.parameter.copy_(_finite(local, local.read(reader, shape), shape))


def _finite(local: ParameterSlice, value: Tensor, shape: ModelShape) -> Tensor:
    """The value unchanged; ``ModelError`` for NaN or infinity.

    Twice as fast as the copy that follows.
    """
    if not _is_finite(value):
        name = next(
            name for name, tensor in local.split(value, shape).items() if not _is_finite(tensor)
        )
        raise ModelError(
            f"{name} holds NaN or infinity in the checkpoint; use an earlier checkpoint"
        )
    return value


def _is_finite(value: Tensor) -> bool:
    return not value.numel() or bool(torch.isfinite(torch.stack(value.aminmax())).all())


def export_weights(
    chunks: Sequence[GPTModel],
    family: Family,
    shape: ModelShape,
    groups: ProcessGroups,
    *,
    value: Callable[[Tensor], Tensor | None] | None = None,
    piece: int = PIECE,
) -> Iterator[tuple[str, Tensor]]:
    """Stream (Hugging Face name, whole tensor) to every rank, layer after layer; a collective of
    all ranks.

    Memory above the model: at most three times ``piece`` bytes, or three times the largest
    parameter if larger, if the consumer keeps one tensor at a time; one more such buffer with
    pipeline stages. Unsharded tensors are views of the parameters. Every rank must consume the
    stream to its end. ``value`` maps a parameter to the tensor of the same size that is sent, such
    as its gradient; None leaves it out. By default the weights are sent, merged with their
    adapters. Where checkpoints hold the experts in one tensor, a layer's experts come on top.
    """
    slices = export_layers(
        mapped_layers(chunks, family, shape, groups, value), shape, groups, piece
    )
    return stack_experts(slices, shape.num_experts) if family.stacks_experts else slices


def export_layers(
    layers: dict[int, list[MappedParameter]],
    shape: ModelShape,
    groups: ProcessGroups,
    piece: int = PIECE,
) -> Iterator[tuple[str, Tensor]]:
    """The stream of `export_weights` of the parameters of this stage's layers, with each
    expert's slices.
    """
    sections = _sections(layers, groups, piece)
    owners, headers = _owners(sections, shape, groups)
    for section in sorted(owners):
        stage = owners[section]
        tensors: dict[str, Tensor] = {}
        if groups.pp.rank() == stage:
            tensors = _whole(sections[section], shape, groups)
        if groups.pp.size() > 1:
            tensors = _broadcast(tensors, headers[section], stage, groups)
        yield from tensors.items()
        del tensors  # before the next are gathered


def mapped_layers(
    chunks: Sequence[GPTModel],
    family: Family,
    shape: ModelShape,
    groups: ProcessGroups,
    value: Callable[[Tensor], Tensor | None] | None,
) -> dict[int, list[MappedParameter]]:
    """The parameters of each layer of this stage that are exported, with ``value`` of the parameter
    in its place; those without a value are left out. None: the parameter and its adapter.

    Parameters outside of the layers have the layer -1 - stage. The first stage exports a tied
    embedding.
    """
    layers: dict[int, list[MappedParameter]] = {}
    for chunk in chunks:
        for mapped in map_parameters(chunk, family, shape, groups):
            layer = mapped.layer
            if layer < 0:
                if shape.tied_embeddings and groups.pp.rank() and mapped.rule.is_vocabulary:
                    continue
                layer = -1 - groups.pp.rank()
            if value is None:
                exported = replace(mapped, parameter=mapped.parameter.detach())
            else:
                tensor = value(mapped.parameter)
                if tensor is None:
                    continue
                exported = replace(mapped, parameter=tensor, adapter=None)
            layers.setdefault(layer, []).append(exported)
    return layers


def _sections(
    layers: dict[int, list[MappedParameter]], groups: ProcessGroups, piece: int
) -> dict[Section, list[MappedParameter]]:
    """Sections of a layer's parameters that are sent at once. The same on all ranks of a stage,
    whose parameters have the same sizes."""
    return {
        (layer, number): section
        for layer, mapped_list in layers.items()
        for number, section in enumerate(
            pieces_of(sorted(mapped_list, key=_export_order), groups, piece)
        )
    }


def pieces_of(
    mapped_list: list[MappedParameter],
    groups: ProcessGroups,
    piece: int,
    *,
    of_one_source: bool = False,
) -> Iterator[list[MappedParameter]]:
    """Parameters of one type that are gathered at once: at most ``piece`` bytes of whole tensors,
    or one parameter.

    of_one_source: without the other expert-parallel ranks' experts.
    """
    section: list[MappedParameter] = []
    size = 0
    for mapped in mapped_list:
        whole = mapped.parameter.nbytes * _holders(mapped, groups, of_one_source)
        if section and (
            size + whole > piece or mapped.parameter.dtype != section[0].parameter.dtype
        ):
            yield section
            section = []
            size = 0
        size += whole
        section.append(mapped)
    if section:
        yield section


def _export_order(mapped: MappedParameter) -> int:
    """Order within a layer: experts first, unsharded tensors last. A consumer holds the last tensor
    of a piece while the next is gathered; an unsharded one takes no memory."""
    if mapped.rule.is_expert:
        return 0
    return 2 if mapped.rule.shard is Shard.NONE else 1


def _holders(mapped: MappedParameter, groups: ProcessGroups, of_one_source: bool) -> int:
    """The ranks whose parameters are gathered with this one."""
    if mapped.rule.is_expert:
        return (groups.expert_tp if of_one_source else groups.expert_tp_ep).size()
    return 1 if mapped.rule.shard is Shard.NONE else groups.tp.size()


def _owners(
    sections: dict[Section, list[MappedParameter]], shape: ModelShape, groups: ProcessGroups
) -> tuple[dict[Section, int], dict[Section, list[TensorHeader]]]:
    """The pipeline stage that sends each section, and what it sends. Without a pipeline nobody asks
    for the latter, and it is empty."""
    if groups.pp.size() == 1:
        return dict.fromkeys(sections, 0), {}
    headers = {
        section: [
            TensorHeader(name, size, mapped.parameter.dtype)
            for mapped in mapped_list
            for name, size in _sizes(mapped, shape, groups)
        ]
        for section, mapped_list in sections.items()
    }
    headers_of_stage: list[dict[Section, list[TensorHeader]]] = [{}] * groups.pp.size()
    # Pickled, which is safe among a run's own ranks: names, sizes and types, once a stream.
    dist.all_gather_object(headers_of_stage, headers, group=groups.pp)
    owners: dict[Section, int] = {}
    everyone: dict[Section, list[TensorHeader]] = {}
    for stage, stage_headers in enumerate(headers_of_stage):
        owners |= dict.fromkeys(stage_headers, stage)
        everyone |= stage_headers
    return owners, everyone


def _sizes(
    mapped: MappedParameter, shape: ModelShape, groups: ProcessGroups
) -> list[tuple[str, tuple[int, ...]]]:
    """Names and whole sizes of the Hugging Face tensors of a parameter, for all experts if it
    is an expert's.
    """
    local = mapped.local_slice(groups)
    step = shape.num_experts // groups.ep.size() if local.rule.is_expert else 1
    experts = range(mapped.expert % step, shape.num_experts, step) if local.rule.is_expert else (0,)
    return [
        size
        for expert in experts
        for size in replace(local, expert=expert).whole_sizes(shape).items()
    ]


def _whole(
    mapped_list: list[MappedParameter], shape: ModelShape, groups: ProcessGroups
) -> dict[str, Tensor]:
    """The whole Hugging Face tensors of one section: one all-gather for the experts, one for
    the other sharded ones.
    """
    experts = [mapped for mapped in mapped_list if mapped.rule.is_expert]
    sharded = [
        mapped
        for mapped in mapped_list
        if not mapped.rule.is_expert and mapped.rule.shard is not Shard.NONE
    ]
    unsharded = [
        mapped
        for mapped in mapped_list
        if not mapped.rule.is_expert and mapped.rule.shard is Shard.NONE
    ]
    tensors: dict[str, Tensor] = {}
    if experts:
        tensors |= join_experts(experts, _gather(experts, groups.expert_tp_ep), shape, groups)
    tensors |= join_shards(sharded, _gather(sharded, groups.tp), shape)
    return tensors | join_shards(unsharded, [[mapped.tensor for mapped in unsharded]], shape)


def join_experts(
    experts: list[MappedParameter],
    ranks: Sequence[list[Tensor]],
    shape: ModelShape,
    groups: ProcessGroups,
) -> dict[str, Tensor]:
    """The whole Hugging Face tensors of the experts of all ``ranks``, whole expert-tensor groups
    one after the other.

    ``experts``: this rank's. ``ranks``: of the whole group ``expert_tp_ep``.
    """
    tensors: dict[str, Tensor] = {}
    shards = groups.expert_tp.size()
    step = shape.num_experts // groups.ep.size()
    # the expert-tensor rank is the fastest of the group: blocks of `shards` ranks, one for each
    # expert-parallel rank
    for first in range(0, len(ranks), shards):
        placed = [
            replace(mapped, expert=mapped.expert % step + first // shards * step)
            for mapped in experts
        ]
        tensors |= join_shards(placed, ranks[first : first + shards], shape)
    return tensors


def _gather(mapped_list: list[MappedParameter], group: dist.ProcessGroup) -> list[list[Tensor]]:
    """Every rank's parameters of ``mapped_list``: outer list by rank of ``group``, inner as
    ``mapped_list``.
    """
    parameters = [mapped.tensor for mapped in mapped_list]
    if group.size() == 1 or not parameters:
        return [parameters] * group.size()
    everyone = parameters[0].new_empty(
        group.size(), sum(parameter.numel() for parameter in parameters)
    )
    torch.cat([parameter.flatten() for parameter in parameters], out=everyone[group.rank()])
    _exchange_rows(everyone, group)
    return [split_row(row, parameters) for row in everyone]


def split_row(row: Tensor, parameters: list[Tensor]) -> list[Tensor]:
    """Views of a flat row of elements with the sizes of ``parameters``."""
    flat = row.split([parameter.numel() for parameter in parameters])
    return [values.view_as(parameter) for values, parameter in zip(flat, parameters, strict=True)]


def _exchange_rows(everyone: Tensor, group: dist.ProcessGroup) -> None:
    """An all-gather in place: rank i of ``group`` has written row i and gets the others.

    On a CPU one broadcast of each row, all at once: gloo's all-gather fills a buffer of its own and
    copies out of it.
    """
    if not everyone.is_cpu:
        dist.all_gather_into_tensor(everyone, everyone[group.rank()], group=group)
        return
    sent = [
        dist.broadcast(row, src=dist.get_global_rank(group, rank), group=group, async_op=True)
        for rank, row in enumerate(everyone)
    ]
    for work in sent:
        work.wait()


def join_shards(
    mapped_list: list[MappedParameter], ranks: Sequence[list[Tensor]], shape: ModelShape
) -> dict[str, Tensor]:
    """The whole Hugging Face tensors of parameters that all tensor-parallel ``ranks`` hold
    shards of.
    """
    tensors: dict[str, Tensor] = {}
    for i, mapped in enumerate(mapped_list):
        rule = mapped.rule
        shards_of_tensor = zip(*(rule.split(rank[i], shape) for rank in ranks), strict=True)
        for name, shards in zip(mapped.names, shards_of_tensor, strict=True):
            # An expert's bias is on all of its ranks.
            is_whole = len(shards) == 1 or rule.shard is Shard.NONE
            whole = shards[0] if is_whole else _joined(shards, rule, name, shape)
            tensors[name] = whole[: shape.vocab_size] if rule.is_vocabulary else whole
    return tensors


def _joined(shards: Sequence[Tensor], rule: Rule, name: str, shape: ModelShape) -> Tensor:
    """One tensor from its shards by tensor-parallel rank."""
    dim = rule.shard.value or 0
    sizes = [
        size // len(shards)
        for size in rule.blocks_of(name, shards[0].shape[dim] * len(shards), shape)
    ]
    if len(sizes) == 1:
        return torch.cat(list(shards), dim=dim)
    blocks = zip(*(shard.split(sizes) for shard in shards), strict=True)
    return torch.cat([shard for block in blocks for shard in block])


def _broadcast(
    tensors: dict[str, Tensor], headers: list[TensorHeader], stage: int, groups: ProcessGroups
) -> dict[str, Tensor]:
    """One section's tensors from pipeline stage ``stage`` to all stages, as one flat buffer."""
    counts = [math.prod(header.sizes) for header in headers]
    if groups.pp.rank() == stage:
        flat = torch.cat([tensors[header.name].flatten() for header in headers])
    else:
        flat = torch.empty(sum(counts), dtype=headers[0].dtype, device=compute_device())
    dist.broadcast(flat, src=dist.get_global_rank(groups.pp, stage), group=groups.pp)
    return {
        header.name: values.view(header.sizes)
        for header, values in zip(headers, flat.split(counts), strict=True)
    }
