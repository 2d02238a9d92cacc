"""Section `rollout.quantization`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class QuantizationConfig:
    """Weights that the rollout engine gets in eight bits; see docs/low_precision.md."""

    format: Literal["none", "fp8_block", "fp8_tensor", "int8"] = "none"
    """Format of the weights (docs/low_precision.md); `none` is the trainer's."""
    modules: tuple[str, ...] = ()
    """Linear modules that are quantised, e.g. [model.layers.*.mlp.experts.*.*]."""
    exclude: tuple[str, ...] = ()
    """Linear modules that are not; every one must be in one of the lists."""

    @property
    def is_on(self) -> bool:
        """Whether weights are quantised."""
        return self.format != "none"
