"""Aggregation of token values: the weight of each token in a mini-batch's figures, and weighted
sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_gspo.objectives.objective import Objective


@dataclass(frozen=True)
class TokenWeights:
    """The weight of a trained token in the figures of the global mini-batch; no gradient."""

    token: Tensor
    """[], 1 / num_tokens. Over the trained tokens of all ranks and micro-batches it sums to 1."""

    sequence: Tensor
    """[num_segments], 1 / (num_sequences * |y_i|). It sums to 1 as well. A sequence that spans
    context ranks is counted once: each rank holds n_owned / |y_i| of it."""

    objective: Tensor
    """The weight in the objective, by loss_agg_mode: [], or [T] where it differs by sequence."""


def token_weights(
    objective: Objective,
    segment_ids: Tensor,
    lengths: Tensor,
    num_sequences: int | Tensor,
    num_tokens: int | Tensor | None,
    dtype: torch.dtype,
) -> TokenWeights:
    """Weights of the tokens of `segment_ids` [T].

    Args:
        lengths: [num_segments] float64, the trained tokens |y_i| of each sequence over all context
            ranks. A sequence without one is weighted as if it had one, which avoids a division by
            0.
        num_sequences, num_tokens: counts of the global mini-batch. num_tokens None: the sum of
            `lengths`.
        dtype: of the weights.

    Raises:
        ValueError: loss_scale_factor is None and the aggregation divides by it.
    """
    if num_tokens is None:
        num_tokens = lengths.sum().clamp_min(1)
    one = lengths.new_ones(())
    token = (one / num_tokens).to(dtype)
    sequence = (one / (lengths.clamp_min(1) * num_sequences)).to(dtype)
    if objective.loss_agg_mode == "seq-mean-token-mean":
        weight = sequence.index_select(0, segment_ids)
    elif objective.loss_agg_mode == "token-mean":
        weight = token
    else:
        if objective.loss_scale_factor is None:
            raise ValueError(
                "loss_scale_factor = None with loss_agg_mode = 'seq-mean-token-sum-norm': set the"
                " longest response in tokens"
            )
        weight = (one / (num_sequences * objective.loss_scale_factor)).to(dtype)
    return TokenWeights(token, sequence, weight)


def weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """`sum(values * weights)`: a scalar in the dtype of `weights`, which is [] or has the shape of
    `values`.

    `values`: bool or floating. Untrained positions must be 0 in `values` or in `weights`.
    """
    if weights.dim() == 0:
        return values.sum() * weights
    return (values * weights).sum()
