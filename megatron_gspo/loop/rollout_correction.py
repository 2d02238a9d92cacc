"""The mismatch between the rollout engine's log-probs and the training engine's: measured, and
corrected on request.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from megatron_gspo.algorithms import (
    RatioHistogram,
    Segments,
    add_ratios,
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
from megatron_gspo.data.columns import Columns
from megatron_gspo.data.training_batch import TrainingBatch


@dataclass(frozen=True)
class _Tokens:
    """Response tokens of this rank as tensors [T]: log-probs of both engines, and which are
    trained."""

    log_probs: Tensor
    rollout: Tensor
    mask: Tensor
    segments: Segments

    @classmethod
    def of(cls, responses: Columns, log_probs: str) -> _Tokens:
        """log_probs: the column with those of the training engine."""
        mask = torch.from_numpy(responses["loss_mask"])
        ids = torch.from_numpy(responses.sample_ids)
        return cls(
            torch.from_numpy(responses[log_probs]),
            torch.from_numpy(responses["rollout_log_probs"]),
            mask,
            Segments(mask, ids, len(responses)),
        )

    def with_mask(self, mask: Tensor) -> _Tokens:
        """The same tokens with others trained: [T] bool."""
        return replace(self, mask=mask, segments=replace(self.segments, loss_mask=mask))


def mismatch(
    batch: TrainingBatch, log_probs: np.ndarray, ratios: dict[str, RatioHistogram]
) -> dict[str, float]:
    """``mismatch/*``: differences between the rollout engine's log-probs and ``log_probs`` [T] of
    the training engine. Empty if the engine gives none. A collective of the batch's group.

    Their ratios are added to ``ratios``, under the names of their quantiles.
    """
    if batch.lacks("rollout_log_probs"):
        return {}
    count = max(int(batch.table["trained"].sum(dtype=np.int64)), 1)
    totals: dict[str, float] = {}
    histograms = ratio_histograms()
    largest = 0.0
    responses = batch.responses.only("rollout_log_probs", "loss_mask")
    for piece in responses.with_column("log_probs", log_probs).pieces():
        tokens = _Tokens.of(piece, "log_probs")
        shares = mismatch_metrics(
            tokens.log_probs.double(), tokens.rollout.double(), tokens.mask, num_tokens=count
        )
        # NaN stays.
        largest = float(np.maximum(largest, float(shares.pop("mismatch/abs_diff_max"))))
        totals = {name: totals.get(name, 0.0) + float(value) for name, value in shares.items()}
        add_ratios(
            histograms,
            tokens.log_probs,
            tokens.rollout,
            tokens.mask,
            tokens.segments.segment_ids,
        )
    metrics = dict(zip(totals, batch.sum(*totals.values()), strict=True))
    metrics["mismatch/abs_diff_max"] = batch.max(largest)[0]
    ratios.update({f"mismatch/ratio_{level}": of_level for level, of_level in histograms.items()})
    return metrics


def correct_mismatch(
    batch: TrainingBatch, algorithm: AlgorithmConfig
) -> tuple[TrainingBatch, dict[str, float]]:
    """Apply ``algorithm.rollout_rs`` and ``rollout_is`` to a batch with old log-probs and
    advantages.

    Tokens are rejected first, and the importance weights are those of the tokens that are left.
    Rejected tokens leave ``loss_mask``, so that ``|y_i|``, N and M decrease with them, or with
    ``rollout_rs_denominator: all`` get an advantage of 0. A response without a trained token still
    counts in its group's mean and std: its reward is known. Whole samples are compared, before they
    are cut into batches, so the result doesn't depend on the cut. A collective of the batch's
    group.
    """
    metrics: dict[str, float] = {}
    if algorithm.score_centering:
        batch, metrics = _with_centering(batch, algorithm)
    if algorithm.needs_rollout_log_probs and batch.lacks("rollout_log_probs"):
        raise ConfigError(
            "algorithm.name",
            algorithm.name,
            "the engine gives no log-probs",
            "use another, as dr_grpo",
        )
    for key in ("rollout_rs", "rollout_is"):
        level = getattr(algorithm, key)
        if level != "none" and batch.lacks("rollout_log_probs"):
            raise ConfigError(
                f"algorithm.{key}", level, "the engine gives no log-probs", "set it to none"
            )
    if algorithm.rollout_rs == algorithm.rollout_is == "none":
        return batch, metrics
    tokens = _Tokens.of(batch.responses, "old_log_probs")
    if algorithm.rollout_rs != "none":
        kept = _kept(algorithm, tokens)
        batch, rejection_metrics = _reject(algorithm, batch, tokens, kept)
        metrics |= rejection_metrics
        tokens = tokens.with_mask(kept)
    if algorithm.rollout_is != "none":
        batch, weight_metrics = _weight(algorithm, batch, tokens)
        metrics |= weight_metrics
    return batch, metrics


def _with_centering(
    batch: TrainingBatch, algorithm: AlgorithmConfig
) -> tuple[TrainingBatch, dict[str, float]]:
    """The batch with ``centering_advantages``: those before weights by token; and
    ``score_centering/*``."""
    responses = batch.responses
    if len(responses) and "rollout_top_ids" not in responses:
        problem = "the engine gives no log-probs of its most likely ids"
        raise ConfigError(
            "algorithm.score_centering", algorithm.score_centering, problem, "set it to 0"
        )
    mass = 0.0
    trained = responses["loss_mask"]
    if len(responses):
        mass = float(np.exp(responses["rollout_top_log_probs"][trained], dtype=np.float64).sum())
    total, count = batch.sum(mass, int(trained.sum()))
    metrics = {"score_centering/top_k_mass": total / max(count, 1)}
    return batch.with_column("centering_advantages", responses["advantages"]), metrics


def _with_weights(batch: TrainingBatch, weights: np.ndarray, *, by_token: bool) -> TrainingBatch:
    """The advantages times weights [T]. Those of tokens are not in the centering's advantages: the
    centering has the weight of every token of the vocabulary."""
    names = ["advantages"]
    if not by_token and "centering_advantages" in batch.responses:
        names.append("centering_advantages")
    for name in names:
        batch = batch.with_column(name, batch.responses[name] * weights)
    return batch


def _reject(
    algorithm: AlgorithmConfig, batch: TrainingBatch, tokens: _Tokens, kept: Tensor
) -> tuple[TrainingBatch, dict[str, float]]:
    """Exclude the trained tokens that are not kept [T]: from ``loss_mask``, or with
    ``rollout_rs_denominator: all`` by an advantage of 0."""
    if algorithm.rollout_rs_denominator == "all":
        counts = (kept | ~tokens.mask).numpy()
        left = _with_weights(batch, counts, by_token=algorithm.rollout_rs.startswith("token"))
    else:
        left = batch.with_loss_mask(kept.numpy())
    ids = tokens.segments.segment_ids
    tokens_before, tokens_after, sequences_before, sequences_after = batch.sum(
        int(tokens.mask.sum()),
        int(kept.sum()),
        len(ids[tokens.mask].unique()),
        len(ids[kept].unique()),
    )
    return left, {
        "rollout_rs/tokens": (tokens_before - tokens_after) / max(tokens_before, 1),
        "rollout_rs/sequences": (sequences_before - sequences_after) / max(sequences_before, 1),
    }


def _kept(algorithm: AlgorithmConfig, tokens: _Tokens) -> Tensor:
    """Where trained tokens are left by ``rollout_rs``: [T] bool."""
    both = (tokens.log_probs, tokens.rollout)
    rule = algorithm.rollout_rs
    if algorithm.rollout_rs_divergence is not None:
        largest = algorithm.rollout_rs_divergence
        if rule == "token_binary_kl":
            return token_divergence_mask(*both, tokens.mask, largest=largest)
        return sequence_divergence_mask(*both, tokens.segments, largest=largest)
    low, high = algorithm.rollout_rs_band
    if rule == "token":
        return token_rejection_mask(*both, tokens.mask, lower=low, upper=high)
    return sequence_rejection_mask(*both, tokens.segments, lower=low, upper=high)


def _weight(
    algorithm: AlgorithmConfig, batch: TrainingBatch, tokens: _Tokens
) -> tuple[TrainingBatch, dict[str, float]]:
    """Multiply the advantages by the importance weights. The metrics count each weight once: that of
    a trained token, or of a sequence with a trained token."""
    lower = algorithm.rollout_is_threshold_lower
    threshold = algorithm.rollout_is_threshold
    by_token = algorithm.rollout_is == "token"
    if by_token:
        weights = token_importance_weights(
            tokens.log_probs, tokens.rollout, tokens.mask, threshold=threshold, lower=lower
        )
        counted_weights = weights[tokens.mask]
    else:
        weights = sequence_importance_weights(
            tokens.log_probs, tokens.rollout, tokens.segments, threshold=threshold, lower=lower
        )
        # The tokens of a sequence have equal weights, so any of them is that of the sequence.
        segment_ids = tokens.segments.segment_ids
        sequence_weights = torch.zeros(len(batch.responses)).index_copy(0, segment_ids, weights)
        counted_weights = sequence_weights[segment_ids[tokens.mask].unique()]
    weighted = _with_weights(batch, weights.numpy(), by_token=by_token)
    truncated = counted_weights >= threshold
    counted_weights = counted_weights.double()
    count, total, squares, num_truncated = batch.sum(
        len(counted_weights),
        float(counted_weights.sum()),
        float(counted_weights.square().sum()),
        float(truncated.sum()),
    )
    smallest = np.inf
    largest = -np.inf
    if len(counted_weights):
        smallest = float(counted_weights.min())
        largest = float(counted_weights.max())
    negated_smallest, largest = batch.max(-smallest, largest)
    if not count:
        return weighted, {}
    return weighted, {
        "rollout_is/weight_mean": total / count,
        "rollout_is/weight_min": -negated_smallest,
        "rollout_is/weight_max": largest,
        # All weights may be too small for a float.
        "rollout_is/effective_sample_size": total**2 / squares / count if squares else 0.0,
        "rollout_is/truncated": num_truncated / count,
    }
