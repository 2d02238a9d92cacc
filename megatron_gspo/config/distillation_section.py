"""Section `distillation`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from megatron_gspo.config.paths import UserPath
from megatron_gspo.config.server_sections import ServerConfig
from megatron_gspo.objectives.distillation import Distillation


@dataclass(frozen=True, kw_only=True)
class DistillationConfig(Distillation):
    """A teacher that scores the policy's samples (docs/distillation.md)."""

    teacher: UserPath | None = None
    """Hugging Face directory of the teacher, with the policy's tokenizer; null trains without."""
    urls: tuple[str, ...] = ()
    """URLs of running servers of the teacher, as http://host:port; empty: the trainer loads it."""
    engine: Literal["sglang", "vllm"] = "sglang"
    """Engine of these servers."""
    api_key_file: UserPath | None = None
    """File whose first line is the servers' API key; null is no key."""
    coef: Annotated[float, Gt(0)] = 1.0
    """Weight of the divergence from the teacher."""
    reward_coef: Annotated[float, Ge(0)] = 0.0
    """Weight of the rewards' advantages beside it; with 0 rewards are metrics alone."""
    forward_weight: Annotated[float, Ge(0), Le(1)] = 0.0
    """Share of the forward KL in the divergence: 0 is the reverse KL, 1 the forward KL."""
    top_k: Annotated[int, Ge(0)] = 0
    """The teacher's most likely ids per position whose terms are summed exactly
    (docs/distillation.md)."""

    @property
    def is_on(self) -> bool:
        """Whether there is a teacher."""
        return self.teacher is not None

    @property
    def servers(self) -> ServerConfig:
        """The servers, with the limits and timeouts that an engine's have by default."""
        return ServerConfig(urls=self.urls, api_key_file=self.api_key_file)

    @property
    def needs_groups(self) -> bool:
        """Whether the advantages are those of the rewards too."""
        return not self.is_on or self.reward_coef > 0
