"""What the equivalence tests run on every rank: a mini-batch, its loss, gradients, metrics, weights after steps."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_gspo.algorithms import preset
from megatron_gspo.data.sample import Sample
from megatron_gspo.mcore.batches import micro_batches
from megatron_gspo.mcore.forward import unwrap
from megatron_gspo.mcore.groups import Layout, initialize
from megatron_gspo.mcore.model import ModelSettings
from megatron_gspo.mcore.policy import DataParallelSettings, OptimizerSettings, build_policy
from megatron_gspo.mcore.step import (
    Batching,
    compute_log_probs,
    forward_backward,
    summed_metrics,
    train_mini_batch,
)
from megatron_gspo.mcore.weights import export_weights


@dataclass(frozen=True)
class Case:
    """A layout and the settings that may not change the result."""

    world_size: int = 1
    layout: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    max_tokens: int = 64
    micro_batch_size: int | None = None
    objective: str = "gspo"
    overrides: dict[str, Any] = field(default_factory=dict)
    steps: int = 0
    distributed_optimizer: bool = False

    @property
    def name(self) -> str:
        parts = [f"{key}{value}" for key, value in self.layout.items()] or ["single"]
        if self.world_size > 1:
            parts.append(f"world{self.world_size}")
        parts += [f"{key}_{value}" for key, value in self.model.items()]
        defaults = asdict(Case())
        parts += [
            f"{key}_{value}"
            for key, value in asdict(self).items()
            if key not in ("world_size", "layout", "model") and value != defaults[key]
        ]
        return "-".join(parts)


def make_samples(seed: int = 0, count: int = 10, vocab_size: int = 96, per_token: bool = False) -> list[Sample]:
    """A mini-batch of unequal lengths, masks with holes, a response of one token and one without a trained token."""
    g = np.random.default_rng(seed)
    samples = []
    for i in range(count):
        prompt, response = int(g.integers(2, 9)), int(g.integers(2, 14)) if i else 1
        mask = g.random(response) < 0.8
        mask[0] = True
        if i == 1:
            mask[:] = False
        advantage = g.normal(size=response) if per_token else np.full(response, g.normal())
        samples.append(
            Sample(
                prompt_index=i // 2,
                sample_index=i % 2,
                tokens=g.integers(2, vocab_size, prompt + response),
                prompt_length=prompt,
                loss_mask=mask,
                rollout_log_probs=None,
                finish_reason="stop",
                advantages=advantage.astype(np.float32),
            )
        )
    return samples


def with_old_log_probs(
    samples: list[Sample], log_probs: list[np.ndarray], spread: float, seed: int = 1
) -> list[Sample]:
    """Old log-probs a little off the current ones, so that some sequences are clipped and some not; likewise ref."""
    g = np.random.default_rng(seed)
    for sample, value in zip(samples, log_probs, strict=True):
        shift = g.normal() * spread
        sample.old_log_probs = (value + shift + g.normal(size=value.shape) * spread).astype(np.float32)
        sample.ref_log_probs = (value + g.normal(size=value.shape) * 0.1).astype(np.float32)
    return samples


def build(path: str, case: Case) -> Any:
    """The policy of one rank in the case's layout."""
    layout = Layout(**case.layout)
    return build_policy(
        path,
        layout,
        initialize(layout, seed=1),
        model=ModelSettings(**case.model),
        data_parallel=DataParallelSettings(distributed_optimizer=case.distributed_optimizer),
        optimizer=OptimizerSettings(lr=1e-3, weight_decay=0.1, clip_grad=1.0, total_steps=8),
    )


def run_case(rank: int, world_size: int, path: str, case: Case, samples: list[Sample]) -> dict[str, Any]:
    """Log-probs, then loss, metrics and every gradient of the mini-batch, then ``case.steps`` optimizer steps."""
    policy = build(path, case)
    batching = Batching(case.max_tokens, case.micro_batch_size)
    objective = preset(case.objective, **case.overrides)
    log_probs, entropy = compute_log_probs(policy, samples, batching, temperature=1.0, with_entropy=True)
    batches = micro_batches(
        samples,
        policy.config,
        policy.groups,
        max_tokens=case.max_tokens,
        micro_batch_size=case.micro_batch_size,
    )
    outputs = forward_backward(policy, objective, batches, temperature=1.0)
    metrics = summed_metrics([output["metrics"] for output in outputs], policy)
    chunks = [unwrap(chunk) for chunk in policy.chunks]
    gradients = (
        {
            name: value.clone()
            for name, value in export_weights(
                chunks, policy.family, policy.shape, policy.groups, value=lambda p: p.main_grad
            )
        }
        if not case.distributed_optimizer
        else {}
    )
    steps = [train_mini_batch(policy, samples, objective, batching, temperature=1.0).metrics for _ in range(case.steps)]
    weights: dict[str, Tensor] = {name: value.clone() for name, value in policy.weights()} if case.steps else {}
    keep = rank == 0
    return {
        "log_probs": log_probs,
        "entropy": entropy,
        "metrics": metrics,
        "steps": steps,
        "gradients": gradients if keep else {},
        "weights": weights if keep else {},
        "batches": len(batches.batches),
    }


def max_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Largest absolute difference over all tensors of two dicts with the same keys."""
    assert set(a) == set(b)
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


def stack(values: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate(values))
