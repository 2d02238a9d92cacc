"""Adapters in PEFT's format: a directory with ``adapter_config.json`` and
``adapter_model.safetensors``.

Servers take the experts one by one. Transformers holds a layer's experts in two tensors,
``gate_up_proj`` [experts, 2 f, h] and ``down_proj``, and PEFT their adapters in one A and one B
each: A [experts * r, in] expert after expert, B [out, r * experts] with the experts fastest. There
the adapters of gate and up are one of twice the rank, with 0 off the diagonal of B, and twice the
alpha.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_gspo.errors import first_line
from megatron_gspo.given_names import is_real_folder, move_aside
from megatron_gspo.models.adapter_rules import adapter_scale
from megatron_gspo.models.config_defaults import HFConfig, shown
from megatron_gspo.models.model_shape import ModelError, read_json

NAME_PREFIX = "base_model.model."  # of every tensor in a file
_EXPERT = re.compile(
    r"(.+\.mlp\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.lora_([AB])\.weight"
)
_FUSED = re.compile(r"(.+\.mlp\.experts)\.(base_layer\.)?lora_([AB])\.weight")
# In Transformers no linear layer, but a module with a parameter.
_ROUTER = re.compile(r".+\.mlp\.(gate|router)")
_LOW_RANK = re.compile(r".+\.lora_([AB])\.weight")
_LARGEST_RANK = 1 << 16
_LARGEST_ALPHA = 1e9
# What adapter_config.json may say, where it says it; and what it may not have: all of it changes
# what is added.
_KNOWN = {"peft_type": "LORA", "bias": "none", "fan_in_fan_out": False}
_ABSENT = (
    "use_dora",
    "use_qalora",
    "lora_bias",
    "modules_to_save",
    "layer_replication",
    "trainable_token_indices",
    "arrow_config",
)
_OF_EXPERTS = ("gate_proj", "up_proj", "down_proj")
_GATE_UP = "mlp.experts.gate_up_proj"
_DOWN = "mlp.experts.down_proj"


@dataclass(frozen=True)
class AdapterFacts:
    """What all adapters of a directory share."""

    rank: int
    alpha: float
    rslora: bool = False
    base: str = ""
    """The directory of the model."""

    checksum: str = ""
    """Checksum of the model's weights, or ""."""

    @property
    def scale(self) -> float:
        """What B A is multiplied by."""
        return adapter_scale(self.rank, self.alpha, self.rslora)


def write_adapters(
    folder: Path, tensors: Mapping[str, Tensor], facts: AdapterFacts, *, fused: bool
) -> None:
    """Write adapters, whole tensors by name (`Policy.adapters`), atomically. fused: for
    Transformers, else for servers.

    Raises ``ModelError`` where only a part of a layer's experts has adapters.
    """
    partial = folder.with_name(f".partial_{folder.name}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    stored = _fuse(tensors, facts.rank) if fused else dict(tensors)
    stored = {
        f"{NAME_PREFIX}{name}": tensor.detach().cpu().contiguous().clone()
        for name, tensor in stored.items()
    }
    save_file(
        stored,
        partial / "adapter_model.safetensors",
        {"format": "pt", "base_checksum": facts.checksum},
    )
    config = json.dumps(adapter_config(tensors, facts, fused=fused), indent=2)
    (partial / "adapter_config.json").write_text(config)
    if is_real_folder(folder):
        shutil.rmtree(folder)
    elif os.path.lexists(folder):
        move_aside(folder)
    partial.rename(folder)


def read_adapters(folder: str | Path) -> tuple[dict[str, Tensor], AdapterFacts]:
    """The adapters of a directory of either kind, experts one by one, and what they have in common.

    Raises ``ModelError`` naming the file where it is not one, is damaged, or holds adapters that
    add something else to the weights than ``scale * B A``.
    """
    folder = Path(folder)
    config_file = folder / "adapter_config.json"
    weights = folder / "adapter_model.safetensors"
    if not config_file.is_file() or not weights.is_file():
        raise ModelError(
            f"{folder} holds no adapters in PEFT's format ({config_file.name} and {weights.name})"
        )
    config = read_json(config_file)
    _check_config(config_file, config)
    try:
        with safe_open(weights, framework="pt") as file:
            metadata = file.metadata() or {}
            stored = {
                name.removeprefix(NAME_PREFIX): file.get_tensor(name) for name in list(file.keys())
            }
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{weights}: damaged or cut short ({first_line(error)}); save or download it again"
        ) from None
    facts = AdapterFacts(
        rank=config["r"],
        alpha=float(config["lora_alpha"]),
        rslora=config.get("use_rslora") is True,
        base=config.get("base_model_name_or_path") or "",
        checksum=metadata.get("base_checksum", ""),
    )
    for name, tensor in stored.items():
        _check_tensor(weights, name, tensor, facts.rank)
    return _split(stored, facts.rank), facts


def _check_config(file: Path, config: Mapping[str, Any]) -> None:
    """The adapters add ``scale * B A`` to weights, and nothing else."""
    rank = config.get("r")
    alpha = config.get("lora_alpha")
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 < rank <= _LARGEST_RANK:
        raise ModelError(f"{file}: r={shown(rank)} is no rank; give an integer above 0")
    if (
        isinstance(alpha, bool)
        or not isinstance(alpha, int | float)
        or not 0 < alpha < _LARGEST_ALPHA
    ):
        raise ModelError(
            f"{file}: lora_alpha={shown(alpha)} is not supported; give a number above 0"
        )
    for key, known in _KNOWN.items():
        value = config.get(key)
        if value is not None and value != known:
            raise ModelError(
                f"{file}: {key}={shown(value)} is not supported; known: {shown(known)}"
            )
    for key in _ABSENT:
        if config.get(key):
            problem = f"{key}={shown(config[key])} is not supported"
            raise ModelError(f"{file}: {problem}; megatron-gspo takes adapters without it")
    # Those of the fused gate and up projections, which are two adapters in one.
    fused_patterns = {
        "rank_pattern": {_GATE_UP: 2 * rank},
        "alpha_pattern": {_GATE_UP: alpha * (math.sqrt(2) if config.get("use_rslora") else 2)},
    }
    for key, fused_pattern in fused_patterns.items():
        pattern = config.get(key) or {}
        if pattern not in ({}, fused_pattern):
            raise ModelError(
                f"{file}: {key}={shown(pattern)} is not supported; give all layers one rank and"
                " alpha"
            )
    if not isinstance(config.get("base_model_name_or_path") or "", str):
        raise ModelError(
            f"{file}: base_model_name_or_path is no text; give the directory of their base"
        )


def _check_tensor(file: Path, name: str, tensor: Tensor, rank: int) -> None:
    """Sizes that go with the rank; numbers that can be added to weights."""
    match = _LOW_RANK.fullmatch(name)
    if match is None:
        return  # whoever reads the adapters names it
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise ModelError(
            f"{file}: {name} is stored as {dtype}; save the adapters in float32 or bfloat16"
        )
    size = 0
    if tensor.ndim == 2:
        size = tensor.shape[0] if match[1] == "A" else tensor.shape[1]
    fused = _FUSED.fullmatch(name)
    if fused is None:
        fits = size == rank
    else:  # of all experts, and of gate and up together
        width = 2 * rank if fused[2] else rank
        fits = size > 0 and size % width == 0
    if not fits:
        raise ModelError(
            f"{file}: {name} is {tuple(tensor.shape)}, which does not go with r={rank}; save it"
            " again"
        )
    if not torch.isfinite(tensor).all():
        raise ModelError(f"{file}: {name} holds NaN or infinity; use earlier adapters")


def can_fuse(names: Iterable[str]) -> bool:
    """Whether adapters can be written for Transformers: all of the experts' projections have
    one, or none.
    """
    projections = {match[3] for name in names if (match := _EXPERT.fullmatch(name))}
    return len(projections) in (0, len(_OF_EXPERTS))


def _fuse(tensors: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """Adapters as Transformers has them, from those of single experts."""
    fused: dict[str, Tensor] = {}
    # Prefix of a layer -> (projection, A or B) -> expert -> tensor.
    layers: dict[str, dict[tuple[str, str], dict[int, Tensor]]] = {}
    for name, tensor in tensors.items():
        match = _EXPERT.fullmatch(name)
        if match is None:
            fused[name] = tensor
            continue
        prefix, expert, projection, which = match.groups()
        layer = layers.setdefault(prefix, {})
        layer.setdefault((projection, which), {})[int(expert)] = tensor

    def add(name: str, a: Tensor, b: Tensor) -> None:
        """a: [experts, rank, in]; b: [experts, out, rank]."""
        fused[f"{name}.lora_A.weight"] = a.flatten(0, 1)
        fused[f"{name}.lora_B.weight"] = b.permute(1, 2, 0).flatten(1)

    for prefix, projections in layers.items():
        stacks = {
            key: torch.stack([by_expert[expert] for expert in range(len(by_expert))])
            for key, by_expert in projections.items()
        }
        if missing := [name for name in _OF_EXPERTS if (name, "A") not in stacks]:
            raise ModelError(
                f"{prefix} has no adapters of {missing[0]}: write it for servers, experts one"
                " by one"
            )
        a = torch.cat([stacks["gate_proj", "A"], stacks["up_proj", "A"]], dim=1)
        gate = stacks["gate_proj", "B"]
        up = stacks["up_proj", "B"]
        b = gate.new_zeros(len(gate), 2 * gate.shape[1], 2 * rank)
        b[:, : gate.shape[1], :rank] = gate
        b[:, gate.shape[1] :, rank:] = up
        add(f"{prefix}.base_layer", a, b)
        add(prefix, stacks["down_proj", "A"], stacks["down_proj", "B"])
    return fused


def _split(stored: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """The inverse of `_fuse`."""
    single: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        match = _FUSED.fullmatch(name)
        if match is None:
            single[name] = tensor
            continue
        prefix = match[1]
        names = _OF_EXPERTS[:2] if match[2] else _OF_EXPERTS[2:]
        which = match[3]
        width = rank * len(names)
        if which == "A":
            by_expert = tensor.view(-1, width, tensor.shape[1])
        else:
            by_expert = tensor.view(len(tensor), width, -1).permute(2, 0, 1)
        for expert, matrix in enumerate(by_expert):
            for i, (projection, value) in enumerate(
                zip(names, matrix.chunk(len(names)), strict=True)
            ):
                if which == "B":  # 0 off the diagonal
                    value = value[:, i * rank : (i + 1) * rank]
                single[f"{prefix}.{expert}.{projection}.lora_{which}.weight"] = value
    return single


def adapter_config(names: Iterable[str], facts: AdapterFacts, *, fused: bool) -> HFConfig:
    """The content of ``adapter_config.json`` of adapters of these names (`Policy.adapters`).

    PEFT takes the names of experts' projections for the fused parameters, so that other linear
    layers of these names are targeted as parameters, which is the same adapter.
    """
    names = list(names)
    of_experts = [name for name in names if _EXPERT.fullmatch(name)]
    layers = {name.rsplit(".lora_", 1)[0] for name in names}
    parameters = {f"{_in_layer(name)}.weight" for name in layers if _ROUTER.fullmatch(name)}
    leaves = {name.rpartition(".")[2] for name in layers if not _ROUTER.fullmatch(name)}
    config: HFConfig = dict(
        peft_type="LORA",
        task_type="CAUSAL_LM",
        base_model_name_or_path=facts.base,
        r=facts.rank,
        lora_alpha=facts.alpha,
        use_rslora=facts.rslora,
        lora_dropout=0.0,
        bias="none",
        fan_in_fan_out=False,
        inference_mode=True,
        init_lora_weights=True,
        target_modules=sorted(leaves),
    )
    if fused and of_experts:
        dense = {
            _in_layer(layer) for layer in layers if ".mlp." in layer and ".experts." not in layer
        }
        parameters |= {_GATE_UP, _DOWN} | {f"{name}.weight" for name in dense}
        config |= dict(
            target_modules=sorted(leaves - set(_OF_EXPERTS)),
            rank_pattern={_GATE_UP: 2 * facts.rank},
            alpha_pattern={_GATE_UP: facts.alpha * (math.sqrt(2) if facts.rslora else 2)},
        )
    if parameters:
        config |= dict(target_parameters=sorted(parameters))
    return config


def _in_layer(name: str) -> str:
    """``mlp.gate`` of ``model.layers.1.mlp.gate``."""
    return name.split(".", 3)[-1]
