"""Section `lora`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt

from megatron_gspo.config.paths import UserPath


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """Low-rank adapters (LoRA) that are trained in place of the model's weights."""

    rank: Annotated[int, Ge(0)] = 0
    """Rank of the adapters; 0 trains all weights."""
    alpha: Annotated[float, Gt(0)] = 16.0
    """Adapters are scaled by alpha / rank."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead."""
    dropout: Annotated[float, Ge(0)] = 0.0
    """Must be 0 (docs/lora.md)."""
    targets: tuple[str, ...] | None = None
    """Linear layers with an adapter; null is all but the router."""
    experts: Literal["each", "shared"] = "each"
    """One adapter for each expert, or for all of a layer."""
    weight_updates: Literal["merged", "adapters"] = "merged"
    """Servers get merged weights, or adapters alone (docs/lora.md)."""
    adapter_path: UserPath | None = None
    """PEFT directory of adapters to start from."""

    @property
    def is_on(self) -> bool:
        """Whether adapters are trained."""
        return self.rank > 0

    @property
    def sends_adapters(self) -> bool:
        """Whether servers get the adapters alone."""
        return self.weight_updates == "adapters"

    @property
    def scale(self) -> float:
        """What B A is multiplied by."""
        from megatron_gspo.models.adapter_rules import adapter_scale  # imports torch

        return adapter_scale(self.rank, self.alpha, self.rslora)
