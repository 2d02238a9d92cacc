"""Sections `rollout` and `routing`, and the sampling parameters that `rollout`
extends.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from megatron_gspo.config.paths import UserPath
from megatron_gspo.config.quantization_section import QuantizationConfig


@dataclass(frozen=True)
class SamplingParams:
    """How an engine samples responses.

    Raises ValueError (one line) for a value that no engine supports.
    """

    n_samples_per_prompt: Annotated[int, Ge(1)] = 8
    """Responses per prompt, a group."""
    max_response_length: Annotated[int, Ge(1)] = 1024
    """Maximum response length in tokens, end token included."""
    temperature: Annotated[float, Ge(0)] = 1.0
    """Sampling temperature, also of recomputed log-probs; above 0 for training."""
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    """Nucleus sampling; 1 is off."""
    top_k: Annotated[int, Ge(0)] = 0
    """Most likely tokens to sample from; 0 is off."""
    min_p: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Sample from tokens with at least this share of the largest probability; 0 is off."""
    max_support: Annotated[int, Ge(0)] = 0
    """Most ids that `top_p`, `top_k` and `min_p` may leave; training with 0 refuses them
    (docs/algorithms.md).
    """

    def __post_init__(self) -> None:
        if self.n_samples_per_prompt < 1:
            raise ValueError(
                f"n_samples_per_prompt={self.n_samples_per_prompt}: draw at least 1 response per"
                " prompt"
            )
        if self.max_response_length < 1:
            raise ValueError(
                f"max_response_length={self.max_response_length}: give at least 1 token"
            )
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(
                f"temperature={self.temperature}: use a value above 0, or 0 for greedy decoding"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: use a value in (0, 1]; 1 turns it off")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k}: use a value of at least 0; 0 turns it off")
        if not 0 <= self.min_p < 1:
            raise ValueError(f"min_p={self.min_p}: use a value in [0, 1); 0 turns it off")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken (temperature 0)."""
        return self.temperature == 0

    @property
    def truncates(self) -> bool:
        """Whether some tokens are never drawn."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def scoring_temperature(self) -> float:
        """The temperature of `rollout_log_probs`: `temperature`, or 1 for greedy decoding."""
        return 1.0 if self.greedy else self.temperature


@dataclass(frozen=True, kw_only=True)
class RolloutConfig(SamplingParams):
    """Generation of the training samples.

    The section is the sampling parameters of the training samples.
    """

    engine: Literal["embedded", "sglang", "vllm", "sft"] = "embedded"
    """Source of responses: Transformers in the ranks, servers, or reference answers (`sft`)."""
    rollout_batch_size: Annotated[int, Ge(1)]
    """Prompts per rollout batch."""
    max_batch_size: Annotated[int, Ge(1)] = 256
    """Sequences that a rank's embedded engine decodes at once."""
    max_staleness: Annotated[int, Ge(0)] = 0
    """Maximum weight updates between sampling and training."""
    overlap: bool = False
    """Generate while training, up to `max_staleness` steps ahead."""
    oversampling: Annotated[float, Ge(1)] = 1.0
    """Groups started per group that a step needs (docs/sglang.md)."""
    offload_trainer: bool | None = None
    """Keep the trainer in host memory during generation; null: with `colocated` servers."""
    environment: UserPath | None = None
    """Import path of an environment (docs/agents.md), in place of the verifier."""
    environment_options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment."""
    max_turns: Annotated[int, Ge(1)] = 8
    """Maximum responses per episode."""
    max_turn_length: Annotated[int, Ge(1)] | None = None
    """Maximum tokens of a turn; null is the rest of `max_response_length`."""
    quantization: QuantizationConfig = field(default_factory=QuantizationConfig)
    """Weights in eight bits for the engine."""

    @property
    def sequences(self) -> int:
        """Responses of a rollout batch."""
        return self.rollout_batch_size * self.n_samples_per_prompt


@dataclass(frozen=True, kw_only=True)
class RoutingConfig:
    """Routing replay and the metrics of a mixture of experts."""

    replay: Literal["none", "r2", "r3"] = "none"
    """Experts in training: the live router's, the old policy's, or the rollout engine's."""
    replay_old_log_probs: bool = True
    """With r3, replay in the pass for old log-probs too."""
    missing_routes: Literal["error", "live"] = "error"
    """With r3, tokens without a route: stop, or use the live router."""
    storage: Literal["device", "host"] = "device"
    """Where a pass keeps its routes until it ends: GPU or pinned host memory."""
    metrics: bool = True
    """Log routing/* (docs/metrics.md)."""
    metric_sequences: Annotated[int, Ge(1)] = 8
    """Sequences per rollout batch whose expert flips are measured without replay."""
    compare_rollout: bool = False
    """Request the rollout engine's routes, for routing/rollout_flip_rate."""
    perturbation: UserPath | None = None
    """Import path of your perturbation (docs/extending.md)."""
    perturbation_options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of `perturbation`."""

    @property
    def uses_routes(self) -> bool:
        """Whether training passes replay or measure routes."""
        return self.replay != "none" or self.metrics

    @property
    def needs_rollout_routes(self) -> bool:
        """Whether the rollout engine must return its routes."""
        return self.replay == "r3" or self.compare_rollout
