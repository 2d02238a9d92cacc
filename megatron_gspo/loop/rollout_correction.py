"""The mismatch between the rollout engine's log-probs and the training engine's: measured, and
corrected on request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from megatron_gspo.algorithms import (
    RatioHistogram,
    Segments,
    mismatch_metrics,
    ratio_histograms,
    sequence_divergence_mask,
    sequence_importance_weights,
    sequence_rejection_mask,
    token_divergence_mask,
    token_importance_weights,
    token_rejection_mask,
)
from megatron_gspo.config import AlgorithmConfig, ConfigError
from megatron_gspo.data.sample_batch import SampleBatch
from megatron_gspo.loop.ratio_quantiles import added_histograms, quantiles_over_ranks


@dataclass(frozen=True)
class _Tokens:
    """Response tokens of the samples that this rank holds, concatenated, [T] each; ids: which
    of them, 0 .. count-1.
    """

    log_probs: Tensor
    rollout: Tensor
    mask: Tensor
    ids: Tensor
    count: int

    @classmethod
    def of(cls, batch: SampleBatch, log_probs: Mapping[int, np.ndarray]) -> _Tokens:
        samples = batch.samples
        lengths = [sample.response_length for sample in samples]
        none = [np.zeros(0, dtype=np.float32)]
        return cls(
            torch.from_numpy(np.concatenate([log_probs[i] for i in batch.held] or none)),
            torch.from_numpy(
                np.concatenate([sample.rollout_log_probs for sample in samples] or none)
            ),
            torch.from_numpy(
                np.concatenate(
                    [sample.loss_mask for sample in samples] or [np.zeros(0, dtype=bool)]
                )
            ),
            torch.from_numpy(np.repeat(np.arange(len(samples)), lengths)),
            len(samples),
        )

    @property
    def segments(self) -> Segments:
        return Segments(self.mask, self.ids, self.count)

    def split(self, values: Tensor, batch: SampleBatch) -> dict[int, np.ndarray]:
        """[T] as one array for each held sample, by position."""
        parts = np.split(
            values.numpy(), np.cumsum(np.bincount(self.ids.numpy(), minlength=self.count))[:-1]
        )
        return dict(zip(batch.held, parts, strict=False))


def mismatch(batch: SampleBatch, log_probs: Mapping[int, np.ndarray]) -> dict[str, float]:
    """``mismatch/*``: differences between the rollout engine's log-probs and ``log_probs`` [R] of
    the training engine, by position. Empty if the engine gives none. A collective of the batch's
    group.
    """
    if batch.lacks("rollout_log_probs"):
        return {}
    count = max(int(batch.table["trained"].sum(dtype=np.int64)), 1)
    totals: dict[str, float] = {}
    histograms: dict[str, RatioHistogram] = {}
    largest = 0.0
    for piece in batch.pieces():
        tokens = _Tokens.of(piece, log_probs)
        both = tokens.log_probs, tokens.rollout
        shares = mismatch_metrics(both[0].double(), both[1].double(), tokens.mask, num_tokens=count)
        # NaN stays.
        largest = float(np.maximum(largest, float(shares.pop("mismatch/abs_diff_max"))))
        totals = {name: totals.get(name, 0.0) + float(value) for name, value in shares.items()}
        histograms = added_histograms(histograms, ratio_histograms(*both, tokens.mask, tokens.ids))
    metrics = dict(zip(totals, batch.sum(*totals.values()), strict=True))
    metrics["mismatch/abs_diff_max"] = batch.max(largest)[0]
    return metrics | {
        f"mismatch/{name}": v for name, v in quantiles_over_ranks(histograms, batch).items()
    }


def correct_mismatch(
    batch: SampleBatch, algorithm: AlgorithmConfig
) -> tuple[SampleBatch, dict[str, float]]:
    """Apply ``algorithm.rollout_rs`` and ``rollout_is`` to samples with old log-probs and
    advantages.

    Rejected tokens leave ``loss_mask`` first, so that ``|y_i|``, N and M decrease with them; the
    importance weights are those of the remaining tokens. A response without a trained token still
    counts in its group's mean and std: its reward is known. Whole samples are compared, before they
    are cut into batches, so the result doesn't depend on the cut. A collective of the batch's
    group.
    """
    metrics: dict[str, float] = {}
    if algorithm.needs_rollout_log_probs and batch.lacks("rollout_log_probs"):
        raise ConfigError(
            "algorithm.name",
            algorithm.name,
            "the engine gives no log-probs",
            "use another, as dr_grpo",
        )
    for key, apply in (("rollout_rs", _reject), ("rollout_is", _weight)):
        if (level := getattr(algorithm, key)) == "none":
            continue
        if batch.lacks("rollout_log_probs"):
            raise ConfigError(
                f"algorithm.{key}", level, "the engine gives no log-probs", "set it to none"
            )
        tokens = _Tokens.of(batch, {i: sample.old_log_probs for i, sample in batch.held.items()})
        batch, correction_metrics = apply(algorithm, batch, tokens)
        metrics |= correction_metrics
    return batch, metrics


def _reject(
    algorithm: AlgorithmConfig, batch: SampleBatch, tokens: _Tokens
) -> tuple[SampleBatch, dict[str, float]]:
    """Exclude what the engines score too differently: from ``loss_mask``, or with
    ``rollout_rs_denominator: all`` by an advantage of 0."""
    kept = _kept(algorithm, tokens)
    if algorithm.rollout_rs_denominator == "all":
        counts = tokens.split(kept | ~tokens.mask, batch)
        left = batch.map(
            lambda i, sample: replace(sample, advantages=sample.advantages * counts[i])
        )
    else:
        masks = tokens.split(kept, batch)
        left = batch.map(lambda i, sample: replace(sample, loss_mask=masks[i])).with_trained()
    had, has = (len(tokens.ids[mask].unique()) for mask in (tokens.mask, kept))
    before, after, had, has = batch.sum(int(tokens.mask.sum()), int(kept.sum()), had, has)
    return left, {
        "rollout_rs/tokens": (before - after) / max(before, 1),
        "rollout_rs/sequences": (had - has) / max(had, 1),
    }


def _kept(algorithm: AlgorithmConfig, tokens: _Tokens) -> Tensor:
    """Where trained tokens are left by ``rollout_rs``: [T] bool."""
    both = (tokens.log_probs, tokens.rollout)
    kind = algorithm.rollout_rs
    if algorithm.rollout_rs_divergence is not None:
        largest = algorithm.rollout_rs_divergence
        if kind == "token_binary_kl":
            return token_divergence_mask(*both, tokens.mask, largest=largest)
        return sequence_divergence_mask(*both, tokens.segments, largest=largest)
    low, high = algorithm.rollout_rs_band
    if kind == "token":
        return token_rejection_mask(*both, tokens.mask, lower=low, upper=high)
    return sequence_rejection_mask(*both, tokens.segments, lower=low, upper=high)


def _weight(
    algorithm: AlgorithmConfig, batch: SampleBatch, tokens: _Tokens
) -> tuple[SampleBatch, dict[str, float]]:
    """Multiply the advantages by the importance weights. The metrics are over what has a weight of
    its own: trained tokens, or sequences with a trained token."""
    low = algorithm.rollout_is_threshold_lower
    cap = algorithm.rollout_is_threshold
    both = tokens.log_probs, tokens.rollout
    if algorithm.rollout_is == "token":
        weights = token_importance_weights(*both, tokens.mask, threshold=cap, lower=low)
        units = weights[tokens.mask]
    else:
        weights = sequence_importance_weights(*both, tokens.segments, threshold=cap, lower=low)
        # Any token's: they are equal.
        last = torch.zeros(tokens.count).index_copy(0, tokens.ids, weights)
        units = last[tokens.ids[tokens.mask].unique()]
    parts = tokens.split(weights, batch)
    weighted = batch.map(lambda i, sample: replace(sample, advantages=sample.advantages * parts[i]))
    w = units.double()
    count, total, squares, cut = batch.sum(
        len(w), float(w.sum()), float(w.square().sum()), float((units >= cap).sum())
    )
    least, most = batch.max(*(-float(w.min()), float(w.max())) if len(w) else (-np.inf, -np.inf))
    if not count:
        return weighted, {}
    return weighted, {
        "rollout_is/weight_mean": total / count,
        "rollout_is/weight_min": -least,
        "rollout_is/weight_max": most,
        "rollout_is/effective_sample_size": total**2 / squares / count,
        "rollout_is/truncated": cut / count,
    }
