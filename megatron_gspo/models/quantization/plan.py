"""Streams of checkpoint tensors in a format of eight bits, and back."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_gspo.models.family import Family
from megatron_gspo.models.model_shape import ModelShape
from megatron_gspo.models.quantization.formats import BLOCK, FORMATS, Format
from megatron_gspo.models.quantization.module_list import (
    chosen_modules,
    linear_modules,
    without_experts,
)

Stream = Iterable[tuple[str, Tensor]]
_BYTES = (torch.float8_e4m3fn, torch.int8)
_ENDS = {format.scale: format.dequantize for format in FORMATS.values()}


@dataclass(frozen=True)
class QuantizationPlan:
    """Which linear modules of a model are quantised."""

    format: Format
    modules: frozenset[str]
    """Names of those that are quantised."""

    kept: tuple[str, ...]
    """Names of the others; the experts of a layer have one."""

    def quantize(self, tensors: Stream) -> Iterator[tuple[str, Tensor]]:
        """The stream with values and, right after them, scales in place of the weights of the
        modules. Memory above it: three float32 copies of one weight. Ends when the stream does."""
        for name, tensor in tensors:
            module = name.removesuffix(".weight")
            if not name.endswith(".weight") or module not in self.modules:
                yield name, tensor
                continue
            values, scales = self.format.quantize(tensor.detach())
            del tensor  # before the next one
            yield name, values
            yield name + self.format.scale, scales

    @property
    def config(self) -> dict[str, Any]:
        """``quantization_config`` of a checkpoint's config.json, as Transformers, SGLang and
        vLLM read it.
        """
        if self.format.name == "fp8_block":
            return {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": list(BLOCK),
                "modules_to_not_convert": list(self.kept),
            }
        is_float = self.format.name == "fp8_tensor"
        common = {"num_bits": 8, "type": "float" if is_float else "int", "symmetric": True}
        weights = common | {"strategy": "tensor" if is_float else "channel", "dynamic": False}
        inputs = common | {"strategy": "token", "dynamic": True}
        experts = [
            rf"re:{re.escape(name)}(\..*)?" for name in self.kept if name.endswith(".experts")
        ]
        return {
            "quant_method": "compressed-tensors",
            "format": "float-quantized" if is_float else "int-quantized",
            "quantization_status": "compressed",
            "config_groups": {
                "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
            },
            "ignore": [*self.kept, *experts],
        }


def quantization_plan(
    name: str, modules: Sequence[str], exclude: Sequence[str], family: Family, shape: ModelShape
) -> QuantizationPlan:
    """The plan of two lists of modules.

    name: of the format. Raises ``ModuleListError``; see `chosen_modules`.
    """
    known = linear_modules(family, shape)
    chosen = chosen_modules(known, modules, exclude)
    kept = without_experts(module for module in known if module not in chosen)
    return QuantizationPlan(FORMATS[name], chosen, tuple(kept))


def dequantized(tensors: Stream) -> Iterator[tuple[str, Tensor]]:
    """The stream of `QuantizationPlan.quantize` as one of whole weights, float32 where they were
    quantised.

    Raises ``ValueError`` for values without their scales; the stream is still read to its end.
    """
    held: tuple[str, Tensor] | None = None
    error = ""
    for name, tensor in tensors:
        if error:
            continue  # producing the stream may be collective: the other ranks would hang
        if held is not None:
            weight, values = held
            held = None
            end = name.removeprefix(weight)
            if end in _ENDS and name != end:
                yield weight, _ENDS[end](values, tensor)
            else:
                error = f"weight {weight} is quantised and {name} follows in place of its scales"
        elif tensor.dtype in _BYTES:
            held = name, tensor
        else:
            yield name, tensor
    if held is not None:
        error = f"weight {held[0]} is quantised and has no scales"
    if error:
        raise ValueError(error)
