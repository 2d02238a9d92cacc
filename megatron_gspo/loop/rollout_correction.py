"""The mismatch between the rollout engine's log-probs and the training engine's: measured, and corrected on request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from megatron_gspo.algorithms import (
    Segments,
    effective_sample_size,
    mismatch_metrics,
    ratio_quantiles,
    sequence_importance_weights,
    sequence_rejection_mask,
    token_importance_weights,
    token_rejection_mask,
)
from megatron_gspo.config import AlgorithmConfig, ConfigError
from megatron_gspo.data.sample import Sample


@dataclass(frozen=True)
class _Tokens:
    """Response tokens of whole samples, concatenated, [T] each; ids: which sample, 0 .. count-1."""

    log_probs: Tensor
    rollout: Tensor
    mask: Tensor
    ids: Tensor
    count: int

    @classmethod
    def of(cls, samples: Sequence[Sample], log_probs: Sequence[np.ndarray]) -> _Tokens:
        lengths = [sample.response_length for sample in samples]
        return cls(
            torch.from_numpy(np.concatenate(log_probs)),
            torch.from_numpy(np.concatenate([sample.rollout_log_probs for sample in samples])),
            torch.from_numpy(np.concatenate([sample.loss_mask for sample in samples])),
            torch.from_numpy(np.repeat(np.arange(len(samples)), lengths)),
            len(samples),
        )

    @property
    def segments(self) -> Segments:
        return Segments(self.mask, self.ids, self.count)

    def split(self, values: Tensor) -> list[np.ndarray]:
        """[T] as one array for each sample."""
        return np.split(values.numpy(), np.cumsum(np.bincount(self.ids.numpy(), minlength=self.count))[:-1])


def mismatch(samples: Sequence[Sample], log_probs: Sequence[np.ndarray]) -> dict[str, float]:
    """``mismatch/*``: differences between the rollout engine's log-probs and ``log_probs`` [R] of the training engine.

    Empty if the engine gives none.
    """
    if any(sample.rollout_log_probs is None for sample in samples):
        return {}
    tokens = _Tokens.of(samples, log_probs)
    found = mismatch_metrics(
        tokens.log_probs, tokens.rollout, tokens.mask, num_tokens=max(int(tokens.mask.sum()), 1)
    )
    ratios = ratio_quantiles(tokens.log_probs, tokens.rollout, tokens.mask, tokens.ids)
    return {name: float(value) for name, value in found.items()} | {f"mismatch/{n}": v for n, v in ratios.items()}


def correct_mismatch(
    samples: Sequence[Sample], algorithm: AlgorithmConfig
) -> tuple[list[Sample], dict[str, float]]:
    """Apply ``algorithm.rollout_rs`` and ``rollout_is`` to samples with old log-probs and advantages.

    Rejected tokens leave ``loss_mask`` first, so that ``|y_i|``, N and M decrease with them; the importance weights are
    those of the remaining tokens. A response without a trained token still counts in its group's mean and std: its
    reward is known. Whole samples are compared, before they are cut into batches, so the result doesn't depend on the
    cut.
    """
    corrected = list(samples)
    metrics: dict[str, float] = {}
    for key, apply in (("rollout_rs", _reject), ("rollout_is", _weight)):
        if (level := getattr(algorithm, key)) == "none":
            continue
        if any(sample.rollout_log_probs is None for sample in corrected):
            raise ConfigError(f"algorithm.{key}", level, "the engine gives no log-probs", "set it to none")
        tokens = _Tokens.of(corrected, [sample.old_log_probs for sample in corrected])
        corrected, found = apply(algorithm, corrected, tokens)
        metrics |= found
    return corrected, metrics


def _reject(
    algorithm: AlgorithmConfig, samples: Sequence[Sample], tokens: _Tokens
) -> tuple[list[Sample], dict[str, float]]:
    low, high = algorithm.rollout_rs_band
    both = tokens.log_probs, tokens.rollout
    if algorithm.rollout_rs == "token":
        kept = token_rejection_mask(*both, tokens.mask, lower=low, upper=high)
    else:
        kept = sequence_rejection_mask(*both, tokens.segments, lower=low, upper=high)
    masked = [replace(sample, loss_mask=part) for sample, part in zip(samples, tokens.split(kept), strict=True)]
    had, has = (sum(bool(sample.loss_mask.any()) for sample in either) for either in (samples, masked))
    return masked, {
        "rollout_rs/tokens": 1.0 - float(kept.sum()) / max(int(tokens.mask.sum()), 1) if had else 0.0,
        "rollout_rs/sequences": (had - has) / max(had, 1),
    }


def _weight(
    algorithm: AlgorithmConfig, samples: Sequence[Sample], tokens: _Tokens
) -> tuple[list[Sample], dict[str, float]]:
    """Multiply the advantages by the importance weights. The metrics are over what has a weight of its own: trained
    tokens, or sequences with a trained token."""
    cap = algorithm.rollout_is_threshold
    both = tokens.log_probs, tokens.rollout
    if algorithm.rollout_is == "token":
        weights = token_importance_weights(*both, tokens.mask, threshold=cap)
        units = weights[tokens.mask]
    else:
        weights = sequence_importance_weights(*both, tokens.segments, threshold=cap)
        last = torch.zeros(tokens.count).index_copy(0, tokens.ids, weights)  # any token's: they are equal
        units = last[tokens.ids[tokens.mask].unique()]
    parts = zip(samples, tokens.split(weights), strict=True)
    weighted = [replace(sample, advantages=sample.advantages * part) for sample, part in parts]
    if not units.numel():
        return weighted, {}
    return weighted, {
        "rollout_is/weight_mean": float(units.mean()),
        "rollout_is/weight_min": float(units.min()),
        "rollout_is/weight_max": float(units.max()),
        "rollout_is/effective_sample_size": effective_sample_size(units),
        "rollout_is/truncated": float((units >= cap).float().mean()),
    }
