"""Section `rollout.quantization`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class QuantizationConfig:
    """Weights that the rollout engine gets in eight bits; see docs/low_precision.md."""

    format: Literal["none", "fp8_block", "fp8_tensor", "int8"] = "none"
    """FP8 with a scale per block of 128 x 128 or per tensor, or integers with a scale per row;
    `none` is the trainer's type."""
    modules: tuple[str, ...] = ()
    """Linear modules that are quantised, by their names in checkpoints; `*` is one component, e.g.
    [model.layers.*.self_attn.*, model.layers.*.mlp.experts.*.*]."""
    exclude: tuple[str, ...] = ()
    """Linear modules that are not; it wins. Every linear module must be in one of the lists."""

    @property
    def is_on(self) -> bool:
        """Whether weights are quantised."""
        return self.format != "none"
