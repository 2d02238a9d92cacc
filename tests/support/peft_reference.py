"""Adapters on the Hugging Face model: PEFT's, and naive ones that all experts of a layer share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn.utils import parametrize

from megatron_gspo.config import LoRAConfig
from megatron_gspo.models import family_of, read_config
from megatron_gspo.models.adapter_rules import linear_names, router_names
from tests.support.transformers_reference import stored_name

EXPERTS = ("gate_proj", "up_proj", "down_proj")
_STACKED = re.compile(r"model\.layers\.\d+\.(\w+\.experts\.(?:gate_up|up|down)_proj)")
_OF_EXPERTS = re.compile(r"(.+\.\w+\.experts)\.(.+)")


def adapted(model: torch.nn.Module, path: str, lora: LoRAConfig, seed: int = 0) -> torch.nn.Module:
    """The model with random adapters, neither of whose matrices is 0; its own weights are
    frozen.
    """
    family, shape = family_of(read_config(path))
    names = list(lora.targets or linear_names(family, shape))
    config = dict(r=lora.rank, lora_alpha=lora.alpha, use_rslora=lora.rslora)
    if shape.is_moe:  # PEFT takes the names of experts' projections for the fused parameters alone
        parameters = {
            f"{name.split('.', 3)[-1]}.weight"
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear) and name.endswith(EXPERTS)
        }
        if lora.experts == "each":
            stacked = {
                found[1]
                for name, _ in model.named_parameters()
                if (found := _STACKED.fullmatch(name))
            }
            parameters |= stacked
            doubled = [name for name in stacked if name.endswith("gate_up_proj")]
            config |= dict(
                rank_pattern=dict.fromkeys(doubled, 2 * lora.rank),
                alpha_pattern=dict.fromkeys(doubled, 2 * lora.alpha),
            )
        routers = router_names(family, shape)  # parameters of a module that is no linear layer
        parameters |= {f"mlp.{name}.weight" for name in names if name in routers}
        names = [name for name in names if name not in (*EXPERTS, *routers)]
        config |= dict(target_parameters=sorted(parameters))
    wrapped = get_peft_model(model, LoraConfig(target_modules=names, **config))
    if shape.is_moe and lora.experts == "shared":
        for module in list(wrapped.modules()):
            if isinstance(getattr(module, "gate_up_proj", None), torch.nn.Parameter):
                _share(module, lora)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in wrapped.named_parameters():
        if not parameter.requires_grad:
            continue
        with torch.no_grad():
            parameter.normal_(0.0, 0.2, generator=generator)
            # Two adapters as one of twice the rank: 0 off the diagonal.
            is_of_two = len(_first_projections(model)) == 2
            if is_of_two and ".experts.base_layer.lora_B" in name:
                mask = _diagonal(parameter, lora.rank)
                parameter.mul_(mask)
                parameter.register_hook(partial(torch.mul, mask))
    return wrapped


def _diagonal(b: Tensor, rank: int) -> Tensor:
    """1 where a fused matrix B [2 f, 2 rank * experts] is that of a gate or of an up projection."""
    mask = torch.zeros(b.shape[0], 2 * rank, b.shape[1] // (2 * rank), dtype=b.dtype)
    half = b.shape[0] // 2
    mask[:half, :rank] = mask[half:, rank:] = 1.0
    return mask.view_as(b)


class _Shared(torch.nn.Module):
    """One adapter for every expert's matrix [out, in], of ``parts`` blocks of rows with
    matrices of their own.
    """

    def __init__(self, weight: Tensor, parts: int, lora: LoRAConfig) -> None:
        super().__init__()
        _, out, inputs = weight.shape
        self.scale = lora.scale
        self.a = torch.nn.Parameter(weight.new_zeros(parts, lora.rank, inputs))
        self.b = torch.nn.Parameter(weight.new_zeros(parts, out // parts, lora.rank))

    def forward(self, weight: Tensor) -> Tensor:
        update = torch.cat([b @ a for a, b in zip(self.a, self.b, strict=True)]) * self.scale
        return torch.stack([expert + update for expert in weight])


def _share(experts: Any, lora: LoRAConfig) -> None:
    for name, parts in (("gate_up_proj", 2), ("down_proj", 1)):
        shared = _Shared(getattr(experts, name), parts, lora)
        parametrize.register_parametrization(experts, name, shared, unsafe=True)
        experts.parametrizations[name].original.requires_grad_(False)


def adapter_tensors(
    model: torch.nn.Module, value: Callable[[Tensor], Tensor], *, rank: int
) -> dict[str, Tensor]:
    """``value`` of every adapter under its name in a checkpoint of adapters, experts one by one."""
    experts = getattr(model.config, "num_experts", None) or getattr(
        model.config, "n_routed_experts", 0
    )
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            stored = stored_name(name.removeprefix("base_model.model."), model.config.model_type)
            first = _first_projections(model)
            tensors.update(_split(stored, value(parameter), rank, experts, first))
    return tensors


def adapter_gradients(model: torch.nn.Module, *, rank: int) -> dict[str, Tensor]:
    return adapter_tensors(
        model, lambda p: torch.zeros_like(p) if p.grad is None else p.grad, rank=rank
    )


def _first_projections(model: torch.nn.Module) -> tuple[str, ...]:
    """What an expert's adapters of its first matrix are for."""
    is_gated = model.config.model_type != "nemotron_h"
    return ("gate_proj", "up_proj") if is_gated else ("up_proj",)


def _split(
    name: str, tensor: Tensor, rank: int, experts: int, first: tuple[str, ...]
) -> Iterator[tuple[str, Tensor]]:
    found = _OF_EXPERTS.fullmatch(name)
    which = "A" if ".lora_A." in name or name.endswith(".a") else "B"
    if found is None:
        yield name.replace(".default", ""), tensor
        return
    prefix, rest = found.groups()
    is_down = not ("base_layer" in rest or "gate_up_proj" in rest)
    names = ("down_proj",) if is_down else first
    for expert in range(experts):
        if "parametrizations" in rest:
            parts = list(tensor)
        elif which == "A":
            parts = list(tensor.chunk(experts)[expert].chunk(len(names)))
        else:
            of_expert = tensor.view(len(tensor), -1, experts)[:, :, expert]
            parts = [
                of_expert.chunk(len(names))[i][:, i * rank : (i + 1) * rank]
                for i in range(len(names))
            ]
        for name_of_part, tensors in zip(names, parts, strict=True):
            yield f"{prefix}.{expert}.{name_of_part}.lora_{which}.weight", tensors
