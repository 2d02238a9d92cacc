"""Section `rollout.quantization`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class QuantizationConfig:
    """Weights that the rollout engine gets in eight bits; see docs/low_precision.md."""

    format: Literal["none", "fp8_block", "fp8_tensor", "int8"] = "none"
    """FP8 with a scale for each block of 128 x 128 or for each tensor, integers with one for each row, or the trainer's
    type (`none`)."""
    modules: tuple[str, ...] = ()
    """Linear modules that are quantised, by their names in checkpoints; `*` is one whole component, e.g.
    [model.layers.*.self_attn.*, model.layers.*.mlp.experts.*.*]."""
    exclude: tuple[str, ...] = ()
    """Linear modules that are not, also where `modules` names them; every linear module must be in one of the lists."""

    @property
    def is_on(self) -> bool:
        """Whether weights are quantised."""
        return self.format != "none"
