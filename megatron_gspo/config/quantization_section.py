"""Section `rollout.quantization`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class QuantizationConfig:
    """Weights that the rollout engine gets in eight bits; see docs/low_precision.md."""

    format: Literal["none", "fp8_block", "fp8_tensor", "int8"] = "none"
    """Format of the engine's weights (docs/low_precision.md)."""
    modules: tuple[str, ...] = ()
    """Linear modules that are quantised, e.g. [model.layers.*.mlp.experts.*.*]."""
    exclude: tuple[str, ...] = ()
    """Linear modules that are not; each must be in one list."""

    @property
    def is_on(self) -> bool:
        """Whether weights are quantised."""
        return self.format != "none"
