"""From tokens to one number: segment sums, and what a token or a sequence counts for in a mini-batch's figures."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .objective import Objective


def segment_sums(values: Tensor, segment_ids: Tensor, num_segments: int) -> Tensor:
    """Sum `values` [T], floating or bool, by sequence: [num_segments] float64.

    float64 because a GSPO log-ratio is a small difference of large sums next to a clip of 3e-4, and so that
    the order in which a GPU adds does not show in the float32 result. A bool is counted in int32, which is as
    exact and three times as fast on a CPU.
    """
    dtype = torch.int32 if values.dtype == torch.bool else torch.float64
    zeros = torch.zeros(num_segments, dtype=dtype, device=values.device)
    return zeros.index_add(0, segment_ids, values.to(dtype)).double()


@dataclass(frozen=True)
class Shares:
    """What a trained token counts for in the global mini-batch; no gradient.

    Attributes:
        of_tokens: [], 1 / num_tokens: over all trained tokens of all ranks and micro-batches it adds up to 1.
        of_sequences: [num_segments], 1 / (num_sequences * |y_i|): likewise, and a sequence that spans context
            ranks is counted once, each rank holding the part n_owned / |y_i| of it.
        of_objective: the weight in the objective, by loss_agg_mode: [], or [T] where it differs by sequence.
    """

    of_tokens: Tensor
    of_sequences: Tensor
    of_objective: Tensor


def token_shares(
    objective: Objective,
    segment_ids: Tensor,
    lengths: Tensor,
    num_sequences: int | Tensor,
    num_tokens: int | Tensor,
    dtype: torch.dtype,
) -> Shares:
    """Shares of the tokens of `segment_ids` [T]; `lengths` [num_segments] float64 is |y_i| over all ranks.

    A sequence with no trained token has length 0, and a share as if it had one: never a division by 0.
    """
    one = lengths.new_ones(())
    of_tokens = (one / num_tokens).to(dtype)
    of_sequences = (one / (lengths.clamp_min(1) * num_sequences)).to(dtype)
    if objective.loss_agg_mode == "seq-mean-token-mean":
        of_objective = of_sequences.index_select(0, segment_ids)
    elif objective.loss_agg_mode == "token-mean":
        of_objective = of_tokens
    else:
        if objective.loss_scale_factor is None:
            raise ValueError(
                "loss_scale_factor = None with loss_agg_mode = 'seq-mean-token-sum-norm': set the longest response "
                "in tokens"
            )
        of_objective = (one / (num_sequences * objective.loss_scale_factor)).to(dtype)
    return Shares(of_tokens, of_sequences, of_objective)


def share(values: Tensor, shares: Tensor) -> Tensor:
    """`sum(values * shares)`, a scalar in the dtype of `shares`, which is [] or has the shape of `values`.

    `values`: bool or floating; 0 where nothing is trained, unless `shares` is.
    """
    counted = values.dtype == torch.bool  # without a copy as int64 or floating
    if shares.dim() == 0:
        return values.sum(dtype=torch.int32 if counted else None) * shares
    return (torch.where(values, shares, 0) if counted else values * shares).sum()
