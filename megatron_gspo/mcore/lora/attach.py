"""Give a built model adapters and freeze everything else, before Megatron's
DistributedDataParallel wraps it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from megatron_gspo.config import LoRAConfig
from megatron_gspo.mcore.hf_weights import MappedParameter, map_parameters
from megatron_gspo.mcore.lora.adapter import ADAPTED, AdaptedColumnParallelLinear, Adapter
from megatron_gspo.mcore.process_groups import ProcessGroups
from megatron_gspo.models import Family, ModelShape, Shard
from megatron_gspo.models.adapter_rules import adapted_parts, rows_of_parts
from megatron_gspo.models.mapping_rules import split_two


@dataclass(frozen=True)
class _Target:
    """A linear layer that gets an adapter."""

    linear: torch.nn.Module
    mapped: MappedParameter
    parts: tuple[int, ...]

    @property
    def is_sequence_parallel(self) -> bool:
        """Whether each tensor-parallel rank works on its own tokens."""
        # The parameter of a latent's projection is marked, every other layer itself.
        is_marked = getattr(self.mapped.parameter, "sequence_parallel", False)
        return bool(getattr(self.linear, "sequence_parallel", is_marked))


def attach_adapters(
    chunks: Sequence[GPTModel],
    lora: LoRAConfig,
    family: Family,
    shape: ModelShape,
    groups: ProcessGroups,
) -> None:
    """Freeze the (unwrapped) chunks and add adapters that change nothing: A is 0 too until
    `fill_adapters`.

    The chunks must consist of torch layers.
    """
    for chunk in chunks:
        targets = list(_targets(chunk, lora, family, shape, groups))
        chunk.requires_grad_(False)
        shared: dict[tuple[int, str], Adapter] = {}
        for target in targets:
            local = target.mapped.name.rpartition(".local_experts.")[2].partition(".")[2]
            key = (target.mapped.layer, local)
            adapter = shared.get(key) if _is_shared(target, lora) else None
            if adapter is None:
                adapter = _make(target, lora, shape, groups)
                shared[key] = adapter
            _adapt(target, adapter)
        if hasattr(chunk, "embedding"):
            chunk.embedding.register_forward_hook(_with_gradient)


def _targets(
    chunk: GPTModel, lora: LoRAConfig, family: Family, shape: ModelShape, groups: ProcessGroups
) -> Iterator[_Target]:
    modules = dict(chunk.named_modules())
    for mapped in map_parameters(chunk, family, shape, groups):
        linear = modules.get(mapped.name.removesuffix(".weight"))
        parts = adapted_parts(mapped.rule, lora.targets)
        if parts and linear is not None:
            if type(linear) not in ADAPTED:
                raise TypeError(
                    f"{mapped.name} is of {type(linear).__name__}, which has no adapter; use torch"
                    " layers"
                )
            yield _Target(linear, mapped, parts)


def _is_shared(target: _Target, lora: LoRAConfig) -> bool:
    return target.mapped.rule.is_expert and lora.experts == "shared"


def _make(target: _Target, lora: LoRAConfig, shape: ModelShape, groups: ProcessGroups) -> Adapter:
    """An adapter with the marks by which Megatron reduces and measures its gradients."""
    weight = target.mapped.parameter
    rule = target.mapped.rule
    rows = rows_of_parts(rule, target.parts, weight.shape[0], shape)
    adapter = Adapter(weight.detach(), lora.rank, lora.scale, rows)
    parameter: Any
    if rule.is_expert:
        is_shared = _is_shared(target, lora)
        for parameter, is_cut in (
            (adapter.lora_A, rule.shard is Shard.COLUMNS),
            (adapter.lora_B, rule.shard is Shard.ROWS),
        ):
            parameter.allreduce = getattr(weight, "allreduce", True)
            if is_shared:
                _mark_replicas(parameter, groups.ep if is_cut else groups.expert_tp_ep)
            else:
                _mark_replicas(parameter, None if is_cut else groups.expert_tp)
        return adapter
    for parameter, shard in ((adapter.lora_A, Shard.COLUMNS), (adapter.lora_B, Shard.ROWS)):
        if rule.shard is shard:
            parameter.tensor_model_parallel = True
        else:  # on every rank, which has the gradient of its own tokens under sequence parallelism, else the whole one
            parameter.sequence_parallel = target.is_sequence_parallel
    return adapter


def _mark_replicas(parameter: Any, group: dist.ProcessGroup | None) -> None:
    """All ranks of ``group`` hold the parameter, each with a part of its gradient: they are summed
    (see `reduction.py`), and one of them counts in the norm."""
    is_first = group is None or group.rank() == 0
    parameter.tensor_model_parallel = is_first
    parameter.shared = not is_first
    if group is not None and group.size() > 1:
        parameter.summed_over = group


def _adapt(target: _Target, adapter: Adapter) -> None:
    """Make the linear layer, whose parameters Megatron has built, one of our class."""
    linear = target.linear
    linear.__class__ = ADAPTED[type(linear)]
    linear.lora = adapter
    if isinstance(linear, AdaptedColumnParallelLinear):
        linear.gated = target.mapped.rule.split is split_two


def _with_gradient(module: torch.nn.Module, inputs: tuple[object, ...], output: Tensor) -> Tensor:
    """The output of a frozen embedding as a leaf with a gradient: recomputed layers ignore what
    needs none.
    """
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_(True)
    return output


def adapters_of(chunks: Sequence[torch.nn.Module]) -> Iterator[Adapter]:
    """The adapters of model chunks, each once."""
    for chunk in chunks:
        yield from (module for module in chunk.modules() if isinstance(module, Adapter))


@contextmanager
def adapters_off(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Within the context the model is its base."""
    adapters = list(adapters_of(chunks))
    for adapter in adapters:
        adapter.enabled = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.enabled = True
