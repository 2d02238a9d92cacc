"""A run that starts from trained adapters (`lora.adapter_path`)."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_gspo.config import ConfigError, LoRAConfig
from megatron_gspo.mcore.policy import Policy
from megatron_gspo.models import ModelError
from megatron_gspo.models.adapter_rules import linear_names
from megatron_gspo.models.peft_files import AdapterFacts, read_adapters

_EXPERT = re.compile(r"(.+\.experts\.)(\d+)(\..+)")


def start_from_adapters(policy: Policy, lora: LoRAConfig) -> None:
    """Give the policy the adapters of the PEFT directory ``lora.adapter_path``, which every rank
    reads. A collective of all ranks.

    Raises ``ConfigError`` if they are not those that the section describes, or belong to other
    weights; ``ModelError`` for a tensor that is missing or has another size.
    """
    assert lora.adapter_path is not None
    tensors, facts = read_adapters(lora.adapter_path)
    _check_facts(lora, facts)
    _check_names(lora, tensors, set(lora.targets or linear_names(policy.family, policy.shape)))
    checksum = policy.base_checksum()
    if facts.checksum not in ("", checksum):
        problem = (
            f"its adapters belong to weights with checksum {facts.checksum}, model.path has"
            f" {checksum}"
        )
        raise ConfigError(
            "lora.adapter_path", lora.adapter_path, problem, "set model.path to their base"
        )

    def read_tensor(name: str, sizes: tuple[int, int]) -> Tensor:
        tensor = tensors.get(name)
        if tensor is None or tuple(tensor.shape) != tuple(sizes):
            has = "no such tensor" if tensor is None else f"{tuple(tensor.shape)}"
            raise ModelError(
                f"{lora.adapter_path}: {name} should be {tuple(sizes)}, there is {has}"
            )
        return tensor

    policy.set_adapters(read_tensor)


def _check_facts(lora: LoRAConfig, facts: AdapterFacts) -> None:
    for key in ("rank", "alpha", "rslora"):
        configured = getattr(lora, key)
        stored = getattr(facts, key)
        if configured != stored:
            problem = f"the adapters of lora.adapter_path have {stored}"
            raise ConfigError(
                f"lora.{key}", configured, problem, f"set it to {str(stored).lower()}"
            )


def _check_names(lora: LoRAConfig, tensors: Mapping[str, Tensor], targets: set[str]) -> None:
    """No tensor would be left out: of a linear layer without an adapter, or of experts that
    share another's.
    """
    for name, tensor in tensors.items():
        leaf = name.rpartition(".lora_")[0].rpartition(".")[2]
        if leaf not in targets:
            listed = None if lora.targets is None else list(lora.targets)
            problem = f"lora.adapter_path has an adapter of {leaf}"
            raise ConfigError(
                "lora.targets",
                listed,
                problem,
                f"use some of {', '.join(sorted(targets | {leaf}))}",
            )
        match = _EXPERT.fullmatch(name)
        if (
            match
            and lora.experts == "shared"
            and not torch.equal(tensor, tensors[f"{match[1]}0{match[3]}"])
        ):
            problem = f"in lora.adapter_path {name} is not that of expert 0"
            raise ConfigError("lora.experts", lora.experts, problem, "set it to each")
